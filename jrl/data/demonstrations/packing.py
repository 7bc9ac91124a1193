# SPDX-License-Identifier: Apache-2.0
"""Several samples in one row: which goes where, and the rows that come of it.

Nothing attends across two samples of a row, and positions restart at each: a packed row computes what its samples
would have computed alone. The first token of a sample is nobody's target, as it is in a row of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jrl.data.batching import pad_right
from jrl.data.demonstrations.rows import DialogueRow, RowSet, learned_rows
from jrl.data.sources.fingerprint import fingerprint
from jrl.typing import Sequences


class Piece(NamedTuple):
    """A part of a sample.

    Attributes:
      sample: Its number.
      start: First token.
      stop: Behind the last one.
    """

    sample: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


Rows = list[list[Piece]]
"""The pieces of each row, in their order."""


def best_fit(pieces: Sequence[Piece], capacity: int) -> Rows:
    """Best-fit decreasing: the longest piece first, each into the row with the least space that still holds it.

    Rows of equal space are taken in the order in which they came to have it, pieces of equal length in theirs.

    Args:
      pieces: Of at most `capacity` tokens each.
      capacity: Tokens of a row.
    Reference: Ding et al. 2024, arXiv:2404.10830, section 3.
    """
    rows: Rows = []
    by_space: dict[int, deque[int]] = {}
    # Bit s is set where some row has space s left, so that the least sufficient space is the lowest bit from there on:
    # a few machine words to look at, however many rows there are.
    occupied = 0
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        sufficient = occupied >> piece.length
        if sufficient:
            space = piece.length + (sufficient & -sufficient).bit_length() - 1
            number = by_space[space].popleft()
            if not by_space[space]:
                occupied ^= 1 << space
        else:
            space, number = capacity, len(rows)
            rows.append([])
        rows[number].append(piece)
        left = space - piece.length
        if left:
            by_space.setdefault(left, deque()).append(number)
            occupied |= 1 << left
    return rows


def pack_cut(lengths: Sequence[int], capacity: int) -> Rows:
    """ "bfd": samples lose what is beyond `capacity`, then `best_fit`."""
    return best_fit(
        [Piece(i, 0, min(length, capacity)) for i, length in enumerate(lengths) if length], capacity
    )


def pack_split(lengths: Sequence[int], capacity: int) -> Rows:
    """ "bfd_split": samples are cut into pieces of `capacity`, all of which are kept, then `best_fit`."""
    return best_fit(
        [
            Piece(i, start, min(start + capacity, length))
            for i, length in enumerate(lengths)
            for start in range(0, length, capacity)
        ],
        capacity,
    )


def pack_wrapped(lengths: Sequence[int], capacity: int) -> Rows:
    """ "wrapped": one sample after the other, cut wherever a row is full; only the last row may be short."""
    rows: Rows = []
    space = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if space == 0:
                rows.append([])
                space = capacity
            stop = min(start + space, length)
            rows[-1].append(Piece(number, start, stop))
            space -= stop - start
            start = stop
    return rows


STRATEGIES: Mapping[str, Callable[[Sequence[int], int], Rows]] = {
    "bfd": pack_cut,
    "bfd_split": pack_split,
    "wrapped": pack_wrapped,
}
"""By the name in `SFTConfig.packing_strategy`: `(lengths of the samples, capacity) -> rows`."""


class PackedRow(NamedTuple):
    """Several samples in one row.

    Attributes:
      row: Their tokens, one sample after another; the token that begins one is not learned.
      lengths: Tokens of each.
    """

    row: DialogueRow
    lengths: list[int]


def pack_rows(rows: Sequence[DialogueRow], *, capacity: int, strategy: str) -> list[PackedRow]:
    """Samples as packed rows.

    Args:
      rows: Samples, perhaps longer than `capacity`.
      capacity: Tokens of a row, at least 2.
      strategy: One of `STRATEGIES`.
    Raises:
      ValueError: If the strategy is unknown or the capacity below 2.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"`packing_strategy` must be one of {tuple(STRATEGIES)}, got {strategy!r}.")
    if capacity < 2:
        raise ValueError(f"`capacity` must be at least 2 tokens (one and what follows it), got {capacity}.")
    layout = STRATEGIES[strategy]([len(row.tokens) for row in rows], capacity)
    return [_joined(rows, pieces) for pieces in layout]


def collate_packed(
    rows: Sequence[PackedRow], real: Bool[np.ndarray, "B"], *, pad_token_id: int, capacity: int
) -> Sequences:
    """Packed rows as one batch of `capacity` columns, with the number of each token's sample as its segment id."""
    plain = [packed.row for packed in rows]
    batch = learned_rows(plain, real, pad_token_id=pad_token_id, max_length=capacity, width=capacity)
    numbers = [np.repeat(np.arange(1, len(row.lengths) + 1), row.lengths).tolist() for row in rows]
    segment_ids: Any = pad_right(numbers, pad_token_id=0, width=capacity)[0]
    return batch._replace(inputs=batch.inputs._replace(segment_ids=segment_ids))


class PackedSet(RowSet):
    """Packed rows and their batches: all of one width, so that one program trains on all of them.

    The rows are the same in every pass, and come in an order of its own.

    Args:
      samples: Unpacked; its rows may be longer than `capacity`.
      capacity: Columns of a row.
      strategy: One of `STRATEGIES`.
      pad_token_id: Fills the columns behind each row.
      seed: Of the order.

    Attributes:
      lengths: Tokens of each sample in each row.
      num_samples: Before packing.
      num_lost: Tokens that the strategy cut away.

    Raises:
      ValueError: As `pack_rows`.
    """

    def __init__(
        self, samples: RowSet, *, capacity: int, strategy: str, pad_token_id: int, seed: int
    ) -> None:
        packed = pack_rows(samples.rows, capacity=capacity, strategy=strategy)
        super().__init__(
            [one.row for one in packed],
            pad_token_id=pad_token_id,
            max_length=capacity,
            seed=seed,
            num_truncated=samples.num_truncated,
            num_dropped=samples.num_dropped,
        )
        self.lengths = [one.lengths for one in packed]
        self.num_samples = len(samples)
        self.num_lost = sum(len(row.tokens) for row in samples.rows) - sum(map(sum, self.lengths))

    @property
    def efficiency(self) -> float:
        """Share of the columns that hold a token, in (0, 1]."""
        return sum(map(sum, self.lengths)) / (len(self.rows) * self.max_length)

    def apart(self) -> list[DialogueRow]:
        """Every piece as a row of its own, in the order of the rows."""
        found = []
        for row, lengths in zip(self.rows, self.lengths, strict=True):
            stops = list(itertools.accumulate(lengths))
            for start, stop in zip([0, *stops], stops, strict=False):
                found.append(DialogueRow(row.tokens[start:stop], row.learned[start:stop]))
        return found

    def sha256(self) -> str:
        """Fingerprint of the tokens, of which are learned, of where samples begin, and of the rows' order."""
        return fingerprint(self.rows, self.lengths)

    def batch_of(self, indices: Int[np.ndarray, "B"], real: Bool[np.ndarray, "B"]) -> Sequences:
        """Collates rows to a batch."""
        rows = [PackedRow(self.rows[index], self.lengths[index]) for index in indices]
        return collate_packed(rows, real, pad_token_id=self.pad_token_id, capacity=self.max_length)


class PackedRecords:
    """Packed rows of a stream of records, to be streamed themselves: packed so many samples at a time.

    Args:
      stream: The records.
      encode: `(record, its number) -> row`, or None for a record that is left out.
      capacity: Tokens of a row.
      strategy: One of `STRATEGIES`.
      buffer: Samples that are packed together.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        encode: Callable[[Any, int], DialogueRow | None],
        *,
        capacity: int,
        strategy: str,
        buffer: int = 1000,
    ) -> None:
        self._stream, self._encode = stream, encode
        self._capacity, self._strategy, self._buffer = capacity, strategy, buffer

    def __iter__(self) -> Iterator[PackedRow]:
        held: list[DialogueRow] = []
        for number, record in enumerate(self._stream):
            row = self._encode(record, number)
            if row is None:
                continue
            held.append(row)
            if len(held) == self._buffer:
                yield from self._packed(held)
                held = []
        yield from self._packed(held)

    def _packed(self, rows: list[DialogueRow]) -> list[PackedRow]:
        return pack_rows(rows, capacity=self._capacity, strategy=self._strategy) if rows else []


def _joined(rows: Sequence[DialogueRow], pieces: Sequence[Piece]) -> PackedRow:
    """The pieces as one row; the token that begins one is no target of what stands before it."""
    tokens = [token for sample, start, stop in pieces for token in rows[sample].tokens[start:stop]]
    learned = [
        flag for sample, start, stop in pieces for flag in (False, *rows[sample].learned[start + 1 : stop])
    ]
    return PackedRow(DialogueRow(tokens, learned), [piece.length for piece in pieces])
