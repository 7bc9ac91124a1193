# SPDX-License-Identifier: Apache-2.0
"""The golden batch of policy gradients, and every case of it in jrl's parts.

`tests/golden/policy_gradient.json` holds 3 prompts with 4 completions each, of 1 to 6 tokens and two with holes:
scores, log-probabilities of four policies, advantages by 20 estimators, sampler weights, and loss and gradient of 39
objectives in float64. Those with the source "trl" were computed by TRL 1.16's own loss when the file was made; nothing
here runs TRL again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl.losses import KLTerm, Surrogate, Targets, ValueLoss, clipped, reinforce
from jrl.losses.surrogates import cispo, dppo_kl, dppo_tv, plain_ratio, sapo, vespo
from jrl.ops import (
    constant_mean,
    drop_weights,
    geometric_clipped_ratio,
    group_token_shares,
    kl_k3,
    product_ratio,
    sequence_mean,
    sequence_ratio,
    sequence_sum_mean,
    sequence_token_ratio,
    sequence_weights,
    token_mean,
    token_weights,
    truncate_weights,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "policy_gradient.json").read_text())
BATCH, CASES, ADVANTAGES = GOLDEN["batch"], GOLDEN["cases"], GOLDEN["advantages"]
MASK = np.asarray(BATCH["mask"], bool)
GROUPS = np.repeat(np.arange(BATCH["num_prompts"]), BATCH["group_size"])
KEPT = np.asarray(ADVANTAGES["gfpo_shortest2"]["value"]) != 0


class Case(NamedTuple):
    """An objective in parts, as `policy_gradient_loss` takes them, beside what its targets hold."""

    parts: dict[str, Any]
    weights: Callable[..., Any] | None = None
    reads_ref: bool = False
    shares: bool = False
    values: bool = False
    mask: np.ndarray = MASK


def case(surrogate: Surrogate, reduction: Any = token_mean, *, mask: Any = MASK, **parts: Any) -> Case:
    return Case({"surrogate": surrogate, "reduction": reduction, **parts}, mask=mask)


def corrected(weights: Callable[..., Any]) -> Case:
    return case(clipped(clip_range=0.2, clip_range_high=0.28))._replace(weights=weights)


def without_row(row: int) -> np.ndarray:
    mask = MASK.copy()
    mask[row] = False
    return mask


CONSTANT = partial(constant_mean, length=BATCH["constant_length"])
PLAIN, DAPO = clipped(clip_range=0.2), clipped(clip_range=0.2, clip_range_high=0.28)
GFPO = MASK & np.asarray([i in (1, 2, 4, 7, 8, 10) for i in range(12)])[:, None]
WRITTEN: dict[str, Case] = {
    "grpo": case(PLAIN, sequence_mean, kl=KLTerm(0.04, kl_k3)),
    "grpo_kl_ratio": case(PLAIN, sequence_mean, kl=KLTerm(0.04, kl_k3, off_policy=True)),
    "dr_grpo": case(PLAIN, CONSTANT),
    "dapo": case(DAPO),
    "dapo_group_mean": case(DAPO)._replace(shares=True),
    "bnpo": case(PLAIN),
    "two_sided": case(clipped(clip_range=0.2, clip_range_high=0.28, max_ratio=4.0)),
    "dual_clip": case(clipped(clip_range=0.2, dual_clip=3.0)),
    "gspo": case(clipped(clip_range=3e-4, clip_range_high=4e-4), sequence_mean, ratio=sequence_ratio),
    "gspo_wide": case(clipped(clip_range=0.1), sequence_mean, ratio=sequence_ratio),
    "gspo_token_same": case(clipped(clip_range=0.1), sequence_mean, ratio=sequence_token_ratio),
    "gspo_token": case(clipped(clip_range=0.1), sequence_mean, ratio=sequence_token_ratio),
    "cispo": case(cispo(clip_range_high=0.28)),
    "cispo_cap5": case(cispo(clip_range_high=4.0)),
    "sapo": case(sapo(temperature_pos=1.0, temperature_neg=1.05), sequence_mean),
    "gmpo": case(plain_ratio(), sequence_mean, ratio=partial(geometric_clipped_ratio, clip_range=0.4)),
    "luspo": case(clipped(clip_range=0.1), sequence_sum_mean, ratio=sequence_ratio),
    "vespo": case(vespo(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0), ratio=product_ratio),
    "rloo_trl": case(PLAIN, sequence_mean, ratio=product_ratio),
    "rloo": case(PLAIN),
    "reinforce": case(reinforce(), CONSTANT),
    "reinforce_pp": case(PLAIN),
    "reinforce_pp_baseline": case(PLAIN),
    "remax": case(reinforce(), sequence_sum_mean),
    "opo": case(reinforce()),
    "maxrl": case(PLAIN),
    "gfpo": case(DAPO, mask=GFPO),
    "dppo_tv": case(dppo_tv(delta=0.15)),
    "dppo_kl": case(dppo_kl(delta=0.01)),
    "dapo_token_truncate": corrected(lambda *given: truncate_weights(token_weights(*given), cap=1.5)),
    "dapo_token_mask": corrected(lambda *given: drop_weights(token_weights(*given), low=0, high=1.5)),
    "dapo_sequence_truncate": corrected(lambda *given: truncate_weights(sequence_weights(*given), cap=1.6)),
    "dapo_sequence_mask": corrected(lambda *given: drop_weights(sequence_weights(*given), low=0, high=1.6)),
    "dapo_icepop": corrected(lambda *given: drop_weights(token_weights(*given), low=0.5, high=2.0)),
    "dapo_off_policy_mask": case(DAPO, off_policy_threshold=-0.099),
    "ppo": case(PLAIN, value_loss=ValueLoss(0.2, 0.5))._replace(values=True),
    "masked_row_grpo": case(PLAIN, sequence_mean, mask=without_row(6)),
    "masked_row_dr_grpo": case(PLAIN, CONSTANT, mask=without_row(6)),
    "masked_row_dapo": case(PLAIN, mask=without_row(6)),
}


def advantages_of(name: str, mask: np.ndarray = MASK) -> np.ndarray:
    """Advantages by the name of their estimator, one per action; NaN where masked."""
    found = np.asarray(ADVANTAGES[name]["value"])
    found = found if found.ndim == 2 else np.repeat(found[:, None], mask.shape[1], axis=1)
    return np.where(mask, found, np.nan)


def targets_of(name: str, dtype: Any) -> Targets:
    """What a case learns from, with NaN wherever nothing may be read."""
    written = WRITTEN[name]

    def hidden(array: Any) -> Any:
        return jnp.asarray(np.where(written.mask, np.asarray(array), np.nan), dtype)

    old, sampler = hidden(BATCH["old_logprobs"]), hidden(BATCH["sampler_logprobs"])
    mask = jnp.asarray(written.mask)
    return Targets(
        old_logprobs=old,
        old_values=hidden(BATCH["old_values"]) if written.values else None,
        advantages=hidden(advantages_of(CASES[name]["advantages"])),
        returns=hidden(GOLDEN["gae_returns"]) if written.values else None,
        mask=mask,
        ref_logprobs=hidden(BATCH["ref_logprobs"]) if "kl" in written.parts else None,
        sampler_logprobs=sampler if "off_policy_threshold" in written.parts else None,
        weights=None if written.weights is None else written.weights(old, sampler, mask),
        shares=group_token_shares(mask, jnp.asarray(GROUPS)) if written.shares else None,
    )
