# SPDX-License-Identifier: Apache-2.0
"""What a DDPO trainer of TRL's shape leaves behind: model folders, cards, uploads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from jrl.trainers.model_card import model_card
from jrl.trl.ddpo_native import OwnedDDPO
from jrl.trl.ddpo_pipeline_base import DDPOStableDiffusionPipeline
from jrl.trl.handles import push_folder
from jrl.trlx.ignored import warn_ignored


class SavesPipeline:
    """The methods of `DDPOTrainer` that write.

    Attributes:
      native: jrl's own trainer.
      sd_pipeline: The pipeline.
    """

    _tag_names: ClassVar[tuple[str, ...]] = ("jrl", "ddpo")
    native: OwnedDDPO
    sd_pipeline: DDPOStableDiffusionPipeline

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Writes a folder that diffusers reads, and the model card.

        Args:
          save_directory: Made if missing.
        """
        self._save_pretrained(save_directory)
        model_card(self.native).write(Path(save_directory))

    def _save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """The pipeline alone."""
        self.sd_pipeline.save_pretrained(save_directory)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Writes the model card, `README.md`, into the run's folder.

        Args:
          model_name: Title.
          dataset_name: Where the prompts come from.
          tags: No effect: the card has jrl's and the method's.
        """
        if tags is not None:
            warn_ignored("create_model_card: tags", "the card has the method's")
        if dataset_name is not None:
            self.native.dataset_names = (dataset_name,)
        self.native.run_dir.mkdir(parents=True, exist_ok=True)
        model_card(self.native).write(self.native.run_dir, name=model_name)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "End of training",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes; returns the address.

        Args:
          repo_id: "organisation/name".
          commit_message: Of the upload.
          private: Whether a repository that is made is private.
          token: Of the hub; None: the one of this machine.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, commit_message=commit_message, private=private, token=token)
