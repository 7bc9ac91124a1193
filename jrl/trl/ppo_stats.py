# SPDX-License-Identifier: Apache-2.0
"""The statistics of a PPO step under TRL's names, and the tracker that they go to.

`docs/migrating/trl_ppo.md` says the unit of each.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.learners.online import RATIOS
from jrl.losses.policy_gradient import Targets
from jrl.ops.metrics import finalize
from jrl.trainers.checkpoints import plain
from jrl.trainers.config import without_secrets
from jrl.trainers.loggers import Logger, TensorBoardLogger, WandbLogger
from jrl.trl.ppo_config import PPOConfig
from jrl.trl.ppo_native import StepwisePPO
from jrl.trl.ppo_overrides import OWN
from jrl.typing import Kept, Metrics

OF_UPDATE = {
    "loss/policy": "ppo/policy_loss",
    "loss/value": "ppo/value_loss",
    "policy/entropy": "ppo/entropy",
    "policy/approxkl": "ppo/approx_kl_k2",
    "policy/policykl": "ppo/policy_kl",
    "policy/clipfrac": "ppo/clip_fraction",
    "val/vpred": "ppo/value_mean",
    "val/error": "ppo/value_error",
    "val/clipfrac": "ppo/value_clip_fraction",
}
"""TRL's name of a statistic → jrl's metric, of a minibatch and of a whole update."""
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
    """Unbiased; NaN of a single value, which has no spread."""
    return float(values.std(ddof=1)) if values.size > 1 else math.nan


class Clock:
    """Seconds between laps; a lap ends when the arrays that it made are there."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._times: dict[str, float] = {}

    def lap(self, name: str, made: Any) -> None:
        """Ends a lap."""
        jax.block_until_ready(made)
        now = time.perf_counter()
        self._times[f"time/ppo/{name}"], self._last = now - self._last, now

    def times(self) -> dict[str, float]:
        """All laps, and their sum."""
        return self._times | {"time/ppo/total": time.perf_counter() - self._began}


TABLE = "game_log"


def reward_stats(rewards: Sequence[Any]) -> dict[str, Any]:
    """`env/reward_*` of the scores as a script gave them, neither scaled nor clipped; a dense score by its sum."""
    totals = np.asarray([np.asarray(reward, np.float32).sum() for reward in rewards], np.float32)
    spread = float(totals.std(ddof=1)) if totals.size > 1 else float("nan")
    return {"env/reward_mean": float(totals.mean()), "env/reward_std": spread, "env/reward_dist": totals}


class StatsLog:
    """Writes to the tracker, opened with the first record; without one it only checks.

    Args:
      config: Names the tracker.
      native: Whose steps are counted.
    """

    def __init__(self, config: PPOConfig, native: StepwisePPO) -> None:
        self._config, self._native = config, native
        self._tracker: Logger | None = None

    def write(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: Sequence[Any],
        columns: Sequence[str],
    ) -> None:
        """Logs a step's statistics; see `PPOTrainer.log_stats`."""
        if not any(name in batch for name in ("query", "response")):
            warnings.warn(
                f"`batch` has neither `query` nor `response`, only {sorted(batch)}: no table is logged.",
                stacklevel=4,
            )
            columns = ()
        missing = [name for name in columns if name not in batch]
        if missing:
            raise ValueError(
                f"`columns_to_log`: the batch has no column {missing[0]!r}, it has {sorted(batch)}."
            )
        if self._config.log_with is None or jax.process_index() != 0:
            return
        if self._tracker is None:
            self._tracker = self._open()
        step = self._native.calls
        self._tracker.log({name: float(value) for name, value in stats.items() if np.ndim(value) == 0}, step)
        if columns:
            cells = [*(batch[name] for name in columns), [float(np.sum(np.asarray(x))) for x in rewards]]
            self._tracker.log_table(TABLE, [*columns, "reward"], list(zip(*cells, strict=True)), step)
        self._tracker.flush()

    def _open(self) -> Logger:
        train = self._native.config.train
        folder = Path(train.logging_dir or self._config.output_dir or ".")
        settings = without_secrets(plain(self._native.config.to_dict()))
        tracker: Logger
        if self._config.log_with == "tensorboard":
            tracker = TensorBoardLogger(folder / "tensorboard", settings)
        else:
            tracker = WandbLogger(folder, settings, run_id_file=folder / "wandb_id")
        tracker.start(
            {"algorithm": "PPO, step by step"}, total_steps=train.total_steps, step=self._native.calls
        )
        return tracker
