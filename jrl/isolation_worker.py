# SPDX-License-Identifier: Apache-2.0
"""Program of the processes that `jrl.isolation` starts: one function, called for one row at a time.

It is run as a file and imports nothing of jrl, so that it starts in the time that Python takes. Each side says one line
of JSON: the first names the function, all others hold the columns of a row. A question's nonce stands before it and
before its answer. The end of the input ends this process.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRACE_SECONDS = 1.0
"""How long behind its time limit a row runs on where nobody ends it, because the run itself was killed."""


def main() -> None:
    """Answers until there is nothing more to read."""
    asked, answered = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the function prints must not be taken for an answer, nor may it read the questions.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    asked_one = os.getpid()

    def tell(nonce: bytes, answer: dict[str, Any]) -> None:
        if os.getpid() != asked_one:  # a fork that came back from the function: one of the two answers
            os._exit(1)
        answered.write(nonce + b" " + json.dumps(answer).encode() + b"\n")
        answered.flush()

    nonce, _, question = asked.readline().partition(b" ")
    order = json.loads(question)
    sys.path[:] = order["path"]
    try:
        function = vars(importlib.import_module(order["module"]))[order["name"]]
        if "steps" in order:
            function = _Episodes(function, order["begins"], order["steps"])
        _limit_memory(order["memory"])
    except BaseException as error:  # an import may raise anything, and the run is told
        tell(nonce, {"error": _told(error)})
        return
    tell(nonce, {})
    for line in asked:
        nonce, _, question = line.partition(b" ")
        answer = _answer(function, json.loads(question), order["timeout"])
        tell(nonce, answer)
        if answer.get("ends"):
            return


class _Episodes:
    """Worlds of episodes, which stay here from turn to turn.

    Args:
      make: The user's class.
      begins: Keywords that its `reset` takes; None: it has none.
      steps: Keywords that its `step` takes.
    """

    def __init__(self, make: Callable[[], Any], begins: list[str] | None, steps: list[str]) -> None:
        self._make, self._begins, self._steps = make, begins, steps
        self._worlds: dict[str, Any] = {}

    def __call__(self, episode: list[str], given: list[dict[str, Any]], turn: list[Any]) -> list[Any]:
        """What the world of an episode says. Columns of one entry, as everywhere here.

        Args:
          episode: Its key.
          given: Keywords by name.
          turn: None: the episode begins. -1: it is over, and its world goes. Else the number of the turn.
        Returns:
          What the user's code does; False where no such world is here.
        """
        (key,), (offered,), (number,) = episode, given, turn
        if number == -1:
            self._worlds.pop(key, None)
            return [None]
        if number is None:
            world = self._make()
            said = None if self._begins is None else world.reset(**_chosen(offered, self._begins))
            self._worlds[key] = world
            return [said]
        if key not in self._worlds:
            return [False]
        said = self._worlds[key].step(**_chosen(offered, self._steps))
        if isinstance(said, tuple | list):
            said = [part.item() if hasattr(part, "item") else part for part in said]
        return [said]


def _chosen(offered: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: offered[name] for name in names if name in offered}


def _limit_memory(size: int | None) -> None:
    """Limits the address space to so many bytes beyond those that imports have taken."""
    if size is None:
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(function: Callable[..., Any], columns: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The reward of a row, or the function's failure."""
    _alarm(timeout + GRACE_SECONDS)
    try:
        return {"reward": _reward(function(**columns))}
    except Exception as error:  # of the user's function: anything may come
        return {"error": _told(error), "ends": isinstance(error, MemoryError)}
    except BaseException as error:  # as of `exit()`
        return {"error": _told(error), "ends": True}
    finally:
        _alarm(0.0)


def _alarm(seconds: float) -> None:
    """Has the system end this process then, whatever holds Python's lock; 0 takes it back."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the function may have had one of its own
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _reward(answer: Any) -> Any:
    """A reward of one row as JSON holds it."""
    rows = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(rows, list | tuple) or len(rows) != 1:
        raise ValueError(f"must return one reward a sample, a list of 1, got {answer!r:.80}")
    reward = rows[0].tolist() if hasattr(rows[0], "tolist") else rows[0]
    if isinstance(reward, float) and not math.isfinite(reward):
        raise ValueError(f"must return finite rewards, got {reward}")
    return reward


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


if __name__ == "__main__":
    main()
