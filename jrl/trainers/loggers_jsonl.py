# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl` and the samples' JSON lines: the record of a run that always exists and can be cut back."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROLLOUTS, SAMPLES = "rollouts", "samples"
"""Tables: of training, and of evaluations."""
SAMPLING = "sampling/"
"""Begins the names in a record that say how an evaluation sampled: they are no figures, and are not drawn."""


class JSONLLogger:
    """Writes one JSON object a line: records to one file, each table's rows to a file of its own.

    Numbers that JSON has no word for (NaN, infinities) become null. On a full disk lines wait in memory and
    are written once there is room: a run does not end because its diary is full.

    Args:
      path: The records.
      samples_dir: Folder of the tables, `rollouts.jsonl` and `samples.jsonl`, a row an object with its `step`. What
        else lies in it is left alone.
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
        kept = [] if keep_records is None else _records(self._path, keep_records)
        if keep_records is not None and len(kept) < keep_records:
            warnings.warn(
                f"{self._path} has {len(kept)} records, the checkpoint counted {keep_records}: some were lost.",
                stacklevel=4,
            )
        _rewrite(self._path, [line for line, _ in kept])
        if keep_records is None:
            for table in self._tables():
                table.unlink()
        self._files: dict[Path, _LineFile] = {self._path: _LineFile(self._path)}
        return [record for _, record in kept]

    def _tables(self) -> list[Path]:
        paths = [self._samples_dir / f"{name}.jsonl" for name in (ROLLOUTS, SAMPLES)]
        return [path for path in paths if path.exists()]

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Cuts the tables back to what was there at this step."""
        del description, total_steps
        for table in self._tables():
            _rewrite(table, [line for line, row in _records(table) if row["step"] <= step])

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Appends a record."""
        self._files[self._path].append({"step": step, **record})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Appends a table's rows to `<name>.jsonl`."""
        path = self._samples_dir / f"{name}.jsonl"
        if path not in self._files:
            self._files[path] = _LineFile(path)
        for row in rows:
            self._files[path].append({"step": step, **dict(zip(columns, row, strict=True))})

    def flush(self) -> None:
        """Forces everything to the disk."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Flushes and closes."""
        for file in self._files.values():
            file.sync()
            file.close()


class _LineFile:
    """A file that only ever holds whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._waiting: list[bytes] = []
        self._refused = False

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes a line, or keeps it until there is room."""
        line = json.dumps({key: jsonable(value) for key, value in entry.items()}, ensure_ascii=False)
        self._waiting.append(line.encode() + b"\n")
        self._try(self._write)

    def sync(self) -> None:
        """Writes what waits and forces everything to the disk, as far as the disk will."""
        self._try(self._write)
        if not self._waiting:
            self._try(lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Ends it; says how many lines never found room."""
        self.sync()
        os.close(self._descriptor)
        if self._waiting:
            warnings.warn(
                f"{len(self._waiting)} lines of {self._path} were never written: the disk refused them to the end.",
                stacklevel=4,
            )

    def _try(self, work: Callable[[], None]) -> None:
        """What the disk refuses is told when it begins to."""
        try:
            work()
        except OSError as error:
            if not self._refused:
                warnings.warn(
                    f"Cannot write to {self._path} ({error}); its lines wait in memory.", stacklevel=5
                )
            self._refused = True
        else:
            self._refused = False

    def _write(self) -> None:
        content, done = b"".join(self._waiting), 0
        try:
            while done < len(content):
                done += os.write(self._descriptor, content[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # half a line would spoil the file for every reader
            raise
        self._size += done
        self._waiting = []


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


def _records(path: Path, count: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """The first lines of a file and what they say; what a crash cut short or a disk spoilt is left out."""
    if not path.exists():
        return []
    # Only "\n" ends a line here: samples may hold every other character that `splitlines` would break at.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1][:count]
    read = [(line, _object(line)) for line in lines]
    return [(line, record) for line, record in read if record is not None]


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "step" in found else None


def _rewrite(path: Path, lines: Sequence[str]) -> None:
    """Replaces a file's content in one step."""
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    aside.replace(path)
