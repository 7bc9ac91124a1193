# SPDX-License-Identifier: Apache-2.0
"""Maps a function over many records: in worker processes, with a progress bar, and kept for the next run.

Workers are spawned, never forked: a fork copies the locks of JAX's threads as they happen to be, and hangs. So the
function must be importable by name (or a `functools.partial` of one that is), and a script that uses workers must
keep its own work under `if __name__ == "__main__":`, as each of them imports it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jrl.version import __version__

CHUNK = 500
"""Records of one call of a batched function, and of one task of a worker."""
MIN_CACHED = 1000
"""Fewer records than this are faster made than looked up."""
CACHE_VARIABLE = "JRL_CACHE"


def map_records(
    function: Callable[[Any], Any],
    records: Sequence[Any],
    *,
    num_proc: int | None = None,
    description: str,
    cache_key: str | None = None,
    batched: bool = False,
) -> list[Any]:
    """The function's value of each record, in their order.

    With a `cache_key` and at least 1000 records the values are kept in a file and read from it the next time: the same
    function of the same records under the same key. They must then be plain (texts, numbers, lists, dictionaries with
    texts as keys, None), and come back as such: tuples as lists. The file is named by SHA-256 of all of that, holds
    JSON, is written under another name first, and is made anew where it is damaged. `JRL_CACHE` names the folder
    (default ~/.cache/jrl).

    Args:
      function: Of one record; if `batched`, of a list of them, and returns as many values.
      records: They are not changed.
      num_proc: Worker processes; None or 1: this process does it.
      description: Stands beside the progress bar, which is shown on a terminal only, and before errors.
      cache_key: Everything that the values depend on beside the records; None: nothing is kept.
      batched: Whether the function takes many records at once.
    Raises:
      ValueError: If the function fails: the message names the row; or cannot be sent to workers.
    """
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"`num_proc` must be at least 1 or None, got {num_proc}.")
    call = functools.partial(_call, function, batched)
    if cache_key is None or len(records) < MIN_CACHED:
        return _map(call, records, num_proc, description)
    path = _cache_path(function, records, cache_key)
    found = _read(path, len(records))
    if found is None:
        found = _write(path, _map(call, records, num_proc, description))
    return found


def cache_folder() -> Path:
    """Folder in which values are kept: `JRL_CACHE`, or ~/.cache/jrl."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "jrl")


def tokenizer_key(tokenizer: Any) -> str | None:
    """SHA-256 of all that a fast tokenizer's ids depend on, as part of a `cache_key`; None for any other one."""
    from transformers import (
        PreTrainedTokenizerFast,
    )  # here, because it takes seconds where torch is installed

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template]
    parts.append(tokenizer.split_special_tokens)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class _Failed(Exception):
    """The failure of one record, as it also travels back from a worker: (its number in the chunk, what went wrong)."""


def _map(
    call: Callable[[list[Any]], list[Any]], records: Sequence[Any], num_proc: int | None, description: str
) -> list[Any]:
    starts = range(0, len(records), CHUNK)
    chunks = ([records[row] for row in range(start, min(start + CHUNK, len(records)))] for start in starts)
    workers = min(num_proc or 1, len(starts))
    found: list[Any] = []
    with (
        _progress(description, len(records)) as advance,
        _started(call, chunks, workers) as results,
    ):
        try:
            for values in results:
                found.extend(values)
                advance(len(values))
        except _Failed as error:
            row, reason = error.args
            # Chunks come back in order, so the one that failed follows those that are here.
            raise ValueError(f"`{description}`: row {len(found) + row}: {reason}") from error.__cause__
    return found


@contextlib.contextmanager
def _started(
    call: Callable[[list[Any]], list[Any]], chunks: Iterator[list[Any]], workers: int
) -> Iterator[Iterator[list[Any]]]:
    """The chunks' values in their order, from this process or from workers, which end with the block."""
    if workers <= 1:
        yield map(call, chunks)
        return
    try:
        payload = pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`num_proc` needs a function that worker processes can import by its name: {error}. Move it to the top of "
            "a module, or leave `num_proc` out."
        ) from error
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin_worker, initargs=(payload,))
    try:
        yield pool.map(_work, chunks)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"A worker of `num_proc={workers}` ended before its work: too little memory, or a script whose own work is "
            'not under `if __name__ == "__main__":` (each worker imports it).'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_CALL: list[Callable[[list[Any]], list[Any]]] = []
"""What this worker does: sent once, not with every chunk, since a tokenizer weighs megabytes."""


def _begin_worker(payload: bytes) -> None:
    # Workers share the cores already; the threads of fast tokenizers would only fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _CALL.append(pickle.loads(payload))


def _work(records: list[Any]) -> list[Any]:
    return _CALL[0](records)


def _call(function: Callable[[Any], Any], batched: bool, records: list[Any]) -> list[Any]:
    """The values of a chunk. A failure names its record."""
    if not batched:
        return [_one(function, record, number) for number, record in enumerate(records)]
    try:
        return list(function(records))
    except (Exception, SystemExit):
        # One by one, the record that is to blame shows; if none is alone, it is the function of many.
        for number, record in enumerate(records):
            _one(function, [record], number)
        raise


def _one(function: Callable[[Any], Any], argument: Any, number: int) -> Any:
    try:
        return function(argument)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise _Failed(number, f"{kind}{error}") from error


@contextlib.contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Counter of finished records: a bar where standard error is a terminal, else nothing."""
    if not sys.stderr.isatty() or total < MIN_CACHED:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _cache_path(function: Callable[[Any], Any], records: Sequence[Any], cache_key: str) -> Path:
    # Of a partial it is the function that counts: what is bound to it belongs into `cache_key`.
    inner = function.func if isinstance(function, functools.partial) else function
    digest = hashlib.sha256()
    name = f"{inner.__module__}.{inner.__qualname__}"
    versions = " ".join((__version__, *map(version, ("tokenizers", "transformers"))))
    for part in (versions, name, cache_key, _source(inner)):
        digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
    for record in records:
        # A line a record: no two lists of records have the same bytes.
        digest.update(json.dumps(record, sort_keys=True, default=_spelled).encode() + b"\n")
    return cache_folder() / "mapped" / f"{digest.hexdigest()}.json"


def _source(function: Callable[..., Any]) -> str:
    """The text of its module and, of a function of jrl's own, of all of `jrl.data`, which it calls: a changed function
    is another one, even under the same name."""
    try:
        path = inspect.getsourcefile(function)
        if path is None:
            return ""
        own = function.__module__.startswith("jrl.")
        others = Path(__file__).parents[1].rglob("*.py") if own else ()
        return "".join(found.read_text(encoding="utf-8") for found in sorted({Path(path), *others}))
    except (TypeError, OSError):
        # What is built in, or was typed in, has none.
        return ""


def _spelled(value: Any) -> Any:
    """A value that JSON does not know; `repr` would leave out the middle of a long array."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)


def _read(path: Path, count: int) -> list[Any] | None:
    """The values in a file; None if there is none, or it is not what was written."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        values: list[Any] = json.loads(body)
    except (OSError, ValueError):
        return None
    return values if len(values) == count else None


def _write(path: Path, values: list[Any]) -> list[Any]:
    """Keeps the values, and returns them as a later reading will."""
    try:
        body = json.dumps(values).encode()
    except TypeError as error:
        raise ValueError(
            f"values that are to be kept must be plain, so that JSON holds them: {error}."
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: another run that writes or reads the same file never meets a part of it.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        warnings.warn(
            f"{path.parent} cannot hold what was made of {len(values)} records: {error}.", stacklevel=4
        )
    kept: list[Any] = json.loads(body)
    return kept
