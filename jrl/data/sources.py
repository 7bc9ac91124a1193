# SPDX-License-Identifier: Apache-2.0
"""Prompts, samples and their rewards by name: a file, or a data set of the `datasets` library."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPT_COLUMNS = ("prompt", "text", "query")
OUTPUT_COLUMNS = ("completion", "output", "response")
TEXT_COLUMN = "text"
DIALOGUE_COLUMN = "messages"
REWARD_COLUMNS = ("reward", "score", "label")


def load_prompts(name: str | os.PathLike[str]) -> list[Any]:
    """Prompts of a file or data set.

    Args:
      name: A .txt (one a line, blank lines left out), .jsonl, .json, .csv or .parquet file; otherwise a name for
        `datasets.load_dataset`, with the split after a colon ("stanfordnlp/imdb:test"; "train" if not said).
    Returns:
      Texts where records have nothing else, otherwise dictionaries with "prompt" and the metadata. The text is taken
      from the first of the columns "prompt", "text", "query" that there is.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If there is no such column (the message lists those found), or the file cannot be read.
    """
    return [_prompt(record, index, name) for index, record in enumerate(_records(name))]


def load_samples(name: str | os.PathLike[str]) -> list[Any]:
    """Demonstrations of a file or data set.

    Args:
      name: As for `load_prompts`.
    Returns:
      Pairs `[prompt, output]` where there is a column "prompt" beside "completion", "output" or "response"; dialogues
      `[prompt, output, prompt, output, ...]` where there is a column "messages" that lists texts; otherwise the column
      "text". JSON records may also be texts or lists of texts, which are taken as they are.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If there are no such columns (the message lists those found), or the file cannot be read.
    """
    return [_sample(record, index, name) for index, record in enumerate(_records(name))]


def load_rewarded_samples(name: str | os.PathLike[str]) -> tuple[list[Any], list[float]]:
    """Samples of a file or data set with one reward each.

    Args:
      name: As for `load_prompts`.
    Returns:
      Samples as `load_samples` gives them, and their rewards: numbers, or texts that spell one (as in .csv), from the
      first of the columns "reward", "score", "label" that there is.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If a record has no sample or no reward (the message lists the columns found), if that is no number, or
        if the file cannot be read.
    """
    records = _records(name)
    samples = [_sample(record, index, name) for index, record in enumerate(records)]
    return samples, [_reward(record, index, name) for index, record in enumerate(records)]


def _prompt(record: Any, index: int, name: Any) -> Any:
    if isinstance(record, str):
        return record
    if not isinstance(record, Mapping):
        raise ValueError(f"{name}: record {index} must be a text or an object, got {type(record).__name__}.")
    column = next((column for column in PROMPT_COLUMNS if column in record), None)
    if column is None:
        raise ValueError(
            f"{name}: record {index} needs one of the columns {PROMPT_COLUMNS} for a prompt, "
            f"found {sorted(record)}."
        )
    text = _text(record, column, index, name)
    metadata = {key: value for key, value in record.items() if key != column}
    return {"prompt": text, **metadata} if metadata else text


def _sample(record: Any, index: int, name: Any) -> Any:
    if isinstance(record, str):
        return record
    if isinstance(record, list):
        return list(record)
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{name}: record {index} must be a text, a list or an object, got {type(record).__name__}."
        )
    output = next((column for column in OUTPUT_COLUMNS if column in record), None)
    if "prompt" in record and output is not None:
        return [_text(record, "prompt", index, name), _text(record, output, index, name)]
    if DIALOGUE_COLUMN in record:
        return _dialogue(record, index, name)
    if TEXT_COLUMN in record:
        return _text(record, TEXT_COLUMN, index, name)
    raise ValueError(
        f'{name}: record {index} needs the column "{TEXT_COLUMN}" or "{DIALOGUE_COLUMN}", or "prompt" with one of '
        f"{OUTPUT_COLUMNS}, found {sorted(record)}."
    )


def _dialogue(record: Mapping[str, Any], index: int, name: Any) -> list[str]:
    messages = record[DIALOGUE_COLUMN]
    if isinstance(messages, list) and all(isinstance(message, str) for message in messages):
        return list(messages)
    raise ValueError(
        f'{name}: "{DIALOGUE_COLUMN}" of record {index} must be a list of texts [prompt, output, ...], got '
        f"{str(messages)[:60]!r}. Messages with roles become texts by the chat template of the tokenizer."
    )


def _reward(record: Any, index: int, name: Any) -> float:
    found = record if isinstance(record, Mapping) else {}
    column = next((column for column in REWARD_COLUMNS if column in found), None)
    if column is None:
        raise ValueError(
            f"{name}: record {index} needs one of the columns {REWARD_COLUMNS} for its reward, found "
            f"{sorted(found) if found else type(record).__name__}."
        )
    try:
        return float(found[column])
    except (TypeError, ValueError):
        raise ValueError(
            f'{name}: "{column}" of record {index} must be a number, got {found[column]!r}.'
        ) from None


def _text(record: Mapping[str, Any], column: str, index: int, name: Any) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(f'{name}: "{column}" of record {index} must be a text, got {type(value).__name__}.')
    return value


def _records(name: str | os.PathLike[str]) -> list[Any]:
    """Lines, records or rows of whatever `name` names."""
    path = Path(name)
    read = READERS.get(path.suffix.lower())
    if read is None:
        if path.is_file():
            raise ValueError(f"{name}: jrl reads {sorted(READERS)} files, got {path.suffix!r}.")
        return _dataset_records(str(name))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name}.")
    records = read(path)
    if not records:
        raise ValueError(f"{name} holds no records.")
    return records


def _read_lines(path: Path) -> list[Any]:
    # Not `splitlines`, which also splits at form feeds and Unicode separators inside a prompt.
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def _read_jsonl(path: Path) -> list[Any]:
    records = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not JSON: {error}.") from error
    return records


def _read_json(path: Path) -> list[Any]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}. One record a line is .jsonl.") from error
    if not isinstance(records, list):
        raise ValueError(f"{path} must hold a list of records, got {type(records).__name__}.")
    return records


def _read_csv(path: Path) -> list[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _read_parquet(path: Path) -> list[Any]:
    return list(_load_dataset()("parquet", data_files=str(path), split="train"))


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".txt": _read_lines,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _dataset_records(name: str) -> list[Any]:
    dataset, _, split = name.partition(":")
    return list(_load_dataset()(dataset, split=split or "train"))


def _load_dataset() -> Callable[..., Any]:
    """`datasets.load_dataset`; the library is an extra."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "Data sets by name and parquet files need the `datasets` library: pip install 'jrl[datasets]'. "
            f"Other files must end in one of {sorted(READERS)}."
        ) from error
    loader: Callable[..., Any] = load_dataset
    return loader
