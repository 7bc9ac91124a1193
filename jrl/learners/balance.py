# SPDX-License-Identifier: Apache-2.0
"""Balance of a mixture's experts, as a term of every learner's loss.

It is a product of two means over the whole optimizer batch, so microbatches do not add it up by themselves. With the
counts of the whole batch fixed, which pass no gradient, what is left is a sum over tokens: then they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.learners.accumulate import Loss, Objective, Rows
from jrl.mesh import hold_split
from jrl.ops.experts import balance_loss
from jrl.typing import ExpertLoad, Mean, Metrics, Params

BALANCE = "router/balance_loss"
_LOAD = "router/load"


def load_metric(load: ExpertLoad | None, mask: Bool[Array, "B T"]) -> Metrics:
    """Load of a microbatch's experts among its metrics, from which `balanced` takes it.

    Args:
      load: Of each row; None where the policy does not count it.
      mask: Of the rows: one without any action is padding, and counts nothing.
    Raises:
      ValueError: If nothing was counted.
    """
    if load is None:
        raise ValueError(
            "`balance_coef` must be 0 for a policy that does not count its experts: make it with `counts_experts=True`."
        )
    counted = jnp.any(mask, axis=1).astype(jnp.float32)
    held: Any = {_LOAD: jax.tree.map(lambda x: jnp.tensordot(counted, x, 1), load)}
    return held


def balanced(objective: Objective, params: Params, microbatches: Sequence[Rows], *, coef: float) -> Objective:
    """The objective with the balance loss of the whole batch, of which each microbatch adds its part.

    Several microbatches take one more pass forward, which counts; one takes none.

    Args:
      objective: Its metrics hold the load, where `coef` is positive.
      params: At which the batch is counted.
      microbatches: All of the batch.
      coef: Weight of the balance loss beside the mean of the objective's; 0: the objective stays as it is.
    Returns:
      An objective whose metrics hold `router/balance_loss` in the place of the load.
    """
    if not coef:
        return objective
    number = sum(rows.ids.shape[0] for rows in microbatches)

    def parts(params: Params, rows: Rows) -> tuple[Float[Array, ""], Float[Array, ""], Metrics, ExpertLoad]:
        loss_sum, weight, metrics = objective(params, rows)
        found: dict[str, Any] = dict(metrics)
        if _LOAD not in found:
            raise ValueError(
                "`router_aux_loss_coef` must be 0 beside a loss of your own, whose pass over the model does not count "
                f"its experts; got {coef}."
            )
        load = found.pop(_LOAD)
        return loss_sum, weight, found, load

    def counted(rows: Rows) -> tuple[Float[Array, ""], ExpertLoad]:
        _, weight, _, load = parts(hold_split(params, rows), rows)
        return jax.lax.stop_gradient((weight, load))

    whole: tuple[Float[Array, ""], ExpertLoad] | None = None
    if number > 1:
        sums = [jax.lax.map(counted, rows) for rows in microbatches]
        whole = jax.tree.map(lambda *stacks: sum(jnp.sum(stack, axis=0) for stack in stacks), *sums)

    def with_balance(params: Params, rows: Rows) -> Loss:
        loss_sum, weight, metrics, load = parts(params, rows)
        total_weight, total = jax.lax.stop_gradient((weight, load)) if whole is None else whole
        part = balance_loss(load, total)
        share = (total.tokens > 0).astype(jnp.float32) / number
        noted = Mean(jax.lax.stop_gradient(part), share)
        return loss_sum + coef * total_weight * part, weight, metrics | {BALANCE: noted}

    return with_balance
