# SPDX-License-Identifier: Apache-2.0
"""Samples that are read as a run goes on: batches of a stream of records, whose number is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Bool

from jrl.data.sources.fingerprint import fingerprint
from jrl.data.sources.records import RecordStream

Row = TypeVar("Row")
Batch = TypeVar("Batch")


class StreamSet(Generic[Row, Batch]):
    """Batches of a stream, with the face of a set of samples.

    Batch `step` is a function of the records, (seed, shuffle_buffer, batch_size) and `step`, as in other sets: every
    pass begins with a new batch, and what fills up the last batch of a pass is marked. But it is found by reading: one
    step after another costs nothing more, while a resumed run reads, encodes and throws away all that came before (some
    minutes for a million short texts; the encoding is what takes long, and must be done since it may drop rows). An
    earlier step than the last one begins the stream again.

    Args:
      stream: The records; more than one pass needs one that can begin again.
      encode: `(record, number in its pass) -> row`, or None for a record that is left out.
      collate: `(rows, real) -> batch`; False in `real` marks copies.
      seed: Of the shuffling.
      shuffle_buffer: Records among which the next one is drawn; 0: in the stream's order.

    Attributes:
      num_dropped: Records read so far that `encode` left out; those of later passes, or read again, count again.
      num_truncated: 0: how many were cut is not known.

    Raises:
      ValueError: If `shuffle_buffer` is negative.
    """

    num_truncated = 0

    def __init__(
        self,
        stream: RecordStream,
        encode: Callable[[Any, int], Row | None],
        collate: Callable[[Sequence[Row], Bool[np.ndarray, "B"]], Batch],
        *,
        seed: int,
        shuffle_buffer: int = 0,
    ) -> None:
        if shuffle_buffer < 0:
            raise ValueError(f"`shuffle_buffer` must be at least 0, got {shuffle_buffer}.")
        self._stream, self._encode, self._collate = stream, encode, collate
        self._seed, self._buffer = seed, shuffle_buffer
        self.num_dropped = 0
        self._last: tuple[int, int, Batch] | None = None
        self._batches: Iterator[list[Row]] = iter(())

    def __len__(self) -> int:
        raise TypeError(
            "the length of a stream is not known: give `train.total_steps` instead of `epochs`, and a list where every "
            "sample is needed (evaluation, a precomputed reference)."
        )

    def sha256(self) -> str:
        """Fingerprint of what is known of the stream, and of the order: not of content that was not read."""
        return fingerprint(self._stream.fingerprint, self._seed, self._buffer)

    def batch(self, step: int, batch_size: int) -> Batch:
        """The rows of optimizer step `step`.

        Args:
          step: At least 0; cheap where it is the last one's, or the next one.
          batch_size: Number of rows.
        Raises:
          ValueError: If the stream has no rows, or a record is malformed; or it would have to begin again and cannot.
        """
        at = -1
        if self._last is not None and self._last[1] == batch_size and self._last[0] <= step:
            at = self._last[0]
            if at == step:
                return self._last[2]
        else:
            self._batches = self._read(batch_size)
        for _ in range(step - at - 1):
            next(self._batches)
        rows = next(self._batches)
        real = np.arange(batch_size) < len(rows)
        # Copies of the first row stand where a pass ends inside a batch.
        batch = self._collate(rows + rows[:1] * (batch_size - len(rows)), real)
        self._last = step, batch_size, batch
        return batch

    def _read(self, batch_size: int) -> Iterator[list[Row]]:
        """Passes without end, as lists of `batch_size` rows; the last one of a pass may be shorter."""
        epoch = 0
        while True:
            rows: list[Row] = []
            found = 0
            for number, record in self._shuffled(epoch):
                row = self._encode(record, number)
                if row is None:
                    self.num_dropped += 1
                    continue
                found += 1
                rows.append(row)
                if len(rows) == batch_size:
                    yield rows
                    rows = []
            if rows:
                yield rows
            if not found:
                raise ValueError(
                    "nothing to learn from is left of the stream: it has no records, or all of them are too long."
                )
            epoch += 1

    def _shuffled(self, epoch: int) -> Iterator[tuple[int, Any]]:
        """The records of a pass with their numbers, each drawn at random from those in the buffer."""
        records = enumerate(self._stream.restart())
        if not self._buffer:
            yield from records
            return
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, epoch])))
        held: list[tuple[int, Any]] = []
        for record in records:
            if len(held) < self._buffer:
                held.append(record)
                continue
            place = int(generator.integers(self._buffer))
            held[place], drawn = record, held[place]
            yield drawn
        for place in generator.permutation(len(held)):
            yield held[place]
