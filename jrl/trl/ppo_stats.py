# SPDX-License-Identifier: Apache-2.0
"""The statistics of a PPO step under TRL's names; `docs/trl_ppo.md` says the unit of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.learners.online import RATIOS
from jrl.losses.policy_gradient import Targets
from jrl.ops.metrics import finalize
from jrl.trl.ppo_math import OF_UPDATE
from jrl.trl.ppo_overrides import OWN
from jrl.typing import Kept, Metrics

_NEGATIVE_KL = -1.0
"""Below this mean KL per sequence, sampling and scoring do not speak of the same policy."""


def train_stats(
    metrics: Metrics, targets: Targets, mask: np.ndarray, *, vf_coef: float
) -> dict[str, np.ndarray]:
    """Statistics for `record_step_stats`: every value has a leading axis of epochs, here of length 1.

    Means are over all actions of all epochs, each counted alike.

    Args:
      metrics: Of the update, ratios included.
      targets: What it learned from, NumPy.
      mask: True on actions.
      vf_coef: Weight of the value loss in the total.
    """
    numbers = finalize(metrics)
    found: dict[str, Any] = {ours: numbers.get(name, math.nan) for ours, name in OF_UPDATE.items()}
    found["loss/total"] = found["loss/policy"] + vf_coef * found["loss/value"]
    advantages, returns, values = (
        np.asarray(x)[mask] for x in (targets.advantages, targets.returns, targets.old_values)
    )
    found |= {"policy/advantages": advantages, "policy/advantages_mean": advantages.mean()}
    found |= {"returns/mean": returns.mean(), "returns/var": _variance(returns)}
    found |= {"val/mean": values.mean(), "val/var": _variance(values)}
    # What a script's own loss says of itself, and what TRL's names mean there.
    found |= {name.removeprefix(OWN): value for name, value in numbers.items() if name.startswith(OWN)}
    kept = metrics.get(f"ppo/{RATIOS}")
    if isinstance(kept, Kept):
        ratios = np.asarray(kept.rows)
        found["policy/ratio"] = ratios[ratios >= 0]
    return {name: np.asarray(value)[None] for name, value in found.items()}


def step_stats(
    kl_coef: float,
    *,
    scores: Any,
    logprobs: Any,
    ref_logprobs: Any,
    non_score_reward: Any,
    train_stats: Mapping[str, Any],
    masks: Any,
    queries: Sequence[Any],
    responses: Sequence[Any],
    kls: Any = None,
) -> dict[str, Any]:
    """All statistics of a step but its times and learning rate; see `PPOTrainer.record_step_stats`."""
    masks, logprobs, ref_logprobs = (np.asarray(x) for x in (masks, logprobs, ref_logprobs))
    real = masks != 0
    kl = np.where(real, logprobs - ref_logprobs if kls is None else np.asarray(kls), 0.0).sum(axis=1)
    if kl.mean() < _NEGATIVE_KL:
        warnings.warn(
            f"The mean KL per sequence is {kl.mean():.2f} nats: sampling and scoring differ. Likely causes: `top_k`, "
            "`top_p`, `temperature` or `min_length` in generation, or responses that are not the model's own.",
            stacklevel=3,
        )
    processed = np.asarray([np.asarray(score).sum() for score in scores], np.float32)
    found: dict[str, Any] = {
        "objective/kl": kl.mean(),
        "objective/kl_dist": kl,
        "objective/logprobs": logprobs,
        "objective/ref_logprobs": ref_logprobs,
        "objective/kl_coef": kl_coef,
        "objective/entropy": np.where(real, -logprobs, 0.0).sum(axis=1).mean(),
        "ppo/mean_non_score_reward": np.asarray(non_score_reward)[real].mean(),
        "ppo/mean_scores": processed.mean(),
        "ppo/std_scores": _deviation(processed),
    }
    found |= {f"ppo/{name}": np.asarray(value).mean(axis=0) for name, value in train_stats.items()}
    if {"ppo/val/error", "ppo/returns/var"} <= found.keys():
        spread = found["ppo/returns/var"]
        found["ppo/val/var_explained"] = 1 - found["ppo/val/error"] / spread if spread else math.nan
    for name, rows in (("queries", queries), ("responses", responses)):
        sizes = np.asarray([len(row) for row in rows], np.float32)
        found[f"tokens/{name}_len_mean"] = sizes.mean()
        found[f"tokens/{name}_len_std"] = _deviation(sizes)
        found[f"tokens/{name}_dist"] = sizes
    return {
        name: value.item() if np.ndim(value) == 0 and hasattr(value, "item") else value
        for name, value in found.items()
    }


def _variance(values: np.ndarray) -> float:
    """Unbiased; 0 of a single value."""
    return float(values.var(ddof=1)) if values.size > 1 else 0.0


def _deviation(values: np.ndarray) -> float:
    """Unbiased; NaN of a single value, whose spread nobody knows."""
    return float(values.std(ddof=1)) if values.size > 1 else math.nan
