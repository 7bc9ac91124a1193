# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that only ever holds whole ones, whatever becomes of its disk or its folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jrl.trainers.checkpoints.regular_files import is_at, open_binary, open_file

_BLOCK = 1 << 20
_WAITS = "cannot be written to; its lines wait in memory until it can"
_UNSURE = "cannot be forced to the disk; lines that it has may be lost if the machine fails"
_GONE = "is gone and cannot be put back; until it can, its lines are only in the file that the run holds open"


class LineFile:
    """Appends lines. What a disk refuses waits in memory; what is deleted under a run is put back, whole.

    Args:
      path: Of the file, made with its first line unless it is opened before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._waiting: deque[bytes] = deque()
        self._told: set[str] = set()

    def open(self) -> None:
        """Opens the file, or makes it.

        Raises:
          OSError: If it cannot be, or is no regular file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def append(self, line: bytes) -> None:
        """Writes a line, its end included, or keeps it until there is room."""
        self._waiting.append(line)
        self._try(self._write, _WAITS)

    def sync(self) -> None:
        """Writes what waits and forces everything to the disk, as far as the disk will."""
        if self._try(self._write, _WAITS) and self._descriptor >= 0:
            self._try(lambda: os.fsync(self._descriptor), _UNSURE)

    def keep(self) -> None:
        """Puts the file back where it was deleted, renamed or replaced: its descriptor still has all its lines."""
        if self._is_away() and self._try(self._put_back, _GONE):
            warnings.warn(
                f"{self.path} was deleted, renamed or replaced while the run wrote to it. It is there again, with all "
                "its lines.",
                stacklevel=4,
            )

    def move(self, path: Path) -> None:
        """Goes on in another file, which gets all lines so far."""
        self.path = path
        if self._descriptor >= 0:
            self._try(self._put_back, _GONE)

    def close(self) -> None:
        """Ends it; says how many lines never found room."""
        self.keep()
        self.sync()
        if self._is_away():
            warnings.warn(
                f"{self.path} was deleted and cannot be put back: its lines are lost.", stacklevel=4
            )
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._waiting:
            warnings.warn(
                f"{len(self._waiting)} lines of {self.path} were never written: the disk refused them to the end.",
                stacklevel=4,
            )

    def _is_away(self) -> bool:
        """True where the file is open and its path leads elsewhere."""
        return self._descriptor >= 0 and not is_at(self._descriptor, self.path)

    def _try(self, work: Callable[[], None], failure: str) -> bool:
        """Tries to do the work and returns True if it is done; warns when the disk begins to refuse."""
        try:
            work()
        except OSError as error:
            if failure not in self._told:
                warnings.warn(f"{self.path} {failure} ({error}).", stacklevel=5)
            self._told.add(failure)
            return False
        self._told.discard(failure)
        return True

    def _write(self) -> None:
        """Writes what waits. A disk that refuses is asked for one line only, however many wait."""
        if self._waiting and self._descriptor < 0:
            self.open()
        while self._waiting:
            line, done = self._waiting[0], 0
            start = os.fstat(self._descriptor).st_size
            if start and os.pread(self._descriptor, 1, start - 1) != b"\n":
                line = b"\n" + line  # behind half a line, which readers leave out
            try:
                while done < len(line):
                    done += os.write(self._descriptor, line[done:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, start)
                raise
            self._waiting.popleft()

    def _put_back(self) -> None:
        """Writes all lines so far anew, and renames them into their place in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".tmp")
        aside.unlink(missing_ok=True)
        descriptor = open_file(aside, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            place = 0
            while block := os.pread(self._descriptor, _BLOCK, place):
                place += os.write(descriptor, block)
            os.fsync(descriptor)
            if os.path.lexists(self.path):  # somebody's: the lines that a checkpoint counts go before it
                self.path.replace(self.path.with_suffix(".replaced"))
            aside.replace(self.path)
        except OSError:
            os.close(descriptor)
            aside.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor


def read_lines(path: Path, count: int | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The first lines of a file and what they say, one at a time.

    What a crash cut short or a disk spoilt is left out; where the disk cannot read on, that is said, and is the end.

    Args:
      path: Of the file; absent: there are none.
      count: How many lines; None: all.
    Raises:
      OSError: If it cannot be opened, or is no regular file.
    """
    try:
        with open_binary(path) as file:
            for line in islice(file, count):
                # Only "\n" ends a line here: texts hold every other character that `splitlines` would break at.
                text = line.decode("utf-8", "replace")
                found = _object(text)
                if found is not None and text.endswith("\n"):
                    yield text.encode(), found
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ESTALE):
            raise
        warnings.warn(f"{path} cannot be read to its end ({error}).", stacklevel=4)


def rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Replaces a file's content in one step; the lines may be read from it meanwhile."""
    aside = path.with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    with aside.open("wb") as file:
        file.writelines(lines)
    aside.replace(path)


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "step" in found else None
