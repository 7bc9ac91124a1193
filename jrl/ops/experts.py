# SPDX-License-Identifier: Apache-2.0
"""The load of a mixture's experts, and the loss that balances it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_float
from jrl.typing import ExpertLoad


def expert_load(
    shares: Float[Array, "B L E"], chosen: Int[Array, "B L k"], mask: Bool[Array, "B L"]
) -> ExpertLoad:
    """Load of the experts of one layer, row by row: sums over tokens, so that parts of a batch add up.

    Args:
      shares: Of each token among the experts, as the router has them: in [0, 1], with sum 1.
      chosen: Experts that each token visits, in [0, E).
      mask: True on tokens that count.
    Returns:
      Visits and shares of each expert, and the number of tokens.
    Raises:
      TypeError: If `shares` are whole numbers.
    Reference: Fedus et al. 2021, arXiv:2101.03961, equations 5 and 6, before their division by the tokens.
    Example:
      >>> load = expert_load(jnp.array([[[0.75, 0.25]]]), jnp.array([[[0]]]), jnp.array([[True]]))
      >>> load.visits.tolist(), load.shares.tolist(), load.tokens.tolist()
      ([[1.0, 0.0]], [[0.75, 0.25]], [1.0])
    """
    check_float("shares", shares)
    counts = mask.astype(jnp.float32)
    visits = jax.nn.one_hot(chosen, shares.shape[-1], dtype=jnp.float32).sum(axis=-2)
    # Where padding holds what is no number, it counts nothing all the same.
    shares = jnp.where(mask[:, :, None], shares.astype(jnp.float32), 0.0)
    return ExpertLoad(
        jnp.sum(visits * counts[:, :, None], axis=1), jnp.sum(shares, axis=1), jnp.sum(counts, axis=1)
    )


def balance_loss(load: ExpertLoad, whole: ExpertLoad) -> Float[Array, ""]:
    """Loss that balances the experts: E · Σ_e f_e · P_e, the part of it that some rows have in a batch.

        f_e = visits of expert e per token,  P_e = its mean share,  both over all tokens and layers of the batch

    At a perfect balance it is k, the experts that a token visits. Gradients pass through the shares alone.

    Args:
      load: Of some rows, summed over them: visits and shares (E,), tokens ().
      whole: Of all rows of the batch, likewise. The parts of all rows add up to the loss of the batch.
    Returns:
      The part, at least 0; 0 where the batch has no token.
    Reference: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, with k visits a token as in Mixtral
      (arXiv:2401.04088).
    Example:
      >>> one = ExpertLoad(jnp.array([2.0, 0.0]), jnp.array([1.5, 0.5]), jnp.array(2.0))
      >>> float(balance_loss(one, one))
      1.5
    """
    tokens = jnp.maximum(whole.tokens, 1.0)
    visits = jax.lax.stop_gradient(whole.visits) / tokens
    return whole.visits.shape[-1] * jnp.sum(visits * (load.shares / tokens))
