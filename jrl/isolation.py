# SPDX-License-Identifier: Apache-2.0
"""Reward functions and environments in processes of their own, which are ended where a row takes too long, crashes or
takes all memory.

For verifiers that run or parse hard text: a thread that is stuck in a regular expression cannot be stopped, a process
can. Workers are started without importing jrl, JAX or the script that runs, and talk JSON: nothing is unpickled that
a process said in which text of a policy ran. An answer repeats the nonce of its question, so that what a fork or a
stray write says is no other row's reward. It is no sandbox: a worker has the rights, files and network of the run.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 120.0
"""How long a worker may take to import its function."""
END_SECONDS = 1.0
"""How long what a worker left behind is looked for at most; usually until it is gone."""
MOST_BYTES = 2**24
"""Of an answer: a reward for each token of a long completion is less."""
_PROGRAM = Path(__file__).with_name("isolation_worker.py")


class IsolatedError(RuntimeError):
    """A function failed on a row: it raised, took too long, or its process ended."""


class Isolated:
    """A reward function whose rows are judged in other processes. See `isolated`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout: float,
        workers: int = 1,
        memory: int | None = 2**31,
        lost: float | Literal["error"] | None = "error",
    ) -> None:
        if os.name != "posix":
            raise ValueError(f"`isolated` needs a POSIX system, which {sys.platform} is not.")
        self._order: dict[str, Any] = {
            **_import_path(function),
            "timeout": _positive("timeout", timeout),
            "memory": _check_memory(memory),
        }
        if lost is not None and lost != "error" and not isinstance(lost, int | float):
            raise ValueError(f"`lost` must be a number, None or 'error', got {lost!r}.")
        self._timeout, self._num_workers, self._lost = timeout, int(_positive("workers", workers)), lost
        signature = inspect.signature(function)
        if "tokenizer" in signature.parameters:
            raise ValueError(
                f"`function` must not take `tokenizer`, which is not sent to a worker, got {function.__name__!r}. Its "
                "module can load one."
            )
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__signature__ = signature
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._slots = threading.BoundedSemaphore(self._num_workers)
        self._next_row = threading.Lock()
        # Also at the end of the program: no worker outlives it.
        weakref.finalize(self, _end_all, self._all)

    def __call__(self, *args: Any, **keywords: Any) -> list[Any]:
        """Judges the rows, `workers` at a time.

        Args:
          *args: Columns, as the function takes them.
          **keywords: Columns; `tokenizer` is left out.
        Returns:
          Of each row what the function said, in their order; of one that is lost `lost`, or an `IsolatedError`.
        Raises:
          ValueError: If columns differ in length, or hold what JSON does not, or would change.
          IsolatedError: If a worker cannot import the function.
        """
        keywords.pop("tokenizer", None)
        rows = _rows(self.__signature__.bind(*args, **keywords))
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(rows)):
            todo.put(number)
        found: list[Any] = [None] * len(rows)
        failures: list[BaseException] = []
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    found[number] = self._judged(rows[number])
                except BaseException as error:  # raised again in the caller's thread
                    failures.append(error)
                    stopped.set()

        # Daemons: whoever gave this call up must not wait for them at the end of the program.
        threads = [
            threading.Thread(target=work, name="isolated", daemon=True)
            for _ in range(min(self._num_workers, len(rows)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            stopped.set()
        if failures:
            raise failures[0]
        return found

    def close(self) -> None:
        """Ends all workers, once the rows that they are judging are; further rows start new ones."""
        with self._next_row, contextlib.ExitStack() as judged:
            for _ in range(self._num_workers):
                judged.enter_context(self._slots)
            _end_all(self._all)
            self._idle = queue.SimpleQueue()

    def _judged(self, row: bytes) -> Any:
        with self._next_row:  # behind a `close`, which otherwise would wait for all rows of a call
            pass
        with self._slots:
            worker = self._next_worker()
            answer = worker.ask(row, self._timeout)
            if worker.ended:
                self._all.discard(worker)
            else:
                self._idle.put(worker)
        if isinstance(answer, IsolatedError):
            return answer if self._lost == "error" else self._lost
        return answer["reward"]

    def _next_worker(self) -> _Worker:
        """One that waits, or a new one: those that ended since, or spoke unasked, are left behind."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                break
            if worker.ready:
                return worker
            _end(worker)
            self._all.discard(worker)
        worker = _Worker()
        self._all.add(worker)
        path = [entry or os.getcwd() for entry in sys.path]
        answer = worker.ask(json.dumps(self._order | {"path": path}).encode(), START_SECONDS)
        if isinstance(answer, IsolatedError):
            if not worker.ended:
                _end(worker)
            self._all.discard(worker)
            raise IsolatedError(
                f"{self.__name__!r} of {self._order['module']!r} cannot be used in a worker process: {answer}"
            )
        return worker


def isolated(
    function: Callable[..., Any],
    *,
    timeout: float,
    workers: int = 1,
    memory: int | None = 2**31,
    lost: float | Literal["error"] | None = "error",
) -> Isolated:
    """Runs a reward function row by row in worker processes that can be ended: for verifiers of hard text.

    A row on which the function hangs, crashes, raises or takes too much memory is lost, and no other. Its worker is
    ended, with all that it started (outside Linux: its process group), and another one takes its place.

    Args:
      function: Of a module that a worker can import, not of the script or notebook that runs. It is called for one row
        at a time, on the worker's main thread, with lists of one entry.
      timeout: Seconds that a row may take.
      workers: Processes. Each is started when it is needed first.
      memory: Bytes of address space that it may take beyond those of its imports; None: no limit, as it must be where
        the system is not Linux.
      lost: Reward of a row that is lost: a number, or None (not applicable). "error": `train.reward_errors` decides, as
        where a function raises.
    Raises:
      ValueError: If a worker could not import the function, or an argument is out of its range.
    Example:
      >>> import jrl.rewards
      >>> with_limit = isolated(jrl.rewards.number_reward, timeout=5.0, lost=0.0)
      >>> with_limit(["42", "41"], [42, 42])
      [1.0, 0.0]
    """
    return Isolated(function, timeout=timeout, workers=workers, memory=memory, lost=lost)


class _Turns(Isolated):
    """Turns of worlds, judged like rows: in their processes stands the user's class."""

    def __init__(self, environment: Any, *, timeout: float, workers: int, memory: int | None) -> None:
        super().__init__(_one_turn, timeout=timeout, workers=workers, memory=memory)
        begins = _keywords(environment.reset) if hasattr(environment, "reset") else None
        self._order |= {
            **_class_path(environment),
            "begins": begins,
            "steps": _keywords(environment.step),
        }
        self.__name__, self.__doc__ = environment.__name__, environment.__doc__
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, *args: Any, **keywords: Any) -> list[Any]:
        """Asks for one turn of one episode, as of a reward function with columns."""
        while not self._gone.empty():
            super().__call__([self._gone.get()], [{}], [-1])
        return super().__call__(*args, **keywords)

    def forget(self, key: str) -> None:
        """Lets the world of an episode go before the next turn of any."""
        self._gone.put(key)


class IsolatedEnvironment:
    """An environment whose worlds live in other processes. See `isolated_environment`.

    Attributes:
      workers: Worlds that may answer at the same time.
      role: As the user's class has it.
    """

    def __init__(self, environment: Any, *, timeout: float, workers: int, memory: int | None) -> None:
        self.workers = int(_positive("workers", workers))
        self._turns = [
            _Turns(environment, timeout=timeout, workers=1, memory=memory) for _ in range(self.workers)
        ]
        self._next = itertools.cycle(self._turns)
        self.role = environment.role if hasattr(environment, "role") else None

    def __call__(self) -> _RemoteWorld:
        """A world of one episode: in one of the processes, for as long as that lives."""
        return _RemoteWorld(next(self._next), self.role)

    def close(self) -> None:
        """Ends all workers; further turns start new ones."""
        for turns in self._turns:
            turns.close()


class _RemoteWorld:
    """The world of one episode, as the run knows it."""

    def __init__(self, ask: _Turns, role: str | None) -> None:
        self._one_turn, self.role = ask, role
        self._key, self._turns = secrets.token_hex(8), list[dict[str, Any]]()
        self._given: dict[str, Any] = {}
        # Its world must not stay in the worker when the episode is over.
        weakref.finalize(self, ask.forget, self._key)

    def reset(self, prompt: str, metadata: Mapping[str, Any], seed: int) -> Any:
        """Begins, in a worker."""
        self._given = {**metadata, "prompt": prompt, "metadata": dict(metadata), "seed": seed}
        return self._ask(None)

    def step(self, text: str, ids: Sequence[int], turn: int, texts: Sequence[str]) -> Any:
        """Answers a turn; a worker that does not know the episode is told all of it, each turn in its own time."""
        self._turns.append({"text": text, "ids": list(ids), "turn": turn, "texts": list(texts)})
        found = self._ask(turn)
        if found is not False:
            return found
        for number in (None, *range(turn)):
            self._ask(number)
        return self._ask(turn)

    def _ask(self, turn: int | None) -> Any:
        given = self._given if turn is None else self._turns[turn]
        (found,) = self._one_turn([self._key], [given], [turn])
        if isinstance(found, IsolatedError):
            raise found
        return found


def isolated_environment(
    environment: Any, *, timeout: float, workers: int = 1, memory: int | None = 2**31
) -> IsolatedEnvironment:
    """Runs the worlds of an environment in worker processes that can be ended, `workers` of them at a time.

    A world that hangs, crashes or takes too much memory fails, and with it its episode alone. The other worlds of its
    process are made anew in the next one, and told all their turns again. So an environment must be a function of what
    it is told: chance from its `seed`, and nothing outside it that its steps change.

    Args:
      environment: A class with `step` (and `reset`), of a module that a worker can import, not of the script that runs.
      timeout: Seconds that an answer may take.
      workers: Processes; episodes are dealt out to them in turn, and stay where they are.
      memory: Bytes of address space that one may take beyond those of its imports; None: no limit.
    Raises:
      ValueError: If a worker could not import the class, or an argument is out of its range.
    """
    return IsolatedEnvironment(environment, timeout=timeout, workers=workers, memory=memory)


def _one_turn(episode: list[str], given: list[dict[str, Any]], turn: list[Any]) -> list[Any]:
    """Columns that a worker of environments is asked by; in its process stands the user's class."""
    raise NotImplementedError


def _keywords(method: Callable[..., Any]) -> list[str]:
    """Names of a method's arguments, without its object."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        raise ValueError(
            f"`{method.__qualname__}` must name its arguments to live in another process, got "
            f"{inspect.signature(method)}."
        )
    return [p.name for p in parameters]


def _class_path(environment: Any) -> Mapping[str, str]:
    """Module and name of a class that a process of another program can import."""
    module, name = (
        (environment.__module__, environment.__qualname__) if inspect.isclass(environment) else ("", "")
    )
    found: Any = sys.modules.get(module)
    if module == "__main__" or found is None or vars(found).get(name) is not environment:
        raise ValueError(
            "`environment` must be a class that a worker can import, at the top of a module and not of the script that "
            f"runs, got {environment!r:.120}."
        )
    return {"module": module, "name": name}


class _Worker:
    """A process that answers questions, one at a time."""

    def __init__(self) -> None:
        # Its own session: what it starts ends with it, and Ctrl-C is the run's to handle. So are the accelerators. What
        # leaves that session is known by the variable, whose name is random so that a worker's worker has both.
        variable = f"JRL_WORKER_{secrets.token_hex(16)}"
        self.mark = f"{variable}=1".encode()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", variable: "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._asked, self._said = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._asked, False)
        self._lock = threading.Lock()
        self.ended = False

    @property
    def ready(self) -> bool:
        """False once it has ended, whoever ended it, or where it said what nobody asked."""
        if self.ended or self._process.poll() is not None:
            return False
        with selectors.DefaultSelector() as pipe:
            pipe.register(self._said, selectors.EVENT_READ)
            return not pipe.select(0.0)

    def ask(self, question: bytes, seconds: float) -> dict[str, Any] | IsolatedError:
        """Its answer; where there is none in time, or what it says is no answer to this question, it is ended."""
        nonce = secrets.token_hex(16).encode()
        try:
            said = self._exchange(nonce + b" " + question, time.monotonic() + seconds)
        except TimeoutError:
            _end(self)
            return IsolatedError(f"took longer than {seconds:g} s, so its process was ended")
        except OSError:  # a pipe broke
            said = b""
        answer = _read(said, nonce)
        if answer is None or answer.get("ends"):
            _end(self)
        if answer is None and b"\n" in said:
            return IsolatedError("its process said other than one answer to its question, so it was ended")
        if answer is None:
            return IsolatedError(f"its process ended with status {self._process.returncode}")
        return IsolatedError(answer["error"]) if "error" in answer else answer

    def _exchange(self, line: bytes, deadline: float) -> bytes:
        """Says a line and reads one, or what there was of it when the process ended."""
        left, said = memoryview(line + b"\n"), bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._asked, selectors.EVENT_WRITE)
            pipes.register(self._said, selectors.EVENT_READ)
            while b"\n" not in said[-(2**16) :] and len(said) < MOST_BYTES:
                ready = pipes.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    raise TimeoutError
                for pipe, _ in ready:
                    if pipe.fd == self._asked:
                        left = left[os.write(self._asked, left) :]
                        if not left:
                            pipes.unregister(self._asked)
                    else:
                        part = os.read(self._said, 2**16)
                        if not part:
                            return bytes(said)
                        said += part
        return bytes(said)

    def end_group(self) -> None:
        """Ends it and what it started in its session, and waits for its end."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()


def _end_all(workers: set[_Worker]) -> None:
    found = []
    while workers:
        found.append(workers.pop())
    _end(*found)


def _end(*workers: _Worker) -> None:
    """Ends workers and all that they started."""
    for worker in workers:
        worker.end_group()
    marks = {worker.mark for worker in workers}
    deadline, looks = time.monotonic() + END_SECONDS, 2
    # Twice with nothing found: a process that replaces its program shows no environment for a moment.
    while marks and sys.platform == "linux" and looks and time.monotonic() < deadline:
        found = _started_with(marks)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        looks = 2 if found else looks - 1
        time.sleep(0.01)


def _started_with(marks: set[bytes]) -> list[int]:
    """Processes whose environment, as it was when their program started, has one of some entries."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Of others, or one that just ended.
        with contextlib.suppress(OSError):
            if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


def _read(said: bytes, nonce: bytes) -> dict[str, Any] | None:
    """An answer; None for what is none: of a process which ended in the middle of it, or of another question."""
    line, end, more = said.partition(b"\n")
    said_to, _, text = line.partition(b" ")
    if not end or more or said_to != nonce:
        return None
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _rows(bound: inspect.BoundArguments) -> list[bytes]:
    """The columns of each row, each a list of one entry, as JSON."""
    columns: dict[str, Sequence[Any]] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            columns |= value
        else:
            columns[name] = value
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must have one entry a row, got {lengths} entries.")
    rows = []
    for number in range(next(iter(lengths.values()), 0)):
        row = [
            f"{json.dumps(name)}: [{_as_json(column[number], f'row {number} of `{name}`')}]"
            for name, column in columns.items()
        ]
        rows.append(f"{{{', '.join(row)}}}".encode())
    return rows


def _as_json(entry: Any, place: str) -> str:
    """An entry of a column; one that would be another one behind JSON is refused."""
    try:
        said = json.dumps(entry, default=_plain)
        _check_kinds(entry)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"columns of an isolated function must hold what JSON does, got in {place}: {error}."
        ) from error
    return said


def _plain(value: Any) -> Any:
    """Arrays and their numbers as Python has them."""
    if hasattr(value, "tolist"):
        plain = value.tolist()
        _check_kinds(plain)
        return plain
    raise TypeError(f"{type(value).__name__}: {value!r:.80}")


def _check_kinds(value: Any) -> None:
    """Refuses what JSON changes in silence; arrays are left to `_plain`."""
    if isinstance(value, tuple):
        raise TypeError(f"{value!r:.80}, a tuple, which would arrive as a list: make it one")
    if isinstance(value, list):
        for part in value:
            _check_kinds(part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{key!r:.80}, a key that is no text, which would arrive as text: make it text"
                )
            _check_kinds(part)


def _import_path(function: Any) -> Mapping[str, str]:
    """Module and name of a function that a process of another program can import."""
    if inspect.iscoroutinefunction(function):
        raise ValueError("`function` must not be async: a worker judges one row at a time.")
    module, name = (
        ("", "") if not inspect.isfunction(function) else (function.__module__, function.__qualname__)
    )
    found: Any = sys.modules.get(module)
    if module == "__main__" or found is None or vars(found).get(name) is not function:
        raise ValueError(
            "`function` must be one that a worker can import, at the top of a module and not of the script that runs, "
            f"got {function!r:.120}."
        )
    return {"module": module, "name": name}


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive, got {value!r}.")
    return value


def _check_memory(memory: int | None) -> int | None:
    if memory is not None and sys.platform != "linux":
        raise ValueError(
            f"`memory` must be None on {sys.platform}, where it cannot be limited, got {memory}."
        )
    return None if memory is None else int(_positive("memory", memory))
