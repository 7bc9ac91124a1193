# SPDX-License-Identifier: Apache-2.0
"""Sampled completions as rows to learn from: the ids that were sampled, never their text again."""

from __future__ import annotations

from collections.abc import Sequence

from jrl.data.dialogue import DialogueRow, learned_rows
from jrl.data.ordering import batch_rows
from jrl.typing import Sequences


class CompletionSet:
    """Prompts with a completion each, and their batches, with the face of `DialogueSet`.

    Only completions are learned, up to their last id: one that the length limit cut teaches no end.

    Args:
      prompts: Ids of each row's prompt; of a seq2seq model, what its encoder reads.
      completions: Ids of each row's completion, at least one.
      pad_token_id: Fills the columns behind each row.
      max_length: Most columns.
      seed: Of the order.
      decoder_start_token_id: First id of the rows of a seq2seq model; None: a completion goes on from its prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        pad_token_id: int,
        max_length: int,
        seed: int,
        decoder_start_token_id: int | None,
    ) -> None:
        self._pad_token_id, self._max_length, self._seed = pad_token_id, max_length, seed
        starts = prompts if decoder_start_token_id is None else [[decoder_start_token_id]] * len(prompts)
        self._contexts = None if decoder_start_token_id is None else [list(row) for row in prompts]
        self._rows = [
            DialogueRow([*start, *completion], [False] * len(start) + [True] * len(completion))
            for start, completion in zip(starts, completions, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, step: int, batch_size: int) -> Sequences:
        """The rows of optimizer step `step`, as `DialogueSet.batch` and `PairSet.batch` return them."""
        indices, real = batch_rows(step, batch_size, size=len(self), seed=self._seed)
        return learned_rows(
            [self._rows[index] for index in indices],
            real,
            pad_token_id=self._pad_token_id,
            max_length=self._max_length,
            contexts=None if self._contexts is None else [self._contexts[index] for index in indices],
        )
