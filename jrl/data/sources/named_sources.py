# SPDX-License-Identifier: Apache-2.0
"""Prompts, samples and their rewards by name: a file, or a data set of the `datasets` library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jrl.data.chat.messages import is_dialogue
from jrl.data.sources.records import read_records

PROMPT_COLUMNS = ("prompt", "text", "query", "messages")
OUTPUT_COLUMNS = ("completion", "output", "response")
TEXT_COLUMN = "text"
DIALOGUE_COLUMN = "messages"
EPISODE_COLUMN = "turns"
"""By it a record is known to be an episode; see `jrl.data.episodes`."""
REWARD_COLUMNS = ("reward", "score", "label")


def load_prompts(name: str | os.PathLike[str]) -> list[Any]:
    """Prompts of a file or data set.

    Args:
      name: A file or the name of a data set, as `read_records` takes them.
    Returns:
      Texts where records have nothing else, otherwise dictionaries with "prompt" and the metadata. The prompt is the
      first of the columns "prompt", "text", "query", "messages" that there is: a text, or a list of messages with
      `role` and `content`.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If there is no such column (the message lists those found), or the file cannot be read.
    """
    return [_prompt(record, index, name) for index, record in enumerate(read_records(name))]


def load_samples(name: str | os.PathLike[str]) -> list[Any]:
    """Demonstrations of a file or data set.

    Args:
      name: As for `load_prompts`.
    Returns:
      Pairs `[prompt, output]` where there is a column "prompt" beside "completion", "output" or "response"; dialogues
      `[prompt, output, prompt, output, ...]` where there is a column "messages" that lists texts; otherwise the column
      "text". JSON records may also be texts, lists of texts or episodes (with "turns"), which are taken as they are.
    Raises:
      FileNotFoundError: If the file does not exist.
      ValueError: If there are no such columns (the message lists those found), or the file cannot be read.
    """
    return [_sample(record, index, name) for index, record in enumerate(read_records(name))]


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
    records = list(read_records(name))
    samples = [_sample(record, index, name) for index, record in enumerate(records)]
    return samples, [_reward(record, index, name) for index, record in enumerate(records)]


def prompt_of(record: Any, row: int) -> Any:
    """A row of a table as `load_prompts` gives it; texts as they are.

    Args:
      record: Of a table given as `prompts`.
      row: Its number, for errors.
    Raises:
      ValueError: If it has none of the columns, with those that it has.
    """
    return _prompt(record, row, "prompts")


def sample_of(record: Any, row: int) -> Any:
    """A row of a table as `load_samples` gives it; texts and lists as they are.

    Args:
      record: Of a table given as `samples`.
      row: Its number, for errors.
    Raises:
      ValueError: If it has none of the columns, with those that it has.
    """
    return _sample(record, row, "samples")


def _prompt(record: Any, index: int, name: Any) -> Any:
    if isinstance(record, str):
        return record
    if not isinstance(record, Mapping):
        raise ValueError(f"{name}: record {index} must be a text or an object, got {type(record).__name__}.")
    column = next((column for column in PROMPT_COLUMNS if column in record), None)
    if column is None:
        raise ValueError(
            f"{name}: record {index} needs one of the columns {PROMPT_COLUMNS} for a prompt, "
            f"found {sorted(record)}. Rename the column of the prompts to 'prompt'."
            f"{' The first line of a .csv file names its columns.' if str(name).endswith('.csv') else ''}"
        )
    is_chat = is_dialogue(record[column])
    prompt = record[column] if is_chat else _text(record, column, index, name)
    metadata = {key: value for key, value in record.items() if key != column}
    return {"prompt": prompt, **metadata} if metadata or is_chat else prompt


def _sample(record: Any, index: int, name: Any) -> Any:
    if isinstance(record, str):
        return record
    if isinstance(record, list):
        return list(record)
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{name}: record {index} must be a text, a list or an object, got {type(record).__name__}."
        )
    if EPISODE_COLUMN in record:
        return dict(record)
    output = next((column for column in OUTPUT_COLUMNS if column in record), None)
    if "prompt" in record and output is not None:
        return [_text(record, "prompt", index, name), _text(record, output, index, name)]
    if DIALOGUE_COLUMN in record:
        return _dialogue(record, index, name)
    if TEXT_COLUMN in record:
        return _text(record, TEXT_COLUMN, index, name)
    raise ValueError(
        f'{name}: record {index} needs the column "{TEXT_COLUMN}" or "{DIALOGUE_COLUMN}", or "prompt" with one of '
        f"{OUTPUT_COLUMNS}, found {sorted(record)}. Rename them to 'prompt' and 'completion', or 'text'."
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
            f"{sorted(found) if found else type(record).__name__}. Rename yours to 'reward', or add it, a number a "
            "record; `jrl sft` learns without rewards."
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
