# SPDX-License-Identifier: Apache-2.0
"""The user's reward function under the run's failure policy, for rollouts and evaluations alike."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.placement import local_computation
from jrl.rollout.keywords import reward_functions, unique_names
from jrl.rollout.reward_columns import RewardColumns, check_weights, combined_rewards, reward_columns
from jrl.rollout.rewards import RewardError, call_reward_fns
from jrl.rollout.text import Texts, episode_cells


class Judged(NamedTuple):
    """Rewards of some completions.

    Attributes:
      rewards: Of each row a float, or a float32 array over the completion's tokens; NaN where it has none, because
        each function failed on it or does not apply to it.
      columns: What each function said.
    """

    rewards: list[float | np.ndarray]
    columns: RewardColumns


@dataclass(frozen=True)
class RewardCall:
    """Calls the reward functions; what one fails on is kept on the disk before the run stops.

    Attributes:
      reward_fn: The user's function, or several, whose weighted sum is the reward.
      tokenizer: Handed through.
      skip_errors: Whether rows that fail become NaN; otherwise the first stops the run.
      timeout: Seconds that one call may take; None waits for ever.
      failures: Folder of the completions that it failed on.
      on_main: Whether process 0 calls it on all rows; else each process does on its own.
      weights: Of the functions; None: 1 each.
      asking: Held during a call: rollouts that are collected ahead might call from two threads at a time. A run has
        one for all its calls; another run in this process does not wait for them.
    """

    reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    tokenizer: Any
    skip_errors: bool
    timeout: float | None
    failures: Path
    on_main: bool = False
    weights: Sequence[float] | None = None
    asking: AbstractContextManager[Any] = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        """Refuses what could never be called, and weights that do not fit."""
        check_weights(self.weights, len(self.functions))

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The user's functions by name."""
        functions = reward_functions(self.reward_fn)
        return dict(zip(unique_names(functions), functions, strict=True))

    def __call__(self, texts: Texts, metadata: Mapping[str, Sequence[Any]], *, label: str) -> Judged:
        """Calls the reward functions.

        Args:
          texts: The completions.
          metadata: One list a key, aligned with the rows.
          label: Says which completions these are, in the name of the file that keeps them.
        Raises:
          RewardError: If a function fails and errors are not skipped; the completions are on disk by then.
        """
        names, alone = tuple(self.functions), len(self.functions) == 1
        roles = ["reward_fn"] if alone else [f"reward_fn[{name}]" for name in names]
        try:
            with self.asking, local_computation():
                found = call_reward_fns(
                    dict(zip(roles, self.functions.values(), strict=True)),
                    texts,
                    tokenizer=self.tokenizer,
                    metadata=metadata,
                    skip_errors=self.skip_errors,
                    timeout=self.timeout,
                )
            rewards = combined_rewards(found, check_weights(self.weights, len(names)))
        except RewardError as error:
            error.add_note(keep_failed(self.failures, texts, metadata, label=label))
            raise
        if texts.failures is not None:  # whatever others say of an episode whose environment failed
            rewards = [
                reward if failure is None else math.nan
                for reward, failure in zip(rewards, texts.failures, strict=True)
            ]
        return Judged(rewards, reward_columns(names, found))


def keep_failed(folder: Path, texts: Texts, metadata: Mapping[str, Sequence[Any]], *, label: str) -> str:
    """Writes completions that a user's function failed on.

    Args:
      folder: Made where it does not exist.
      texts: The completions.
      metadata: One list a key, aligned with the rows.
      label: Says which completions these are, in the name of their file.
    Returns:
      A sentence that says where they are; where they cannot be written, why: that must not hide the first error.
    """
    suffix = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
    path = folder / f"failed_rollouts_{label}{suffix}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for row in range(len(texts.outputs)):
                record = {
                    "prompt": texts.prompts[row],
                    "output": texts.outputs[row],
                    "output_tokens": [int(token) for token in texts.output_tokens[row]],
                    "metadata": {name: column[row] for name, column in metadata.items()},
                    **episode_cells(texts, row),
                }
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    except (OSError, ValueError, TypeError) as error:  # a full disk, or what texts and metadata hold
        return f"The completions of this call could not be kept: {error}."
    return f"The completions of this call are kept in {path}."
