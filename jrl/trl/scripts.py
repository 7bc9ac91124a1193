# SPDX-License-Identifier: Apache-2.0
"""Arguments of a training script beside the method's own configuration: data and model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jrl.data.sources import RecordStream, dataset_loader, read_records
from jrl.suggestions import did_you_mean

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ModelConfig",
    "ScriptArguments",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

Records = Sequence[Any] | RecordStream


@dataclass
class ScriptArguments:
    """The data of a script that trains on one data set.

    Attributes:
      dataset_name: A .txt, .jsonl, .json, .csv or .parquet file, or a data set's folder or name on the hub.
      dataset_config: Name of a configuration of that data set.
      dataset_train_split: Its split to train on.
      dataset_test_split: Its split to evaluate on.
      dataset_streaming: Reads the data set as it is needed.
      ignore_bias_buffers: Concerns distributed training in torch; no effect here.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """A data set of a mixture.

    Attributes:
      path: A file, or a data set's folder or name on the hub.
      name: Name of a configuration of that data set.
      data_dir: Folder within it.
      data_files: Files within it.
      split: The split that is read.
      columns: Those that are kept; None: all.
      fraction: Share of the mixture's rows, relative to the fractions of the others; for all of them, or for none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several data sets, one after another. Where there are any, `dataset_name` is not read.

    Attributes:
      datasets: Data sets of a mixture, in a YAML file: each the mapping of a `DatasetConfig`.
      streaming: Reads the mixture as it is needed.
      test_split_size: Rows of the mixture that are held out for evaluation, or their share if below 1; None: none.
    Raises:
      ValueError: If an entry lacks its path, has an unknown key, or only some entries have a fraction.
    """

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        """Makes mappings into `DatasetConfig`s."""
        self.datasets = [_dataset_config(entry, number) for number, entry in enumerate(self.datasets)]
        fractions = [entry.fraction for entry in self.datasets]
        if any(fraction is None for fraction in fractions) and any(fractions):
            raise ValueError(f"`fraction` must be given for all of `datasets` or for none, got {fractions}.")
        if any(fraction is not None and fraction <= 0 for fraction in fractions):
            raise ValueError(f"`fraction` must be positive, got {fractions}.")


@dataclass
class ModelConfig:
    """The model of a script.

    Attributes:
      model_name_or_path: Directory or hub id of a checkpoint.
      model_revision: Of the hub's repository; only "main" is read.
      dtype: Of the frozen weights; "bfloat16" also computes in it.
      trust_remote_code: Code of a checkpoint is never run; must be False.
      attn_implementation: "eager": products with a mask; else the platform's kernel where it serves.
      use_peft: Trains LoRA beside the frozen model.
      lora_r: Rank.
      lora_alpha: Scale is `lora_alpha / lora_r`.
      lora_dropout: Has no effect in PPO and evaluation.
      lora_target_modules: Ends of names, or "all-linear"; None: the attention projections.
      lora_target_parameters: Ends of names of stacked experts; needs `lora_dropout` 0.
      lora_modules_to_save: Modules that train whole beside it, such as `score`.
      lora_task_type: PEFT's name of what the model does.
      use_rslora: Scale is `lora_alpha / sqrt(lora_r)`.
      use_dora: Trains the norms of the updated weights too.
      load_in_8bit: Keeps the frozen weights in 8 bits.
      load_in_4bit: Keeps them in 4 bits.
      bnb_4bit_quant_type: The 4-bit code; "nf4".
      use_bnb_nested_quant: Rounds the scales too; no effect.
      bnb_4bit_quant_storage: torch's storage type; no effect.
    Raises:
      ValueError: If both 8 and 4 bits are asked for.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = "float32"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        """Unpacks a single target module, which is then a pattern, so that `all-linear` works."""
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("`load_in_8bit` and `load_in_4bit` must not both be true.")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


def get_peft_config(model_args: ModelConfig) -> dict[str, Any] | None:
    """The adapter in PEFT's keys, as `peft_config` takes it; None unless `use_peft`."""
    if not model_args.use_peft:
        return None
    return {
        "peft_type": "LORA",
        "task_type": model_args.lora_task_type,
        "r": model_args.lora_r,
        "target_modules": model_args.lora_target_modules,
        "target_parameters": model_args.lora_target_parameters,
        "lora_alpha": model_args.lora_alpha,
        "lora_dropout": model_args.lora_dropout,
        "bias": "none",
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
        "modules_to_save": model_args.lora_modules_to_save,
    }


def get_quantization_config(model_args: ModelConfig) -> str | None:
    """Storage of the frozen weights, as `model.frozen_dtype` names it: "nf4", "int8", or None for as they are.

    Raises:
      ValueError: If the 4-bit code is not nf4.
    """
    if not model_args.load_in_4bit:
        return "int8" if model_args.load_in_8bit else None
    if model_args.bnb_4bit_quant_type != "nf4":
        raise ValueError(
            f"`bnb_4bit_quant_type` must be 'nf4', got {model_args.bnb_4bit_quant_type!r}: jrl has no other 4-bit code."
        )
    return "nf4"


def get_kbit_device_map() -> None:
    """Device map of quantised weights in torch; the mesh decides it here, so there is none."""


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """The records of a mixture, by split: "train", and "test" where `test_split_size` holds some out.

    A `datasets.DatasetDict` where that package is installed and all rows have the same columns, else a dict of lists;
    of streamed data a dict of streams.
    With fractions the mixture is as large as it can be without a row twice; each data set gives its first rows.

    Raises:
      ValueError: If there is no data set, a column is missing, a split of streamed rows or more rows than there are
        would be held out.
    """
    entries, size = mixture_config.datasets, mixture_config.test_split_size
    if not entries:
        raise ValueError("No datasets were loaded: `datasets` must name at least one data set, got none.")
    parts = [(entry, _read(entry, streaming=mixture_config.streaming)) for entry in entries]
    whole = [(entry, rows) for entry, rows in parts if not isinstance(rows, RecordStream)]
    if len(whole) < len(parts):
        if size is not None or entries[0].fraction is not None:
            raise ValueError(
                "`test_split_size` and `fraction` must be None for streamed data: its length is unknown."
            )
        return {"train": RecordStream(_Chain(parts), identity=repr(entries))}
    rows = _mix(whole)
    if size is None:
        return _by_split({"train": rows})
    held_out = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < held_out < len(rows):
        raise ValueError(
            f"`test_split_size` must leave rows on both sides, got {size}, {held_out} of {len(rows)} rows."
        )
    return _by_split({"train": rows[:-held_out], "test": rows[-held_out:]})


def _by_split(splits: dict[str, Sequence[Any]]) -> Any:
    """Splits as `datasets` has them, if it is there and all rows have the same columns."""
    rows = [row for part in splits.values() for row in part]
    alike = all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows)
    if not alike or importlib.util.find_spec("datasets") is None:
        return splits
    from datasets import Dataset, DatasetDict

    return DatasetDict(
        {name: Dataset.from_list([dict(row) for row in rows]) for name, rows in splits.items()}
    )


class _Chain:
    """Streams one after another, from the first row whenever it is iterated over."""

    def __init__(self, parts: Sequence[tuple[DatasetConfig, Records]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        for entry, records in self._parts:
            for number, record in enumerate(iter(records)):
                yield _chosen(record, number, entry)


def _dataset_config(entry: Any, number: int) -> DatasetConfig:
    """An entry of a mixture as its class."""
    if isinstance(entry, DatasetConfig):
        return entry
    known = [found.name for found in fields(DatasetConfig)]
    if not isinstance(entry, Mapping) or "path" not in entry:
        raise ValueError(f"`datasets[{number}]` must be a mapping that holds `path`, got {entry!r}.")
    for key in entry:
        if key not in known:
            raise ValueError(f"`datasets[{number}]` has no field `{key}`.{did_you_mean(key, known)}")
    return DatasetConfig(**entry)


def _read(entry: DatasetConfig, *, streaming: bool) -> Records:
    """The rows of one data set."""
    if entry.name is None and entry.data_dir is None and entry.data_files is None:
        return read_records(entry.path, split=entry.split, streaming=streaming)
    if entry.path == "pandas":
        raise ValueError(
            "`datasets`: the builder 'pandas' reads pickles, which can run code when they are read: write the table to "
            "a .parquet file and give that as `path`."
        )
    found = dataset_loader()(
        entry.path,
        entry.name,
        data_dir=entry.data_dir,
        data_files=entry.data_files,
        split=entry.split,
        streaming=streaming,
    )
    return read_records(found)


def _chosen(record: Any, number: int, entry: DatasetConfig) -> Any:
    """The columns of a row that are kept."""
    if entry.columns is None:
        return record
    missing = [column for column in entry.columns if not isinstance(record, Mapping) or column not in record]
    if missing:
        present = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise ValueError(f"{entry.path}: record {number} lacks the column `{missing[0]}`; it has {present}.")
    return {column: record[column] for column in entry.columns}


def _mix(parts: Sequence[tuple[DatasetConfig, Sequence[Any]]]) -> list[Any]:
    """All rows, or as many of each data set as the fractions leave where no row may come twice."""
    total = sum(entry.fraction or 0.0 for entry, _ in parts)
    size = min((len(rows) * total / entry.fraction for entry, rows in parts if entry.fraction), default=0.0)
    mixed: list[Any] = []
    for entry, rows in parts:
        # A share of 0.1 of 30 rows is 3, whatever floats say.
        taken = len(rows) if entry.fraction is None else int(size * entry.fraction / total + 1e-6)
        mixed += [_chosen(row, number, entry) for number, row in enumerate(rows[:taken])]
    return mixed
