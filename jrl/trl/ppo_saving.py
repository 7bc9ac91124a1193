# SPDX-License-Identifier: Apache-2.0
"""Files of a step-by-step PPO: model folders, uploads, cards, and states to go on from."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from jrl.interop import read_checkpoint, write_checkpoint
from jrl.trainers.cards import model_card
from jrl.trl.models import push_folder
from jrl.trl.ppo_native import StepwisePPO


class SavesModel:
    """The methods of `PPOTrainer` that write.

    Attributes:
      native: jrl's own trainer.
    """

    native: StepwisePPO

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, merge_adapter: bool = False) -> None:
        """Writes model, value head, tokenizer and card as a Hugging Face folder.

        As TRL does: its own classes load the head again. `trainer.native.save_pretrained(folder)` leaves it out, for
        servers that refuse it.
        """
        self.native.save_pretrained(save_directory, merge_adapter=merge_adapter, heads=True)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads what `save_pretrained` writes; returns the address. Options of `push_folder`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, **options)

    def create_model_card(self, path: str | os.PathLike[str], model_name: str | None = "TRL Model") -> None:
        """Writes the model card, `README.md`, into a folder.

        Args:
          path: Made if missing.
          model_name: Title; None: what the model is.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        model_card(self.native).write(folder, name=model_name)

    def save_state(self, directory: str | os.PathLike[str]) -> Path:
        """Writes all that the next step depends on: model, optimizer, KL coefficient, moments, counters, the watch.

        Args:
          directory: Folder that gets `checkpoint_<optimizer steps>`; made if missing.
        """
        return write_checkpoint(
            self.native, directory, steps_per_iteration=self.native.steps_per_iteration, evaluations=0
        )

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Goes on where `save_state` was called, in a trainer of the same model and configuration.

        Args:
          directory: A checkpoint, or a folder of which the newest is taken.
        Raises:
          CheckpointError: If it belongs to another model or configuration.
        """
        read_checkpoint(self.native, directory)
