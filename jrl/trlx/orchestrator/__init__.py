# SPDX-License-Identifier: Apache-2.0
"""The orchestrators of trlX 0.2 to 0.4, which later became `make_experience` of the trainers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from jrl.interop import refuse_overrides
from jrl.trlx.dialogue import split_samples
from jrl.trlx.refusals import EXPERIENCE
from jrl.trlx.registry import register_orchestrator
from jrl.trlx.trainer import BaseRLTrainer


@register_orchestrator
class Orchestrator(abc.ABC):
    """Fills a trainer's store.

    Args:
      pipeline: What it draws from.
      rl_model: The trainer.
    """

    def __init__(self, pipeline: Any, rl_model: BaseRLTrainer) -> None:
        self.pipeline, self.rl_model = pipeline, rl_model

    @abc.abstractmethod
    def make_experience(self) -> None:
        """Makes elements and pushes them to the trainer's store."""


@register_orchestrator
class PPOOrchestrator(Orchestrator):
    """Rollouts of a PPO trainer.

    Args:
      model: The trainer; later releases call it `trainer`.
      pipeline: Prompts.
      reward_fn: Scores completions; default: the trainer's own. Later releases have `chunk_size` in this place.
      metric_fn: Evaluation metrics; default: the trainer's own.
      chunk_size: Must be that of the configuration, which decides.
      trainer: In place of `model`.
    """

    def __init__(
        self,
        model: Any = None,
        pipeline: Any = None,
        reward_fn: Callable[..., Any] | int | None = None,
        metric_fn: Callable[..., Any] | None = None,
        chunk_size: int = 512,
        *,
        trainer: Any = None,
    ) -> None:
        refuse_overrides(type(self), PPOOrchestrator, EXPERIENCE)
        trainer = model if trainer is None else trainer
        if trainer is None or pipeline is None:
            raise ValueError("PPOOrchestrator needs the trainer and a pipeline of prompts.")
        super().__init__(pipeline, trainer)
        self.trainer = trainer
        self.chunk_size = reward_fn if isinstance(reward_fn, int) else chunk_size
        if callable(reward_fn):
            trainer.reward_fn = reward_fn
        if metric_fn is not None:
            trainer.metric_fn = metric_fn
        trainer.add_prompt_pipeline(pipeline)
        trainer.orch = self

    def score(self, samples: Sequence[str]) -> Any:
        """Rewards of texts alone, by the reward function."""
        return self.trainer.reward_fn(samples)

    def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        """Collects rollouts; see `AcceleratePPOTrainer.make_experience`."""
        self.trainer.make_experience(num_rollouts, iter_count)


@register_orchestrator
class OfflineOrchestrator(Orchestrator):
    """Samples and rewards of an ILQL trainer.

    Args:
      model: The trainer; later releases call it `trainer`.
      split_token: Ends the prompt of a text: what follows its first occurrence is the output. None: all of it is.
      trainer: In place of `model`.
    """

    def __init__(self, model: Any = None, split_token: str | None = None, *, trainer: Any = None) -> None:
        trainer = model if trainer is None else trainer
        if trainer is None:
            raise ValueError("OfflineOrchestrator needs the trainer.")
        super().__init__(None, trainer)
        self.trainer, self.split_token = trainer, split_token

    def make_experience(  # type: ignore[override]  # the seed's own signature departs from its base class
        self, samples: Sequence[Any], rewards: Sequence[float], max_length: int = 2048
    ) -> None:
        """Takes samples, with texts split at the token; see `AccelerateILQLTrainer.make_experience`.

        Raises:
          ValueError: If a text does not hold the token; the message names its index.
        """
        if self.split_token is not None:
            samples = split_samples(samples, self.split_token)
        self.trainer.make_experience(samples, rewards, max_length)
