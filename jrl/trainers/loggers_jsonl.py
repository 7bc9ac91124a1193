# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl` and the samples' JSON lines: the record of a run that always exists and can be cut back."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROLLOUTS, SAMPLES = "rollouts", "samples"
"""Tables: of training, and of evaluations."""


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
        for folder in (path.parent, samples_dir):
            folder.mkdir(parents=True, exist_ok=True)
        lines = _lines(path)[:keep_records] if keep_records is not None else []
        if keep_records is not None and len(lines) < keep_records:
            warnings.warn(
                f"{path} has {len(lines)} records, the checkpoint counted {keep_records}: some were lost.",
                stacklevel=3,
            )
        self.kept: list[dict[str, Any]] = [json.loads(line) for line in lines]
        _rewrite(path, lines)
        if keep_records is None:
            for table in self._tables():
                table.unlink()
        self._files: dict[Path, _LineFile] = {path: _LineFile(path)}

    def _tables(self) -> list[Path]:
        paths = [self._samples_dir / f"{name}.jsonl" for name in (ROLLOUTS, SAMPLES)]
        return [path for path in paths if path.exists()]

    def start(self, description: Mapping[str, Any], *, total_steps: int, step: int) -> None:
        """Cuts the tables back to what was there at this step."""
        del description, total_steps
        for table in self._tables():
            _rewrite(table, [line for line in _lines(table) if json.loads(line)["step"] <= step])

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
        self._waiting = b""

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes a line, or keeps it until there is room."""
        line = json.dumps({key: jsonable(value) for key, value in entry.items()}, ensure_ascii=False)
        told = bool(self._waiting)
        self._waiting += line.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # half a line would spoil the file for every reader
            if not told:
                warnings.warn(
                    f"Cannot write to {self._path} ({error}); its lines wait in memory.", stacklevel=4
                )

    def _write(self) -> None:
        done = 0
        while done < len(self._waiting):
            done += os.write(self._descriptor, self._waiting[done:])
        self._size += done
        self._waiting = b""

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


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


def _lines(path: Path) -> list[str]:
    """Whole lines of a file; one that a crash cut short is not counted."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    # Only "\n" ends a line here: samples may hold every other character that `splitlines` would break at.
    return text.split("\n")[:-1]


def _rewrite(path: Path, lines: Sequence[str]) -> None:
    """Replaces a file's content in one step."""
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    aside.replace(path)
