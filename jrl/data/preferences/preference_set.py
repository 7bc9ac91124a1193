# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: a prompt with a better and a worse completion, for DPO and for reward models."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.data.ordering import batch_rows
from jrl.data.preferences.comparison_format import (
    ComparisonFormat,
    ComparisonRow,
    token_columns,
    tokenized_row,
)
from jrl.data.preferences.preference_format import PreferenceFormat
from jrl.data.preferences.preference_records import check_preferences, check_rows
from jrl.data.preferences.preference_tokens import TokenPair, tokenize_pairs, tokenize_whole
from jrl.data.sources.fingerprint import fingerprint
from jrl.data.sources.mapping import map_records, tokenizer_key
from jrl.typing import ComparisonBatch, PreferenceBatch


class PreferenceSet:
    """Tokenised preference pairs and their batches.

    Rows have `chosen` and `rejected` with a `prompt`, or both begin with it; texts, or messages for the tokenizer's
    chat template: `preference_records` says what columns mean, `preference_tokens` where the prompt ends.

    Args:
      records: Mappings, or a list of pairs that are tokenised already. They are not changed.
      tokenizer: With an EOS token.
      max_length: As in `PreferenceFormat`, like the following ones.
      seed: Of the order.
      max_prompt_length: Most tokens of a prompt.
      max_completion_length: Most tokens of a completion.
      truncation_mode: Which end of a pair over `max_length` is kept.
      decoder_start_token_id: Of a seq2seq model.
      num_proc: Worker processes that tokenise; None: none but this one.

    Attributes:
      rows: The pairs that are in the set.
      kept: Number of each row's record among those given.
      num_truncated: Pairs of which something was cut; they are warned of once.
      num_dropped: Pairs without a completion, from the start or by truncation, or with twice the same; they are left
        out and warned of once.
      num_empty: Pairs in the set with an empty completion, which is EOS alone; they are warned of once.
      num_merged: Pairs in which a token would span the seam of prompt and completion; they are warned of once.

    Raises:
      ValueError: If there are no records, one is malformed, or nothing is left of any; the message names the row.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]] | list[TokenPair],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        max_prompt_length: int | None = None,
        max_completion_length: int | None = None,
        truncation_mode: str = "keep_start",
        decoder_start_token_id: int | None = None,
        num_proc: int | None = None,
    ) -> None:
        self.format = PreferenceFormat(
            tokenizer=tokenizer,
            max_length=max_length,
            max_prompt_length=max_prompt_length,
            max_completion_length=max_completion_length,
            truncation_mode=truncation_mode,
            decoder_start_token_id=decoder_start_token_id,
        )
        self._seed = seed
        if isinstance(records, list) and records and isinstance(records[0], TokenPair):
            pairs = records
            empty = [not (pair.chosen and pair.rejected) for pair in pairs]
        else:
            given = check_preferences(records)
            empty = ["" in (record.chosen, record.rejected) for record in given]
            pairs = [
                TokenPair(*row)
                for row in map_records(
                    functools.partial(tokenize_pairs, tokenizer, is_seq2seq=self.format.is_seq2seq),
                    given,
                    num_proc=num_proc,
                    description="samples",
                    cache_key=_key(tokenizer, self.format.is_seq2seq),
                    batched=True,
                )
            ]
        cuts = [self.format.cut(pair) for pair in pairs]
        self.kept = [index for index, (row, _) in enumerate(cuts) if row is not None]
        self.rows = [row for row, _ in cuts if row is not None]
        self.num_truncated = sum(is_cut for _, is_cut in cuts)
        self.num_dropped = len(pairs) - len(self.rows)
        self.num_merged = sum(pair.merged for pair in pairs)
        self.num_empty = sum(empty[row] for row in self.kept)
        self._references: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._warn(len(pairs))

    def __len__(self) -> int:
        return len(self.rows)

    def sha256(self) -> str:
        """Fingerprint of the tokens, of which are learned, and of their order."""
        return fingerprint(self.rows)

    def set_reference(
        self, chosen: Sequence[Float[np.ndarray, "n"]], rejected: Sequence[Float[np.ndarray, "n"]]
    ) -> None:
        """Keeps the reference's log-probabilities for all batches to come.

        Args:
          chosen: One array for each of `rows`: one log-probability a token of its preferred completion.
          rejected: The same of the other completions.
        Raises:
          ValueError: If there is an array too few, or one has the wrong length.
        """
        for name, arrays in (("chosen", chosen), ("rejected", rejected)):
            if len(arrays) != len(self):
                raise ValueError(
                    f"`{name}` must have one array for each of {len(self)} pairs, got {len(arrays)}."
                )
        for index, (row, good, bad) in enumerate(zip(self.rows, chosen, rejected, strict=True)):
            expected = len(row.chosen.tokens), len(row.rejected.tokens)
            if (len(good), len(bad)) != expected:
                raise ValueError(
                    f"pair {index} has completions of {expected} tokens, got log-probabilities for "
                    f"{(len(good), len(bad))}."
                )
        self._references = [
            (np.asarray(good, np.float32), np.asarray(bad, np.float32))
            for good, bad in zip(chosen, rejected, strict=True)
        ]

    def batch(self, step: int, batch_size: int) -> PreferenceBatch:
        """The pairs of optimizer step `step`, a pure function of (seed, step, batch_size).

        Every pass has an order of its own. The last batch of a pass is filled up with masked copies, so that every
        batch has `batch_size` pairs and none comes twice in a pass.

        Args:
          step: At least 0.
          batch_size: Number of pairs.
        Returns:
          As `batch_of`.
        """
        return self.batch_of(*batch_rows(step, batch_size, size=len(self), seed=self._seed))

    def batch_of(self, indices: Int[np.ndarray, "B"], real: Bool[np.ndarray, "B"]) -> PreferenceBatch:
        """Collates pairs of `rows` to a batch.

        Both completions have rows of one width L and windows of one width T, each the bucket of its longest: there may
        be as many programs as pairs of the two occur, times the buckets of contexts.

        Args:
          indices: Numbers of `rows`.
          real: False on copies that only fill the batch up.
        Returns:
          NumPy arrays. `starts` is the prompt's length − 1, and window position t speaks of token t of the completion.
          The reference's log-probabilities are 0 before `set_reference`, and where nothing is learned.
        """
        references = None if self._references is None else [self._references[index] for index in indices]
        return self.format.collate([self.rows[index] for index in indices], real, references)

    def _warn(self, given: int) -> None:
        limits = self.format
        if not self.rows and not self.num_truncated:
            raise ValueError(
                f"`samples`: nothing to learn from is left of {given} pairs: in all `chosen` and `rejected` are "
                "equal, or there is no completion."
            )
        if not self.rows:
            raise ValueError(
                f"`samples`: nothing to learn from is left of {given} pairs at {limits.max_length} tokens "
                f"({limits.truncation_mode}): raise `max_length`, or give a lower `max_prompt_length`."
            )
        cut = (
            f"{self.num_truncated} of {given} pairs were cut to {limits.max_length} tokens ({limits.truncation_mode}; "
            f"prompt {limits.max_prompt_length}, completion {limits.max_completion_length})"
        )
        dropped = f"{self.num_dropped} of {given} pairs have no completion left, or twice the same, and were dropped"
        told = [text for text, count in ((cut, self.num_truncated), (dropped, self.num_dropped)) if count]
        if told:
            warnings.warn(f"{'; '.join(told)}.", stacklevel=3)
        if self.num_empty:
            warnings.warn(
                f"{self.num_empty} of {given} pairs have an empty completion, which is the end of text alone: is that "
                "what they are to teach?",
                stacklevel=3,
            )
        if self.num_merged:
            warnings.warn(
                f"{self.num_merged} of {given} pairs have a token across the seam of prompt and completion; those "
                "completions were tokenised by themselves, as no sampler writes such a token. Does white space that "
                "belongs to completions stand at the end of prompts?",
                stacklevel=3,
            )


class ComparisonSet:
    """Pairs of texts that a reward model learns to rank, and their batches.

    Rows are as in `PreferenceSet`; prompt and completion are one text here. They may also hold ids: `input_ids_chosen`,
    `attention_mask_chosen`, `input_ids_rejected`, `attention_mask_rejected`, or the other names of
    `jrl.data.preferences.comparison_format.TOKEN_COLUMNS`; ids are taken as they are. `margin` may stand in either.

    Args:
      records: Mappings. They are not changed.
      tokenizer: With a pad token; texts end with EOS if it has one.
      max_length: Most tokens of a text. Nothing is cut, since a text without its end is another text: pairs with a
        longer one are left out. An empty text after its prompt is kept: its end is learned.
      seed: Of the order.
      num_proc: Worker processes that tokenise; None: none but this one.

    Attributes:
      rows: The pairs that are in the set.
      kept: Number of each row's record among those given.
      num_truncated: 0.
      num_dropped: Pairs with a text over `max_length`, an empty one, or twice the same; they are warned of once.

    Raises:
      ValueError: If there are no records, one is malformed, or none is left; the message names the row.
    """

    num_truncated = 0

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        num_proc: int | None = None,
    ) -> None:
        self.format = ComparisonFormat(tokenizer=tokenizer, max_length=max_length)
        self._seed = seed
        check_rows(records)
        found = (
            _comparisons(records, tokenizer, num_proc)
            if token_columns(records[0]) is None
            else [tokenized_row(record, row, self.format.num_ids) for row, record in enumerate(records)]
        )
        self.kept = [index for index, row in enumerate(found) if self.format.fits(row)]
        self.rows = [found[index] for index in self.kept]
        self.num_dropped = len(found) - len(self.rows)
        if not self.rows:
            raise ValueError(_nothing_left(found, max_length))
        if self.num_dropped:
            warnings.warn(
                f"{self.num_dropped} of {len(found)} pairs have a text of more than {max_length} tokens (or an empty "
                f"one, or twice the same) and were dropped; {len(self.rows)} are left.",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.rows)

    def sha256(self) -> str:
        """Fingerprint of the tokens, the margins and their order."""
        return fingerprint(self.rows)

    def batch(self, step: int, batch_size: int) -> ComparisonBatch:
        """The pairs of optimizer step `step`, a pure function of (seed, step, batch_size), as in `PreferenceSet`."""
        return self.batch_of(*batch_rows(step, batch_size, size=len(self), seed=self._seed))

    def batch_of(self, indices: Int[np.ndarray, "B"], real: Bool[np.ndarray, "B"]) -> ComparisonBatch:
        """Collates pairs of `rows` to a batch, both texts in arrays of one width, the bucket of the longest.

        Args:
          indices: Numbers of `rows`.
          real: False on copies that only fill the batch up.
        """
        return self.format.collate([self.rows[index] for index in indices], real)


def _comparisons(
    records: Sequence[Mapping[str, Any]], tokenizer: Any, num_proc: int | None
) -> list[ComparisonRow]:
    pairs = check_preferences(records)
    tokens = map_records(
        functools.partial(tokenize_whole, tokenizer),
        pairs,
        num_proc=num_proc,
        description="samples",
        cache_key=tokenizer_key(tokenizer),
        batched=True,
    )
    return [
        ComparisonRow(chosen, rejected, pair.margin)
        for (chosen, rejected), pair in zip(tokens, pairs, strict=True)
    ]


def _nothing_left(rows: Sequence[ComparisonRow], max_length: int) -> str:
    """Why no pair is left."""
    lengths = [max(len(row.chosen), len(row.rejected)) for row in rows]
    if min(lengths) <= max_length:
        return (
            f"`samples`: nothing to learn from is left of {len(rows)} pairs: in all `chosen` and `rejected` are equal, "
            f"one of them is empty, or has more than {max_length} tokens."
        )
    return (
        f"`samples`: all {len(rows)} pairs have a text of more than {max_length} tokens (the shortest pair "
        f"needs {min(lengths)}) and none is left; raise `max_length`."
    )


def _key(tokenizer: Any, is_seq2seq: bool) -> str | None:
    key = tokenizer_key(tokenizer)
    return None if key is None else f"{key} {is_seq2seq}"
