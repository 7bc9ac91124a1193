# SPDX-License-Identifier: Apache-2.0
"""Records from wherever they are: lists, files, data sets of the `datasets` library, streams. One way in for all."""

from __future__ import annotations

import csv
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.data.sources.fingerprint import fingerprint
from jrl.suggestions import did_you_mean

DEFAULT_SPLIT = "train"
_NEAR = 0.85
"""How alike names of files must be to be suggested: `nope.txt` and `run4.txt` are two thirds alike by their ending."""


class RecordStream:
    """Records that come one after another, without a known number.

    Args:
      source: Gives them from the first one whenever it is iterated over, such as a `datasets.IterableDataset`. A
        generator gives them once.
      identity: What tells the source from others; None: what it says of itself.

    Attributes:
      fingerprint: SHA-256 of what is known of the records without reading them: the identity of a data set, its
        description and columns; of other sources, the type. Two streams of one fingerprint may still differ.
    """

    def __init__(self, source: Iterable[Any], *, identity: str | None = None) -> None:
        self._source, self._iterators = source, 0
        self.fingerprint = fingerprint(_identity(source) if identity is None else identity)

    def __iter__(self) -> Iterator[Any]:
        return self.restart()

    def restart(self) -> Iterator[Any]:
        """The records from the first one.

        Raises:
          ValueError: If the source can be read once only, and was.
        """
        iterator = iter(self._source)
        if iterator is self._source and self._iterators:
            raise ValueError(
                f"this {type(self._source).__name__} gives its records once, and they were read: give an object that "
                "begins anew whenever it is iterated over (a list, a `datasets.IterableDataset`, a class with "
                "`__iter__`) for more than one pass, or to resume a run."
            )
        self._iterators += 1
        return iterator


def read_records(
    source: Any, *, split: str = DEFAULT_SPLIT, streaming: bool = False
) -> Sequence[Any] | RecordStream:
    """Records of any source.

    Args:
      source: A list of mappings or texts; a .txt (one a line, blank lines left out), .jsonl, .json, .csv or .parquet
        file; otherwise a text is a name for `datasets.load_dataset`, with the split after a colon
        ("stanfordnlp/imdb:test"). A table of pandas, a `datasets.Dataset`, or several of them by split (`DatasetDict`).
        What has no length (a `datasets.IterableDataset`, a generator) is a stream.
      split: Which part of a data set with several.
      streaming: Whether a data set is read as the run goes on, not beforehand, where `source` is its name.
    Returns:
      A list, or a stream.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If it cannot be read, or holds no records; if there is no such split.
      TypeError: If `source` is nothing that holds records.
    """
    if isinstance(source, str | os.PathLike):
        return _read_named(source, split, streaming)
    if isinstance(source, RecordStream):
        return source
    if isinstance(source, Mapping):
        if split not in source or isinstance(source[split], str):
            raise ValueError(
                f"`split` must be one of {sorted(map(str, source))}, got {split!r}: a mapping holds records by split, "
                "not a list a column (`datasets.Dataset.from_dict` makes rows of those)."
            )
        return read_records(source[split], split=split)
    if hasattr(source, "iterrows"):
        # A table of pandas, which gives its column names when it is iterated over.
        source = source.to_dict("records")
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        records = list(source) if hasattr(source, "__iter__") else [source[row] for row in range(len(source))]
        if not records:
            raise ValueError(f"the {type(source).__name__} holds no records.")
        return records
    if isinstance(source, Iterable):
        return RecordStream(source)
    raise TypeError(
        f"records must be a list, the path of a file, the name of a data set, a data set or a stream, got "
        f"{type(source).__name__}."
    )


def _read_named(name: str | os.PathLike[str], split: str, streaming: bool) -> Sequence[Any] | RecordStream:
    """Lines, records or rows of whatever `name` names."""
    path = Path(name)
    is_file = os.path.isfile(path)  # false, too, where a name is too long for a file
    read = READERS.get(path.suffix.lower())
    if read is None:
        if is_file:
            raise ValueError(f"{name}: jrl reads {sorted(READERS)} files, got {path.suffix!r}.")
        dataset, _, chosen = str(name).partition(":")
        options: dict[str, Any] = {"streaming": True} if streaming else {}
        found = dataset_loader()(dataset, split=chosen or split, **options)
        return RecordStream(found) if streaming else list(found)
    if not is_file:
        others = (
            sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
            if os.path.isdir(path.parent)
            else []
        )
        near = (
            did_you_mean(path.name, others, cutoff=_NEAR)
            or f" Give its path from there, as in `data/{path.name:.60}`, or the whole path."
        )
        raise FileNotFoundError(f"there is no file {name!s:.200}, seen from {Path.cwd()}.{near}")
    try:
        records = read(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}.") from error
    if not records:
        raise ValueError(
            f"{name} holds no records: at least one must be there. Is it still being written? A line of a .jsonl file "
            'is such as {"prompt": "The film was"}; a line of a .txt file is a text.'
        )
    return records


def _identity(source: Any) -> list[str]:
    """Identity of a source, as far as it states one."""
    found = [type(source).__name__]
    # Of the two kinds of `datasets`, the first has a fingerprint of its content, the second a description alone.
    for name in ("_fingerprint", "info", "n_shards"):
        if hasattr(source, name):
            found.append(str(getattr(source, name)))
    return found


def is_table(source: Any) -> bool:
    """True for tables of rows, not lists: of pandas, a `datasets.Dataset`, or those by split."""
    if isinstance(source, Mapping):
        return any(is_table(part) for part in source.values())
    return hasattr(source, "iterrows") or hasattr(source, "column_names")


def parse_json(text: str, where: str) -> Any:
    """Parses a JSON document.

    Args:
      text: The document.
      where: Names it in the error, as "data.json" or "data.jsonl: line 3".
    Raises:
      ValueError: If it is none, or nested deeper than Python's parser goes.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One record a line is .jsonl." if error.msg == "Extra data" else ""
        if error.pos == 0 and text.strip():
            hint = f" It begins with {text.strip()[:20]!r}. A file of plain text, one prompt a line, is named .txt."
        raise ValueError(f"{where} is not JSON: {error}.{hint}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read: is it data at all?") from error


def _read_lines(path: Path) -> list[Any]:
    # Not `splitlines`, which also splits at form feeds and Unicode separators inside a prompt.
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def _read_jsonl(path: Path) -> list[Any]:
    records = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                records.append(parse_json(line, f"{path}: line {number}"))
    return records


def _read_json(path: Path) -> list[Any]:
    records = parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(records, list):
        raise ValueError(f"{path} must hold a list of records, got {type(records).__name__}.")
    return records


def _read_csv(path: Path) -> list[Any]:
    limit = csv.field_size_limit(sys.maxsize)  # of the whole process: a field may be a book
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(_without_nul(file, path))
            return [_checked_row(row, rows.line_num, path) for row in rows]
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _without_nul(lines: Iterable[str], path: Path) -> Iterator[str]:
    """The lines of a file, none of which may hold a NUL: text in UTF-16 does."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise ValueError(f"{path}: line {number} holds a NUL character: is it UTF-16, or no text?")
        yield line


def _checked_row(row: dict[Any, Any], line: int, path: Path) -> dict[str, Any]:
    """A row that has as many fields as the first line has names."""
    if None in row or None in row.values():
        kind = "more" if None in row else "fewer"
        raise ValueError(f"{path}: line {line} has {kind} fields than the first line has names.")
    return row


def _read_parquet(path: Path) -> list[Any]:
    return list(dataset_loader()("parquet", data_files=str(path), split="train"))


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".txt": _read_lines,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def dataset_loader() -> Callable[..., Any]:
    """`datasets.load_dataset`, which runs no code of a data set.

    Raises:
      ValueError: If the library is not installed: it is an extra.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "Data sets by name and parquet files need the `datasets` library: pip install datasets. "
            f"Other files must end in one of {sorted(READERS)}."
        ) from error
    # Versions that could run a script of the data set ask whether they may, where nothing is said.
    return functools.partial(load_dataset, trust_remote_code=False)
