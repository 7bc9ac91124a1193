# SPDX-License-Identifier: Apache-2.0
"""Rows of what `jrl.train` is given as prompts or samples: a list, a file, a table or a stream."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jrl.data.sources.named_sources import load_prompts, prompt_of, sample_of
from jrl.data.sources.records import READERS, RecordStream, is_table, read_records

MOST_ROWS = 2**20
"""Rows that are read of an iterator: one without an end would fill the memory."""


def prompt_rows(name: str, given: Any) -> Any:
    """Prompts as a list; what is no file, table or stream stays as it is.

    Args:
      name: Of the argument, for errors.
      given: A path of a file that `read_records` reads, a table of pandas, a `datasets.Dataset`, several by split, a
        stream or generator, or a list.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If a row has no prompt, or a stream more than 1,048,576 rows.
    """
    if is_file_name(given):
        try:
            return load_prompts(given)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"`{name}`: {error} A single prompt goes into a list: `{name}=[{str(given)!r:.60}]`."
            ) from error
    if is_table(given):
        rows = read_records(given)
        return [prompt_of(row, number) for number, row in enumerate(_whole(name, rows))]
    if not isinstance(given, RecordStream | Iterator):
        return given
    return [
        prompt_of(row, number) if isinstance(row, Mapping) else row
        for number, row in enumerate(_whole(name, given))
    ]


def sample_rows(given: Any, *, rewarded: bool) -> Any:
    """Samples as a list, or as a stream where a data set is one; what is no file, table or generator stays as it is.

    Args:
      given: As in `prompt_rows`.
      rewarded: Whether each has a reward: rows of tables and files then become texts, pairs or dialogues.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If a row has no sample, or a generator more than 1,048,576 rows.
    """
    if is_file_name(given) or is_table(given):
        rows = read_records(given)
        if rewarded and not isinstance(rows, RecordStream):
            return [sample_of(row, number) for number, row in enumerate(rows)]
        return rows
    return _whole("samples", given) if isinstance(given, Iterator) else given


def is_file_name(given: Any) -> bool:
    """True for the path of a file of records, by its ending; any other text is no path."""
    return isinstance(given, str | os.PathLike) and Path(given).suffix.lower() in READERS


def _whole(name: str, rows: Iterable[Any]) -> list[Any]:
    """All rows."""
    found = list(itertools.islice(rows, MOST_ROWS + 1))
    if len(found) > MOST_ROWS:
        raise ValueError(
            f"`{name}` must end: a {type(rows).__name__} is read to its end before training, and this one has more "
            f"than {MOST_ROWS} rows. Give a list of those to use."
        )
    return found
