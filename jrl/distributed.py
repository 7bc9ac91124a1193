# SPDX-License-Identifier: Apache-2.0
"""Many processes as one run: how they find each other, and the few things that they tell each other on the host.

Every process runs the same program on the same arguments. What is on the devices is one array over all of them; the
compiler puts the collectives. What is on the host is equal everywhere unless a function here says whose it is. There
is no scheduler in jrl: SLURM, Kubernetes, Open MPI or the TPU runtime start the processes, and `jax.distributed` joins
them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_TIMEOUT_SECONDS = 60
VARIABLE = "JRL_DISTRIBUTED"
"""Environment variable: 1 makes a program that knows nothing of processes join its job."""
PATIENCE_SECONDS = 3600
"""How long a process waits for the slowest one's disk. One that is dead is noticed long before, by its heartbeat."""
_TEXT = "text"
_LAST_WORDS_SECONDS = 3
_LEAST_BYTES, _MOST_BYTES = 2**12, 2**31
_MEETINGS = itertools.count()
_MET = threading.Event()
"""Set once this process talked with others: before, its devices may not be known, and to ask would wait for all."""


class PeerError(RuntimeError):
    """A process of the job failed, and so all do; the message says which, and why."""


class Word(NamedTuple):
    """Message of a process to the others.

    Attributes:
      plain: Anything that JSON holds.
      arrays: NumPy arrays by name.
    """

    plain: Any
    arrays: dict[str, np.ndarray]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: list[int] | None = None,
    heartbeat_timeout_seconds: int = HEARTBEAT_TIMEOUT_SECONDS,
) -> None:
    """Joins this process to its job; before anything of JAX is computed. A second call does nothing.

    Under SLURM, Open MPI, Kubernetes and on TPU pods the arguments are read from what the scheduler left in the
    environment; elsewhere the first three are given.

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes: Processes of the job.
      process_id: Of this one, 0 to `num_processes` − 1.
      local_device_ids: Accelerators of this host that this process takes; None: those of `JAX_LOCAL_DEVICE_IDS`, else
        under SLURM and Open MPI the one GPU numbered as the process is on its node, else all.
      heartbeat_timeout_seconds: When a process that no longer answers ends the job; and how long one that ends waits
        for the others to end, too.
    Raises:
      RuntimeError: If JAX has computed something already.
      ValueError: If the environment does not say what the arguments leave out, or a number is below 1.
    """
    if jax.distributed.is_initialized():
        end_on_error()
        return
    counts = {"num_processes": num_processes, "heartbeat_timeout_seconds": heartbeat_timeout_seconds}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    # It would take SIGTERM for itself, and leave a process that does not train yet deaf to it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=heartbeat_timeout_seconds,
    )
    end_on_error()


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int | None = None,
    asked: bool = False,
) -> None:
    """Joins the job that the environment tells of, if it tells of one: a program for one process runs on many hosts.

    Read are `JRL_DISTRIBUTED` (1: join; 0 or absent: do not), and, where no scheduler says it, all three of
    `JRL_COORDINATOR_ADDRESS`, `JRL_NUM_PROCESSES` and `JRL_PROCESS_ID`; `JRL_HEARTBEAT_TIMEOUT_SECONDS` as it likes.
    Every trainer and the command line call this first. What an argument says goes before what a variable says.

    Args:
      coordinator_address: As `initialize` has it.
      num_processes: The same.
      process_id: The same.
      heartbeat_timeout_seconds: The same; 60 where neither argument nor variable says it.
      asked: Whether to join whatever `JRL_DISTRIBUTED` says.
    Raises:
      RuntimeError: If JAX has computed something already.
      ValueError: If a variable is no number, a number is below 1, or they say too little.
    """
    flag = os.environ.get(VARIABLE, "0")
    if flag not in ("0", "1"):
        raise ValueError(f"`{VARIABLE}` must be 1 (join the job) or 0, got {flag!r}.")
    if flag == "0" and not asked and not jax.distributed.is_initialized():
        return
    timeout = _number(heartbeat_timeout_seconds, "JRL_HEARTBEAT_TIMEOUT_SECONDS")
    initialize(
        os.environ.get("JRL_COORDINATOR_ADDRESS") if coordinator_address is None else coordinator_address,
        _number(num_processes, "JRL_NUM_PROCESSES"),
        _number(process_id, "JRL_PROCESS_ID"),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS if timeout is None else timeout,
    )


def _number(given: int | None, name: str) -> int | None:
    """The given number, else a whole number of the environment, or None where it is absent."""
    if given is not None:
        return given
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"`{name}` must be a whole number, got {text!r}.")
    return int(text)


def end_on_error() -> None:
    """Makes an exception that nobody catches end this process at once, with its traceback.

    Else it would wait for the others at the end of the program, and they for it in the middle. A second call does
    nothing.
    """
    if not isinstance(sys.excepthook, _EndOnError):
        sys.excepthook = _EndOnError(sys.excepthook)


class _EndOnError:
    """A hook for exceptions that nobody catches.

    Args:
      previous: The hook before it, which shows the traceback.
    """

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Shows the exception and ends the process."""
        self._previous(kind, error, trace)
        end_now(130 if issubclass(kind, KeyboardInterrupt) else 1)


def end_now(status: int) -> NoReturn:
    """Ends this process of a job, which has said why, without waiting for the others' end of the program."""
    if _MET.is_set():
        with contextlib.suppress(Exception):  # where all failed together, none cuts the others' words short
            meet("jrl_failed", seconds=_LAST_WORDS_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def new_meeting() -> str:
    """A name for a `meet` that no other has: the same on all processes, which ask for names in the same order."""
    return f"jrl_{next(_MEETINGS)}"


def meet(name: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until every process is here. Any thread may: nothing runs on a device.

    Args:
      name: Of this meeting; a name serves once.
      seconds: How long to wait.
    Raises:
      jax.errors.JaxRuntimeError: If not all came in time, or one of them is dead.
    """
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost  # takes a second, and one process does without

        _MET.set()
        multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(seconds * 1000))


def is_main() -> bool:
    """True in the process that writes logs, model files and manifests, process 0."""
    return jax.process_index() == 0


def gather(
    plain: Any = None, arrays: Mapping[str, np.ndarray] | None = None, *, failure: Exception | None = None
) -> list[Word]:
    """Gathers a message of every process, in the order of the processes. All must call it, and wait for each other.

    Args:
      plain: Anything that JSON holds; NaN and infinities are kept.
      arrays: NumPy arrays of any shapes, which may differ between processes.
      failure: What went wrong in this process, so that the others do not go on without it.
    Raises:
      Exception: The failure, where there is one process.
      PeerError: In all of several processes, if one of them failed.
      ValueError: In all of several processes, if one of them says more than 2 GiB.
    """
    if jax.process_count() == 1:
        if failure is not None:
            raise failure
        return [Word(plain, dict(arrays or {}))]
    _MET.set()
    words = _exchange({"plain": plain, "failure": _told(failure)}, arrays or {})
    told = [word.plain["failure"] for word in words]
    failed = next((number for number, text in enumerate(told) if text is not None), None)
    if failed is not None:
        raise PeerError(f"Process {failed} of {len(words)} failed: {told[failed]}") from failure
    return [Word(word.plain["plain"], word.arrays) for word in words]


def from_main(plain: Any) -> Any:
    """Broadcasts process 0's value; that of the others is not read. All must call it."""
    return gather(plain if is_main() else None)[0].plain


def on_main(work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0 alone and broadcasts its result, anything that JSON holds. All must call it.

    Raises:
      Exception: What it raises, where there is one process.
      PeerError: In all of several processes, if it raises.
    """
    answer, failure = None, None
    if is_main():
        try:
            answer = work()
        except Exception as error:  # the others wait for an answer, whatever happened
            failure = error
    return gather(answer, failure=failure)[0].plain


def _told(failure: Exception | None) -> str | None:
    """An error with its notes, as text."""
    if failure is None:
        return None
    return " ".join([f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", [])])


def _exchange(plain: Any, arrays: Mapping[str, np.ndarray]) -> list[Word]:
    """Exchanges a message between all processes, as arrays of bytes: arrays are what devices pass on."""
    own = _encode(plain, arrays)
    # As two numbers: one of 64 bits would lose its upper half on the way.
    told = multihost_utils.process_allgather(np.asarray(divmod(own.size, _MOST_BYTES), np.int32))
    sizes = [int(high) * _MOST_BYTES + int(low) for high, low in told]
    rows = multihost_utils.process_allgather(np.pad(own, (0, _padded_size(sizes) - own.size)))
    return [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _padded_size(sizes: list[int]) -> int:
    """A length that holds each word; a power of two, because every length is compiled anew."""
    largest = max(sizes)
    if largest > _MOST_BYTES:
        raise ValueError(
            f"Process {sizes.index(largest)} of {len(sizes)} has {largest} bytes to tell the others; at most "
            f"{_MOST_BYTES} can be told at once. Take fewer or shorter rows for an iteration."
        )
    return max(1 << (largest - 1).bit_length(), _LEAST_BYTES)


def _encode(plain: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    file = io.BytesIO()
    text: Any = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    np.savez(file, allow_pickle=False, **{_TEXT: text}, **{f"array_{name}": x for name, x in arrays.items()})
    return np.frombuffer(file.getvalue(), np.uint8)


def _decode(row: np.ndarray) -> Word:
    with np.load(io.BytesIO(row.tobytes()), allow_pickle=False) as found:
        plain = json.loads(found[_TEXT].tobytes())
        arrays = {name.removeprefix("array_"): found[name] for name in found.files if name != _TEXT}
    return Word(plain, arrays)
