# SPDX-License-Identifier: Apache-2.0
"""The face of every trlX trainer, for those who write one from nothing."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jrl.trainers.config import TRLConfig
from jrl.trlx.registry import register_trainer
from jrl.trlx.stores import BaseRolloutStore


@register_trainer
class BaseRLTrainer(abc.ABC):
    """Holds what a trainer is made of; a subclass learns from it.

    Args:
      config: The run's configuration.
      reward_fn: Scores completions.
      metric_fn: Evaluation metrics.
      logit_mask: (V, V), True where the column's token may not follow the row's.
      stop_sequences: Texts that end a completion.
      train_mode: Kept; nothing reads it.

    Attributes:
      eval_pipeline: What evaluations sample on; None: they do not.
    """

    def __init__(
        self,
        config: TRLConfig,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        logit_mask: Any = None,
        stop_sequences: Sequence[str] | None = None,
        train_mode: bool = False,
    ) -> None:
        if isinstance(stop_sequences, str):
            raise ValueError(
                f"`stop_sequences` must be a list of texts, got the text {stop_sequences!r} alone."
            )
        self.config = config
        self.reward_fn, self.metric_fn = reward_fn, metric_fn
        self.logit_mask, self.stop_sequences = logit_mask, list(stop_sequences or ())
        self.train_mode = train_mode
        self.eval_pipeline: Any = None

    _store: BaseRolloutStore | None = None

    @property
    def store(self) -> BaseRolloutStore | None:
        """Store of the data to learn from; None until there is any."""
        self._fill_store()
        return self._store

    @store.setter
    def store(self, store: BaseRolloutStore | None) -> None:
        self._store = store

    def _fill_store(self) -> None:  # noqa: B027  # a hook, not a duty
        """Called whenever the store is read: what is costly to put there waits until then."""

    def push_to_store(self, data: Iterable[Any]) -> None:
        """Appends elements to the store.

        Raises:
          ValueError: If there is no store yet.
        """
        if self.store is None:
            raise ValueError(
                f"{type(self).__name__} has no store yet: `make_experience` or a subclass makes one."
            )
        self.store.push(data)

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Sets what evaluations sample on."""
        self.eval_pipeline = eval_pipeline

    def sample(self, prompts: Iterable[str], length: int, n_samples: int) -> Iterable[str]:
        """Completions of prompts.

        Args:
          prompts: Texts.
          length: Most tokens of a completion.
          n_samples: Number of completions.
        """
        raise NotImplementedError(f"{type(self).__name__} does not sample.")

    @abc.abstractmethod
    def learn(
        self,
        log_fn: Callable[[dict[str, Any]], Any] | None = None,
        save_fn: Callable[[dict[str, Any]], Any] | None = None,
        eval_fn: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Trains.

        Args:
          log_fn: Called with every training record.
          save_fn: Called after a checkpoint was begun, with its `directory`, the `step`, `model` and `tokenizer`.
          eval_fn: Called with the trainer after every evaluation.
        """

    def save(self, directory: str | None = None) -> Any:
        """Writes a checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} does not save.")

    def load(self, directory: str | None = None) -> Any:
        """Reads what `save` wrote."""
        raise NotImplementedError(f"{type(self).__name__} does not load.")
