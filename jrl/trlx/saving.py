# SPDX-License-Identifier: Apache-2.0
"""How trlX's trainers write and read: checkpoints of a run, and Hugging Face folders of its model."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

from jrl.trlx.checkpoints import IGNORED_ON_CHECKPOINT, read_checkpoint, write_checkpoint
from jrl.trlx.generating import GeneratingTrainer
from jrl.trlx.ignored import check_keywords

_IGNORED_ON_SAVE = {
    "save_function": "files are safetensors, written by jrl",
    "is_main_process": "jrl knows which process writes",
    "state_dict": "the parameters of the current state are written",
    "safe_serialization": "files are safetensors",
    "max_shard_size": "shards have jrl's own size",
    "push_to_hub": "nothing is uploaded",
}


class SavingTrainer(GeneratingTrainer):
    """A trainer that samples through one of jrl's own, and saves what it holds.

    Attributes:
      nth_evaluation: Evaluations so far.
    """

    @property
    @abc.abstractmethod
    def nth_evaluation(self) -> int:
        """Evaluations so far."""

    @abc.abstractmethod
    def _require_data(self) -> None:
        """Raises where there is nothing to learn from."""

    @abc.abstractmethod
    def _steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""

    def save(self, directory: str | None = None, **kwargs: Any) -> Path:
        """Writes a checkpoint of state and model, `checkpoint_<step>`, which a run may resume from.

        Args:
          directory: The folder it stands in; default: the run's.
          **kwargs: Of accelerate; without effect.
        Returns:
          The checkpoint.
        Raises:
          ValueError: If there are no data yet: a checkpoint says which it belongs to.
        """
        check_keywords("save", kwargs, IGNORED_ON_CHECKPOINT)
        self._require_data()
        return write_checkpoint(
            self.native,
            directory or self.native.run_dir,
            steps_per_iteration=self._steps_per_iteration(),
            evaluations=self.nth_evaluation,
        )

    def load(self, directory: str | None = None, **kwargs: Any) -> None:
        """Restores a checkpoint; `learn` goes on from it.

        Args:
          directory: A checkpoint, or a folder of which the newest is taken; default: the run's.
          **kwargs: Of accelerate; without effect.
        Raises:
          ValueError: If there is no checkpoint.
          CheckpointError: If it belongs to another model or configuration.
        """
        check_keywords("load", kwargs, IGNORED_ON_CHECKPOINT)
        read_checkpoint(self.native, directory or self.native.run_dir)

    def save_pretrained(self, directory: str | None = None, **kwargs: Any) -> Path:
        """Writes model, heads and tokenizer as a Hugging Face checkpoint.

        Args:
          directory: Default: `hf_model` in the run's folder.
          **kwargs: `merge_adapter` writes an adapter into the model; those of transformers' method have no effect.
        Returns:
          The folder.
        """
        merge_adapter = bool(kwargs.pop("merge_adapter", False))
        check_keywords("save_pretrained", kwargs, _IGNORED_ON_SAVE)
        return self.native.save_pretrained(directory, merge_adapter=merge_adapter)
