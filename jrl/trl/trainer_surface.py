# SPDX-License-Identifier: Apache-2.0
"""Methods of transformers' `Trainer` around a run: state, callbacks, loaders, metrics on disk, cards and uploads.

None of them trains or evaluates; `jrl.trl.flat_trainer` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from transformers import TrainingArguments

from jrl.data.sources import RecordStream, read_records
from jrl.interop import Accelerator, DataLoader, refuse_while_traced
from jrl.trainers.cards import model_card
from jrl.trainers.offline import OfflineTrainer
from jrl.trl.arguments import FlatArguments
from jrl.trl.models import ModelHandle
from jrl.trl.run_state import Watcher, make_callback
from jrl.upload import push_to_hub


class TrainerSurface:
    """Methods and attributes of transformers' `Trainer`, training and evaluation excepted.

    Attributes:
      args: The configuration, as it was given.
      config: A copy of it, which the run reads.
      model: The model's handle.
      tokenizer: With its padding.
      train_dataset: As it was given.
      eval_dataset: As it was given.
      data_collator: Makes the batches of the loaders.
      native: jrl's own trainer.
    """

    args: TrainingArguments
    config: FlatArguments
    model: ModelHandle
    tokenizer: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any]
    native: OfflineTrainer
    _watcher: Watcher

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    @property
    def state(self) -> Any:
        """transformers' `TrainerState`."""
        refuse_while_traced("state")
        return self._watcher.state

    @property
    def control(self) -> Any:
        """transformers' `TrainerControl`."""
        return self._watcher.control

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks."""
        return self._watcher.callbacks

    def add_callback(self, callback: Any) -> None:
        """Adds a callback: an object or a class of transformers' `TrainerCallback`."""
        self._watcher.callbacks.append(make_callback(callback))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and shows it to the callbacks.

        Args:
          logs: Name → number.
          start_time: Of transformers; no effect.
        """
        del start_time
        refuse_while_traced("log", "What a loss returns is logged.")
        self._watcher.log(dict(logs))

    # Data as scripts look at them.

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the training rows as the collator makes them. A run makes its own; this is for looking."""
        if self.train_dataset is None:
            raise ValueError("`train_dataset` must be given.")
        return self._loader(self.train_dataset, self.native.config.train.batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Loader of evaluation rows.

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
        """Loader of given rows, for a test."""
        return self._loader(test_dataset, self.args.per_device_eval_batch_size)

    def _loader(self, dataset: Any, batch_size: int) -> DataLoader:
        records = read_records(dataset)
        if isinstance(records, RecordStream):
            raise ValueError("A stream has no loader, because it has no length.")
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

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics, one a line, on the first process.

        Args:
          split: Such as "train", "eval" or "all".
          metrics: Name → number.
        """
        if not self.is_world_process_zero():
            return
        print(f"***** {split} metrics *****")
        width = max(map(len, metrics), default=0)
        for name, value in sorted(self.metrics_format(metrics).items()):
            print(f"  {name:<{width}} = {value}")

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics as they are printed: four digits behind the point."""
        return {
            name: round(value, 4) if isinstance(value, float) else value for name, value in metrics.items()
        }

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes `<split>_results.json` into `output_dir`, on the first process.

        Args:
          split: Such as "train" or "eval".
          metrics: Name → number.
          combined: Whether `all_results.json` takes them in, too.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.config.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=4, sort_keys=True))
        if combined:
            path = folder / "all_results.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(known | dict(metrics), indent=4, sort_keys=True))

    # Who this process is.

    def is_world_process_zero(self) -> bool:
        """True in the first process of all."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """True in the first process of all: every process of a job has devices of its own."""
        return self.is_world_process_zero()

    @property
    def accelerator(self) -> Accelerator:
        """Stand-in for accelerate's object, which says which process this is."""
        return Accelerator()

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a loader's data."""
        return len(dataloader.dataset)

    def get_num_trainable_parameters(self) -> int:
        """Numbers that train."""
        return sum(int(leaf.size) for leaf in jax.tree.leaves(self.native.params))

    def pop_callback(self, callback: Any) -> Any:
        """Takes a callback out and returns it; None if it is not there.

        Args:
          callback: The object, or its class, of which the first one counts.
        """
        of_class = isinstance(callback, type)
        for one in self.callbacks:
            if one is callback or (of_class and type(one) is callback):
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        """Takes a callback out; see `pop_callback`."""
        self.pop_callback(callback)

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
          tags: Beside those that the card has.
        """
        self.model.add_model_tags(() if tags is None else tags)
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
          **kwargs: `repo_id`, `private`, `token` and `revision`, the branch; default: `hub_model_id` (or the name of
            `output_dir`), `hub_private_repo`, `hub_token` and `hub_revision`.
        """
        unknown = kwargs.keys() - {"repo_id", "private", "token", "revision"}
        if unknown or not blocking:
            raise ValueError(
                f"push_to_hub takes `repo_id`, `private`, `token` and `revision`, and blocks; got {sorted(unknown)}, "
                f"blocking={blocking}."
            )
        folder = Path(str(self.config.output_dir))
        self.save_model(folder / "hf_model")
        return push_to_hub(
            folder / "hf_model",
            kwargs.get("repo_id") or self.config.hub_model_id or folder.name,
            private=kwargs.get("private", self.config.hub_private_repo),
            token=kwargs.get("token", self.config.hub_token),
            commit_message=commit_message,
            revision=kwargs.get("revision") or self.config.hub_revision,
        )
