# SPDX-License-Identifier: Apache-2.0
"""Sampled completions as rows to learn from: the ids that were sampled, never their text again."""

from __future__ import annotations

from collections.abc import Sequence

from jrl.data.demonstrations.rows import DialogueRow, RowSet


class CompletionSet(RowSet):
    """Prompts with a completion each, and their batches.

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
        starts = prompts if decoder_start_token_id is None else [[decoder_start_token_id]] * len(prompts)
        rows = [
            DialogueRow([*start, *completion], [False] * len(start) + [True] * len(completion))
            for start, completion in zip(starts, completions, strict=True)
        ]
        super().__init__(
            rows,
            pad_token_id=pad_token_id,
            max_length=max_length,
            seed=seed,
            contexts=None if decoder_start_token_id is None else [list(row) for row in prompts],
        )
