# SPDX-License-Identifier: Apache-2.0
"""DPO losses of tables of logits, for the tests."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.losses.dpo import DIVERGENCES, LOSSES, Completion, dpo_loss
from jrl.ops import logprobs_from_logits
from jrl.ops.reductions import LossOut
from jrl.ops.token_reads import read_tokens

SMOOTHING = {"exo_pair": 0.001, "robust": 0.1}
"""Label smoothing of the losses that are nothing without; 0 for the others."""
DEFAULTS: dict[str, Any] = {
    "terms": [("sigmoid", 1.0)],
    "beta": 0.1,
    "label_smoothing": 0.0,
    "discopop_tau": 0.05,
    "divergence": DIVERGENCES["reverse_kl"],
    "alpha": 0.5,
    "reference_free": False,
    "ld_alpha": None,
    "use_weighting": False,
}


def completions(logits: Any, ref_logits: Any, ids: Any, completion: Any) -> tuple[Completion, Completion]:
    """(chosen, rejected) of rows that stand in halves, chosen ones first: one model output, one shift."""
    targets, mask = jnp.asarray(ids)[:, 1:], jnp.asarray(completion, bool)[:, 1:]
    reads = read_tokens(jnp.asarray(logits)[:, :-1], targets)
    ref = logprobs_from_logits(jnp.asarray(ref_logits)[:, :-1], targets)
    whole = Completion(ref_logprobs=ref, mask=mask, **reads._asdict())
    half = mask.shape[0] // 2
    return jax.tree.map(lambda x: x[:half], whole), jax.tree.map(lambda x: x[half:], whole)


def loss_of(sides: tuple[Completion, Completion], valid: Any = None, **options: Any) -> LossOut:
    """`dpo_loss` at the defaults but for the options; all pairs are valid unless said."""
    if valid is None:
        valid = np.ones(sides[0].mask.shape[0], bool)
    return dpo_loss(*sides, jnp.asarray(valid), **(DEFAULTS | options))


@functools.partial(jax.jit, static_argnames=("beta", "ld_alpha"))
def every_loss(
    sides: tuple[Completion, Completion], valid: Any, beta: float = 0.1, ld_alpha: float | None = None
) -> dict[str, jax.Array]:
    """The mean of each loss, by name: one program for all."""
    found = {}
    for name in LOSSES:
        options = {"label_smoothing": SMOOTHING.get(name, 0.0), "beta": beta, "ld_alpha": ld_alpha}
        out = loss_of(sides, valid, terms=[(name, 1.0)], **options)
        found[name] = out.loss_sum / out.weight
    return found


def sums(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any) -> tuple[Completion, Completion]:
    """Completions of one token each, with these log-probabilities."""

    def side(logprobs: Any, ref_logprobs: Any) -> Completion:
        columns = [jnp.asarray(x, jnp.float32)[:, None] for x in (logprobs, ref_logprobs)]
        zeros = jnp.zeros_like(columns[0])
        yes = jnp.ones(zeros.shape, bool)
        return Completion(*columns, zeros, zeros, zeros, yes, yes)

    return side(chosen, ref_chosen), side(rejected, ref_rejected)
