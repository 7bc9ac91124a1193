# SPDX-License-Identifier: Apache-2.0
"""Rows to learn from, with a mask over what is learned, and their batches: what all sets of samples share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jrl.data.batching import bucket_length, pad_right
from jrl.data.ordering import batch_rows
from jrl.data.sources.fingerprint import fingerprint
from jrl.ops.alignment import learned_targets
from jrl.typing import ModelInputs, Sequences


class DialogueRow(NamedTuple):
    """A tokenised sample with the tokens to learn.

    Attributes:
      tokens: Ids.
      learned: One flag a token: True where the model should have written it.
    """

    tokens: list[int]
    learned: list[bool]


class RowSet:
    """Rows and their batches. Every pass has an order of its own.

    Args:
      rows: At least one.
      pad_token_id: Fills the columns behind each row.
      max_length: Most columns.
      seed: Of the order.
      contexts: What the encoder of a seq2seq model reads for each row; None: there is no encoder.
      kept: Number of each row's sample among those given; None: they are the same.
      num_truncated: Samples that were cut.
      num_dropped: Samples of which nothing was left to learn from.

    Attributes:
      rows: As given.
      contexts: As given.
      kept: One number a row.
      num_truncated: As given.
      num_dropped: As given.
      pad_token_id: As given.
      max_length: As given.
    """

    def __init__(
        self,
        rows: list[DialogueRow],
        *,
        pad_token_id: int,
        max_length: int,
        seed: int,
        contexts: list[list[int]] | None = None,
        kept: list[int] | None = None,
        num_truncated: int = 0,
        num_dropped: int = 0,
    ) -> None:
        self.rows, self.contexts = rows, contexts
        self.kept = list(range(len(rows))) if kept is None else kept
        self.num_truncated, self.num_dropped = num_truncated, num_dropped
        self.pad_token_id, self.max_length, self._seed = pad_token_id, max_length, seed

    def __len__(self) -> int:
        return len(self.rows)

    def sha256(self) -> str:
        """Fingerprint of the tokens, of which are learned, and of their order."""
        if self.contexts is None:
            return fingerprint(self.rows)
        return fingerprint(list(zip(self.contexts, self.rows, strict=True)))

    def batch(self, step: int, batch_size: int) -> Sequences:
        """The rows of optimizer step `step`, a pure function of (seed, step, batch_size).

        The last batch of a pass is filled up with masked copies, so that every batch has `batch_size` rows and no
        sample comes twice in a pass.

        Args:
          step: At least 0.
          batch_size: Number of rows.
        Returns:
          NumPy arrays: rows (batch_size, L) right-padded to their bucket, at most `max_length`; `starts` is 0 and the
          mask (batch_size, L − 1) speaks of the token after each position.
        """
        return self.batch_of(*batch_rows(step, batch_size, size=len(self), seed=self._seed))

    def batch_of(self, indices: Int[np.ndarray, "B"], real: Bool[np.ndarray, "B"]) -> Sequences:
        """Collates rows to a batch; those that are not `real` are masked."""
        contexts = self.contexts
        return learned_rows(
            [self.rows[index] for index in indices],
            real,
            pad_token_id=self.pad_token_id,
            max_length=self.max_length,
            contexts=None if contexts is None else [contexts[index] for index in indices],
        )


def learned_rows(
    rows: Sequence[DialogueRow],
    real: Bool[np.ndarray, "B"],
    *,
    pad_token_id: int,
    max_length: int,
    contexts: Sequence[Sequence[int]] | None = None,
    width: int | None = None,
) -> Sequences:
    """Rows as one batch on the host.

    Args:
      rows: The samples.
      real: False on copies that only fill the batch up.
      pad_token_id: Fills the columns behind each row.
      max_length: Most columns.
      contexts: What the encoder of a seq2seq model reads for each row. They have buckets of their own: there may be as
        many programs as pairs of the two occur.
      width: Number of columns; None: the bucket of the longest row.
    """
    if width is None:
        width = min(bucket_length(max(len(row.tokens) for row in rows)), max_length)
    # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
    arrays: Any = pad_right([row.tokens for row in rows], pad_token_id=pad_token_id, width=width)
    learned, _ = pad_right([row.learned for row in rows], pad_token_id=0, width=width)
    # `starts` = 0: position t speaks of the token in column t + 1.
    mask: Any = learned_targets(learned.astype(bool)) & real[:, None]
    starts: Any = np.zeros(len(rows), np.int32)
    sequences = Sequences(ModelInputs(*arrays), starts, mask)
    if contexts is None:
        return sequences
    width = min(bucket_length(max(map(len, contexts))), max_length)
    read: Any = pad_right(contexts, pad_token_id=pad_token_id, width=width)
    return sequences._replace(inputs=sequences.inputs._replace(context_tokens=read[0], context_mask=read[1]))


def rows_with_targets(rows: Sequence[DialogueRow], max_length: int) -> list[int]:
    """Numbers of the rows that teach something. The first token is nobody's target, so it alone teaches nothing.

    Args:
      rows: Tokenised samples.
      max_length: To which they were cut, for the error.
    Raises:
      ValueError: If none does.
    """
    kept = [index for index, row in enumerate(rows) if learned_targets(row.learned).any()]
    if not kept:
        raise ValueError(
            f"`samples`: nothing to learn from is left of {len(rows)} samples at {max_length} tokens."
        )
    return kept
