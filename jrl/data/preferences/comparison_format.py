# SPDX-License-Identifier: Apache-2.0
"""Pairs of whole texts, and as the arrays that a reward model learns from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from jrl.data.batching import bucket_length, pad_right
from jrl.data.preferences.preference_records import check_preference, read_margin
from jrl.data.preferences.preference_tokens import tokenize_whole
from jrl.data.tokenizer import check_ids, count_ids
from jrl.typing import ComparisonBatch, ModelInputs

TOKEN_COLUMNS = (
    ("input_ids_chosen", "input_ids_rejected"),
    ("chosen_input_ids", "rejected_input_ids"),
    ("chosen_ids", "rejected_ids"),
)
"""Names under which records hold ids instead of texts."""
MASK_COLUMNS = {"input_ids_chosen": "attention_mask_chosen", "input_ids_rejected": "attention_mask_rejected"}


class ComparisonRow(NamedTuple):
    """A tokenised pair of texts for a reward model.

    Attributes:
      chosen: Ids of the preferred text, prompt and end included.
      rejected: Ids of the other one.
      margin: By how much the preferred score should exceed the other one; 0 where nothing is said.
    """

    chosen: list[int]
    rejected: list[int]
    margin: float


@dataclass(frozen=True, kw_only=True)
class ComparisonFormat:
    """Format of comparisons: turns preference records into rows, and rows into a batch.

    Attributes:
      tokenizer: With a pad token; texts end with EOS if it has one.
      max_length: Most tokens of a text; nothing is cut, longer ones are left out with their pair.
    """

    tokenizer: Any
    max_length: int

    def __post_init__(self) -> None:
        """Refuses limits that leave nothing."""
        if self.max_length < 1:
            raise ValueError(f"`max_length` must be at least 1, got {self.max_length}.")

    @functools.cached_property
    def num_ids(self) -> int:
        """Ids that records may hold are below this."""
        return count_ids(self.tokenizer)

    def encode(self, record: Any, row: int) -> ComparisonRow | None:
        """The row of one record, number `row`, or None if a text of it is too long or empty, or both are the same.

        Raises:
          ValueError: If it is malformed; the message names the row.
        """
        if token_columns(record) is not None:
            found = tokenized_row(record, row, self.num_ids)
        else:
            pair = check_preference(record, row=row)
            try:
                found = ComparisonRow(*tokenize_whole(self.tokenizer, [pair])[0], pair.margin)
            except ValueError as error:
                raise ValueError(f"`samples`: row {row}: {error}") from error
        return found if self.fits(found) else None

    def fits(self, row: ComparisonRow) -> bool:
        """True where both texts are within `max_length`, neither is empty, and they differ."""
        lengths = len(row.chosen), len(row.rejected)
        return min(lengths) > 0 and max(lengths) <= self.max_length and row.chosen != row.rejected

    def collate(self, rows: Sequence[ComparisonRow], real: Bool[np.ndarray, "B"]) -> ComparisonBatch:
        """Rows as one batch on the host: NumPy arrays, right-padded to one width for both texts.

        Args:
          rows: The pairs.
          real: False on copies that only fill the batch up.
        """
        longest = max(max(len(row.chosen), len(row.rejected)) for row in rows)
        options = {
            "pad_token_id": self.tokenizer.pad_token_id,
            "width": min(bucket_length(longest), self.max_length),
        }
        # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
        chosen: Any = pad_right([row.chosen for row in rows], **options)
        rejected: Any = pad_right([row.rejected for row in rows], **options)
        valid: Any = real
        margins: Any = np.asarray([row.margin for row in rows], np.float32)
        return ComparisonBatch(ModelInputs(*chosen), ModelInputs(*rejected), valid, margins)


def token_columns(record: Any) -> tuple[str, str] | None:
    """The columns of a record that hold ids, or None if it holds texts."""
    found = record if isinstance(record, Mapping) else {}
    return next((names for names in TOKEN_COLUMNS if names[0] in found or names[1] in found), None)


def tokenized_row(record: Mapping[str, Any], row: int, num_ids: int) -> ComparisonRow:
    """The row of a record that holds ids. Where it has attention masks too, padding on either side is left out.

    Args:
      record: With two of `TOKEN_COLUMNS` that belong together, and perhaps `MASK_COLUMNS` and `margin`.
      row: Number of the record, for errors.
      num_ids: As in `check_ids`; of padding nothing is asked.
    Raises:
      ValueError: If a column is missing or no list of ids.
    """
    columns = sorted(map(str, record))
    ids = []
    for name in token_columns(record) or ():
        if name not in record:
            raise ValueError(f"`samples`: row {row} needs the column {name!r}, it has {columns}.")
        tokens = np.asarray(record[name])
        mask = np.asarray(record.get(MASK_COLUMNS.get(name, ""), np.ones(tokens.shape)))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu") or mask.shape != tokens.shape:
            raise ValueError(
                f"`samples`: `{name}` of row {row} must be a list of token ids with a mask of its length, if it has "
                f"one; got shapes {tokens.shape} and {mask.shape}, dtype {tokens.dtype}; columns: {columns}."
            )
        kept = tokens[mask.astype(bool)]
        ids.append(check_ids(kept, name, row, num_ids))
    return ComparisonRow(ids[0], ids[1], read_margin(record, row))
