# SPDX-License-Identifier: Apache-2.0
"""Logging of a step's statistics to the tracker that the configuration names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.trainers.checkpoints import plain
from jrl.trainers.config import without_secrets
from jrl.trainers.loggers import Logger, TensorBoardLogger, WandbLogger
from jrl.trl.ppo_config import PPOConfig
from jrl.trl.ppo_native import StepwisePPO

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
