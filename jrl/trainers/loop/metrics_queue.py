# SPDX-License-Identifier: Apache-2.0
"""The metrics of an update that the devices still compute, and the record that they become."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jrl.learners.online_tokens import TokenFigures
from jrl.ops.metrics import finalize
from jrl.typing import Metrics

TOKENS = ("completion/tokens", "sft/tokens", "ilql/tokens", "dpo/tokens", "reward_model/tokens")
"""What `perf/tokens_per_second` counts: the first of these that an iteration reports."""
IMAGES = "rollout/images"
"""What `perf/images_per_second` counts, where an iteration reports it."""


class TrainingDivergedError(RuntimeError):
    """Too many non-finite optimizer steps in a row."""


@dataclass
class Pending:
    """Metrics of an update that is still on the device.

    Attributes:
      step: Optimizer steps, that update's included.
      iteration: Iterations likewise.
      host: Figures that the host knows already.
      device: Those to come.
      tokens: Figures of single tokens to come; None: this iteration keeps none.
      vote: How many processes were asked to stop; None where there is one.
      dispatched: When this was made, by `time.perf_counter`.
    """

    step: int
    iteration: int
    host: dict[str, float]
    device: Metrics
    tokens: TokenFigures | None
    vote: jax.Array | None
    dispatched: float = field(default_factory=time.perf_counter)

    def is_stop(self) -> bool:
        """True where the processes stop; waits for the update."""
        return self.vote is not None and int(self.vote) > 0

    def record(self, times: Mapping[str, float], *, began: float, compilations: int) -> dict[str, Any]:
        """The training record; waits for the update.

        Args:
          times: What the host measured.
          began: When the iteration began, by `time.perf_counter`.
          compilations: Programs compiled so far.
        """
        metrics = finalize(jax.device_get(self.device))
        now = time.perf_counter()
        tokens = next((self.host[name] for name in TOKENS if name in self.host), 0.0)
        kind, count = ("images", self.host[IMAGES]) if IMAGES in self.host else ("tokens", tokens)
        return {
            "step": self.step,
            "iteration": self.iteration,
            **self.host,
            **metrics,
            **times,
            "time/update": now - self.dispatched,
            "time/iteration": now - began,
            f"perf/{kind}_per_second": count / (now - began),
            "perf/compilations": compilations,
        }


def check_steps(record: Mapping[str, Any], max_bad_steps: int) -> None:
    """Ends a run whose optimizer steps are not finite any more.

    Raises:
      TrainingDivergedError: After so many in a row.
    """
    bad = record.get("optim/skipped_in_a_row", 0.0)
    if bad >= max_bad_steps:
        raise TrainingDivergedError(
            f"{int(bad)} optimizer steps in a row had a non-finite loss or gradient (`train.max_bad_steps` is "
            f"{max_bad_steps}); the parameters are those of the last finite step. Likely causes: a "
            "learning rate too high, rewards of extreme size, or a compute dtype too narrow."
        )
