# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl` and the samples' JSON lines: the record of a run that always exists and can be cut back."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.trainers.loggers.line_file import LineFile, read_lines, rewrite

ROLLOUTS, SAMPLES, TOKENS = "rollouts", "samples", "tokens"
"""Tables: of training, of evaluations, and of single tokens."""
SAMPLING = "sampling/"
"""Begins the names in a record that say how an evaluation sampled: they are no figures, and are not drawn."""


class JSONLLogger:
    """Writes one JSON object a line: records to one file, each table's rows to a file of its own.

    Numbers that JSON has no word for (NaN, infinities) become null. On a full disk lines wait in memory and
    are written once there is room: a run does not end because its diary is full. A file that is deleted or renamed
    while a run writes to it is put back.

    Args:
      path: The records.
      samples_dir: Folder of the tables, `rollouts.jsonl`, `samples.jsonl` and `tokens.jsonl`, a row an object with its
        `step`. What else lies in it is left alone.
      keep_records: Lines of `path` to keep when resuming; None starts everything afresh.

    Attributes:
      kept: The records that were kept.
    """

    def __init__(self, path: Path, samples_dir: Path, *, keep_records: int | None) -> None:
        self._path, self._samples_dir = path, samples_dir
        try:
            self.kept = self._begin(keep_records)
        except OSError as error:
            error.add_note(
                f"The run's records belong into {path}, its samples into {samples_dir}. Where these cannot be written, "
                "nothing is trained: make room, or set `train.checkpoint_dir`, `train.rollout_logging_dir`."
            )
            raise

    def _begin(self, keep_records: int | None) -> list[dict[str, Any]]:
        """Opens the records, cut back to what a resume keeps, which it returns."""
        for folder in (self._path.parent, self._samples_dir):
            folder.mkdir(parents=True, exist_ok=True)
        kept = [] if keep_records is None else list(read_lines(self._path, keep_records))
        if keep_records is not None and len(kept) < keep_records:
            warnings.warn(
                f"{self._path} has {len(kept)} records, the checkpoint counted {keep_records}: some were lost.",
                stacklevel=4,
            )
        rewrite(self._path, [line for line, _ in kept])
        if keep_records is None:
            for table in self._tables():
                table.unlink()
        self._records = LineFile(self._path)
        self._records.open()
        self._files: dict[str, LineFile] = {}
        return [record for _, record in kept]

    def _tables(self) -> list[Path]:
        paths = [self._samples_dir / f"{name}.jsonl" for name in (ROLLOUTS, SAMPLES, TOKENS)]
        return [path for path in paths if path.exists()]

    def keep(self) -> None:
        """Puts back what was deleted, renamed or replaced meanwhile; costs one system call a file where nothing was."""
        for file in self._all():
            file.keep()

    def move(self, run_dir: Path) -> None:
        """Goes on in another run's folder, with all lines so far; a folder of samples outside the old one stays.

        Args:
          run_dir: The folder.
        """
        old = self._path.parent
        self._path = run_dir / self._path.name
        if self._samples_dir.is_relative_to(old):
            self._samples_dir = run_dir / self._samples_dir.relative_to(old)
        for file in self._all():
            if file.path.is_relative_to(old):
                file.move(run_dir / file.path.relative_to(old))

    def _all(self) -> list[LineFile]:
        return [self._records, *self._files.values()]

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Cuts the tables back to what was there at this step."""
        del description, total_steps
        for table in self._tables():
            rewrite(table, (line for line, row in read_lines(table) if row["step"] <= step))

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Appends a record."""
        self._records.append(_line({"step": step, **record}))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Appends a table's rows to `<name>.jsonl`."""
        if name not in self._files:
            self._files[name] = LineFile(self._samples_dir / f"{name}.jsonl")
        for row in rows:
            self._files[name].append(_line({"step": step, **dict(zip(columns, row, strict=True))}))

    def flush(self) -> None:
        """Forces everything to the disk."""
        for file in self._all():
            file.keep()
            file.sync()

    def close(self) -> None:
        """Flushes and closes."""
        for file in self._all():
            file.close()


def _line(entry: Mapping[str, Any]) -> bytes:
    line = json.dumps({key: jsonable(value) for key, value in entry.items()}, ensure_ascii=False)
    # A lone surrogate has no UTF-8; as `\ud800`, which is also JSON's word for it, it is read back as it was.
    return line.encode("utf-8", "backslashreplace") + b"\n"


def jsonable(value: Any) -> Any:
    """A value as strict JSON has it: NumPy and JAX scalars as numbers, arrays as lists, what is not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    array = np.asarray(value)
    if array.dtype == object:
        return str(value)
    return jsonable(array.tolist())
