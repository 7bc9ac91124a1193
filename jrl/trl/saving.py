# SPDX-License-Identifier: Apache-2.0
"""What a trainer of TRL's shape shows and leaves behind: loaders, models, cards, uploads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.data.records import RecordStream, read_records
from jrl.trainers.model_card import model_card
from jrl.trl.models import push_folder
from jrl.trl.running import RunningTrainer
from jrl.trlx.ignored import warn_ignored
from jrl.trlx.loader import DataLoader


class FlatTrainer(RunningTrainer):
    """A trainer of TRL's shape, but for what tells algorithms apart."""

    # Data as scripts look at them.

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the training rows as the collator makes them. A run makes its own; this is for looking."""
        if self.train_dataset is None:
            raise ValueError("`train_dataset` must be given.")
        return self._loader(self.train_dataset, self.native.config.train.batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The same of evaluation rows.

        Args:
          eval_dataset: Rows, or the name of one of several sets; None: those of the constructor.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("`eval_dataset` must be given, here or to the constructor.")
        return self._loader(dataset, self.args.per_device_eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The same of other rows."""
        return self._loader(test_dataset, self.args.per_device_eval_batch_size)

    def _loader(self, dataset: Any, batch_size: int) -> DataLoader:
        records = read_records(dataset)
        if isinstance(records, RecordStream):
            raise ValueError("A stream has no loader: nobody knows its length.")
        return DataLoader(records, batch_size, collate_fn=self._collate)

    def _collate(self, records: list[Any]) -> Any:
        """A batch of rows as the data set has them."""
        return self.data_collator(records)

    # What it leaves behind.

    def save_model(
        self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False
    ) -> None:
        """Writes model, tokenizer and card.

        Args:
          output_dir: Default: that of the configuration.
        """
        del _internal_call
        self.native.save_pretrained(output_dir or self.config.output_dir)

    def save_state(self) -> None:
        """Writes `trainer_state.json`, which holds the log history, into `output_dir`."""
        self.state.save_to_json(str(Path(str(self.config.output_dir)) / "trainer_state.json"))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Writes the model card, `README.md`, into `output_dir`.

        Args:
          model_name: Title.
          dataset_name: What the data are called.
          tags: No effect: the card has the method's.
        """
        if tags is not None:
            warn_ignored("create_model_card: tags", "the card has the method's")
        if dataset_name is not None:
            self.native.dataset_names = (dataset_name,)
        folder = Path(str(self.config.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        model_card(self.native).write(folder, name=model_name)

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, **kwargs: Any
    ) -> str:
        """Uploads model, tokenizer and card; returns the address.

        Args:
          commit_message: Of the upload.
          blocking: True; the upload has ended when this returns.
          **kwargs: `repo_id`, `private` and `token`; default: `hub_model_id` (or the name of `output_dir`),
            `hub_private_repo` and `hub_token`.
        """
        unknown = kwargs.keys() - {"repo_id", "private", "token"}
        if unknown or not blocking:
            raise ValueError(
                f"push_to_hub takes `repo_id`, `private` and `token`, and blocks; got {sorted(unknown)}, "
                f"blocking={blocking}."
            )
        folder = Path(str(self.config.output_dir))
        self.save_model(folder / "hf_model")
        return push_folder(
            folder / "hf_model",
            kwargs.get("repo_id") or self.config.hub_model_id or folder.name,
            private=kwargs.get("private", self.config.hub_private_repo),
            token=kwargs.get("token", self.config.hub_token),
            commit_message=commit_message,
        )
