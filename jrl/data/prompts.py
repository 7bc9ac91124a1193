# SPDX-License-Identifier: Apache-2.0
"""Prompts of online algorithms: tokenised once, in an order that a resumed run repeats."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int

from jrl.data.batching import bucket_length, pad_left
from jrl.data.chat.messages import is_dialogue
from jrl.data.chat.templates import render_prompt
from jrl.data.ordering import shuffled
from jrl.data.sources.fingerprint import fingerprint
from jrl.data.tokenizer import cut, prompt_prefix, special_tokens_around, tokenize
from jrl.typing import ModelInputs

LONG_PROMPTS = ("truncate", "drop", "error")
SEPARATOR = "<sep>"


class PromptBatch(NamedTuple):
    """Some prompts, on the host.

    Attributes:
      inputs: int32 ids and mask (B P), left-padded; of a seq2seq model, what the encoder reads, and a start id (B 1).
      token_lists: The prompts' ids without padding.
      metadata: One list a metadata key, aligned with the rows.
    """

    inputs: ModelInputs
    token_lists: list[list[int]]
    metadata: dict[str, list[Any]]


class PromptSet:
    """Tokenised prompts with their metadata.

    Args:
      prompts: Texts or lists of messages (rendered by the chat template, with the generation prefix), or mappings with
        either under "prompt" and metadata under every other key. They are not
        changed. The same keys must stand in all of them.
      tokenizer: Puts its special tokens before a prompt as before any text, once (BOS of Llama and Gemma); those behind
        it only where an encoder reads the prompts. `truncation_side` decides what over-long prompts lose; special
        tokens around them stay.
      max_length: Most tokens of a prompt.
      seed: Of the order.
      long_prompts: What happens to a prompt above `max_length`: "truncate", "drop" (the order of the others stays
        as it is) or "error". What was cut or dropped is counted and warned of once.
      decoder_start_token_id: Of a seq2seq model, whose encoder reads the prompts; None: a decoder goes on from them.
      add_special_tokens: False leaves out what stands before a decoder's prompt, as trlX does.

    Attributes:
      num_truncated: Prompts that were cut.
      num_dropped: Prompts that were left out.
      separator: Stands between prompt and output in a sample's text; None: the output goes on from the prompt.

    Raises:
      ValueError: If there are no prompts, or one is not a text, has no tokens, lacks a key, or is too long under
        "error"; the message names its index.
    """

    def __init__(
        self,
        prompts: Sequence[str | Mapping[str, Any]],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        long_prompts: str,
        decoder_start_token_id: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        if long_prompts not in LONG_PROMPTS:
            raise ValueError(f"`long_prompts` must be one of {LONG_PROMPTS}, got {long_prompts!r}.")
        if max_length < 1:
            raise ValueError(f"`max_length` must be at least 1, got {max_length}.")
        texts, columns = _split(prompts)
        self._begin(tokenizer, max_length, seed, decoder_start_token_id)
        prefix, suffix = (
            (prompt_prefix(tokenizer, add_special_tokens=add_special_tokens), [])
            if decoder_start_token_id is None
            else special_tokens_around(tokenizer)
        )
        room = max_length - len(prefix) - len(suffix)
        if room < 1:
            raise ValueError(
                f"`max_length` must leave room beside the {len(prefix) + len(suffix)} special tokens of a prompt, got "
                f"{max_length}."
            )
        rows, prefixes = _encode(tokenizer, texts, prefix)
        if not prefix + suffix:
            _refuse_empty(rows, texts)
        too_long = [index for index, row in enumerate(rows) if len(row) > room]
        if too_long and long_prompts == "error":
            raise ValueError(
                f"`prompts`: prompt {too_long[0]} has {len(rows[too_long[0]])} tokens, and there is room for "
                f"{room} (`seq_length` - `max_new_tokens`); {len(too_long)} of {len(rows)} are too long. "
                "Set `train.long_prompts: truncate` or `drop`, or raise `train.seq_length` by "
                f"{max(map(len, rows)) - room}."
            )
        left_out = set(too_long) if long_prompts == "drop" else set()
        kept = [index for index in range(len(rows)) if index not in left_out]
        self.num_dropped = len(rows) - len(kept)
        self.num_truncated = len(too_long) - self.num_dropped
        if not kept:
            raise ValueError(
                f"`prompts`: all {len(rows)} have more than {room} tokens and `long_prompts` is 'drop', so none "
                "is left; raise `train.seq_length`."
            )
        side = tokenizer.truncation_side
        self._rows = [prefixes[index] + cut(rows[index], room, side) + suffix for index in kept]
        self._metadata = {name: [column[index] for index in kept] for name, column in columns.items()}
        if too_long:
            done = f"were dropped; {len(kept)} are left" if self.num_dropped else f"were cut on the {side}"
            warnings.warn(
                f"{len(too_long)} of {len(rows)} prompts have more than {room} tokens and {done} "
                f"(the first is prompt {too_long[0]}, with {len(rows[too_long[0]])} tokens).",
                stacklevel=2,
            )

    @classmethod
    def from_tokens(
        cls,
        rows: Sequence[Sequence[int]],
        metadata: Mapping[str, Sequence[Any]],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        decoder_start_token_id: int | None = None,
    ) -> Self:
        """Prompts that are tokenised already, special tokens included; longer ones are cut and warned of.

        Args:
          rows: Ids of each prompt.
          metadata: One list a key, aligned with the rows.
          tokenizer: For its pad token, its truncation side and its separator.
          max_length: Most tokens of a prompt.
          seed: Of the order.
          decoder_start_token_id: As in the constructor.
        Raises:
          ValueError: If there are no rows, or one is empty; the message names its index.
        """
        if len(rows) == 0:
            raise ValueError("`prompts` must hold at least one prompt, got none.")
        for index, row in enumerate(rows):
            if len(row) == 0:
                raise ValueError(f"`prompts`: prompt {index} has no tokens.")
        found = cls.__new__(cls)
        found._begin(tokenizer, max_length, seed, decoder_start_token_id)
        side = tokenizer.truncation_side
        found._rows = [cut([int(token) for token in row], max_length, side) for row in rows]
        found._metadata = {name: list(column) for name, column in metadata.items()}
        found.num_truncated, found.num_dropped = sum(len(row) > max_length for row in rows), 0
        if found.num_truncated:
            warnings.warn(
                f"{found.num_truncated} of {len(rows)} prompts have more than {max_length} tokens and were cut on the "
                f"{side}.",
                stacklevel=2,
            )
        return found

    def _begin(self, tokenizer: Any, max_length: int, seed: int, decoder_start_token_id: int | None) -> None:
        self._seed, self._max_length, self._pad_token_id = seed, max_length, tokenizer.pad_token_id
        self._start = decoder_start_token_id
        self.separator = None if decoder_start_token_id is None else tokenizer.sep_token or SEPARATOR

    def __len__(self) -> int:
        return len(self._rows)

    def sha256(self) -> str:
        """Fingerprint of the tokens, the metadata and their order."""
        return fingerprint(self._rows, self._metadata)

    def order(self, global_indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        """Number of the prompt at each place of the endless shuffled stream: a pure function of (seed, place)."""
        return shuffled(global_indices, size=len(self), seed=self._seed)

    def width(self, indices: Int[np.ndarray, "B"]) -> int:
        """Columns for these prompts: the bucket of the longest, at most `max_length`."""
        longest = max(len(self._rows[index]) for index in indices)
        return min(bucket_length(longest), self._max_length)

    def metadata(self, indices: Int[np.ndarray, "B"]) -> dict[str, list[Any]]:
        """Metadata of prompts, a list for each key, aligned with `indices`."""
        return {name: [column[index] for index in indices] for name, column in self._metadata.items()}

    def rows(self, indices: Int[np.ndarray, "B"], *, width: int) -> PromptBatch:
        """Prompts of these numbers, left-padded to `width` columns."""
        token_lists = [list(self._rows[index]) for index in indices]
        # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
        arrays: Any = pad_left(token_lists, pad_token_id=self._pad_token_id, width=width)
        inputs = ModelInputs(*arrays)
        if self._start is not None:
            start: Any = np.full((len(token_lists), 1), self._start, np.int32)
            real: Any = np.ones(start.shape, bool)
            inputs = ModelInputs(start, real, None, *arrays)
        return PromptBatch(inputs, token_lists, self.metadata(indices))


def _encode(
    tokenizer: Any, prompts: Sequence[Any], prefix: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of texts and of messages, and what stands before each: nothing before what a chat template has written."""
    texts = iter(tokenize(tokenizer, [prompt for prompt in prompts if isinstance(prompt, str)]))
    rows, prefixes = [], []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            row = next(texts)
            rows.append(row[len(prefix) :] if row[: len(prefix)] == prefix else row)
            prefixes.append(prefix)
        else:
            rows.append(render_prompt(tokenizer, prompt, row=number))
            prefixes.append([])
    return rows, prefixes


def _refuse_empty(rows: Sequence[Sequence[int]], texts: Sequence[Any]) -> None:
    """Refuses prompts without tokens, which nothing follows."""
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"`prompts`: prompt {index} ({texts[index]!r}) has no tokens. To sample from the start of a "
                "document, give the tokenizer's BOS or EOS text as the prompt."
            )


def _split(prompts: Sequence[Any]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Texts or messages, and metadata columns, of the caller's prompts, which stay as they are."""
    if isinstance(prompts, str | Mapping):
        raise ValueError(
            "`prompts` must be a list of texts or of mappings, got a single one: put it in a list."
        )
    if len(prompts) == 0:
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    texts: list[Any] = []
    names = [name for name in prompts[0] if name != "prompt"] if isinstance(prompts[0], Mapping) else []
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for index, prompt in enumerate(prompts):
        record = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "prompt" not in record:
            raise ValueError(
                f'`prompts`: prompt {index} has no key "prompt", it has {sorted(map(str, record))}: rename the one '
                "that holds the text to `prompt`; the others are metadata for the reward function."
            )
        found = {name for name in record if name != "prompt"}
        if found != set(names):
            raise ValueError(
                f"`prompts`: prompt {index} has the metadata {sorted(map(str, found))}, prompt 0 has "
                f"{sorted(map(str, names))}; all must have the same keys."
            )
        if not isinstance(record["prompt"], str) and not is_dialogue(record["prompt"]):
            raise ValueError(
                f"`prompts`: prompt {index} must be a text or a list of messages with `role` and `content`, got "
                f"{type(record['prompt']).__name__}: {record['prompt']!r:.60}. Leave it out, as by `prompts = "
                "[prompt for prompt in prompts if isinstance(prompt, str)]`, or write it as a text."
            )
        texts.append(record["prompt"])
        for name in names:
            columns[name].append(record[name])
    return texts, columns
