# SPDX-License-Identifier: Apache-2.0
"""Rollouts that do not wait: those of later iterations are collected while earlier ones are learned from.

Each iteration is collected by another thread. A thread sends programs to the devices only while it holds
`jrl.placement.DISPATCH`, and lets go of it wherever it waits: for sampled ids, for an environment, for a reward. So the
devices get every program from one thread at a time, and what one collection waits for, the others use.

Who trains on what is fixed by number and not by time: iteration n learns from what was sampled by the policy after
update n - `ahead`. A collection is a function of that policy, the iteration's number and the seed. So two runs are
equal to the bit, and one that resumes collects again, with the policies that its checkpoint kept, what was on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jrl.placement import DISPATCH
from jrl.rollout.collect import Clock
from jrl.rollout.experience import Experience
from jrl.typing import Params

Collect = Callable[[int, Params, int | None, Clock], Experience]
"""(iteration, parameters that sample, first prompt, clock) → its rollouts."""


class _Abandoned(BaseException):
    """Ends a thread whose rollouts nobody wants any more. No `except Exception` of a user's function may hold it."""


class _Collection(NamedTuple):
    """Rollouts on their way.

    Attributes:
      params: Of the policy that samples them.
      first_prompt: Place in the stream of prompts at which they begin, once that is known.
      experience: The rollouts, once they are there.
    """

    params: Params
    first_prompt: Future[int | None]
    experience: Future[Experience]


class RolloutsAhead:
    """Collections of later iterations, each by another thread.

    Args:
      collect: Collects one iteration.
      mesh: Whose devices sample.
      in_turn: Whether a collection begins only when the one before is over, which says where in the stream of prompts
        it begins.
    """

    def __init__(self, collect: Collect, mesh: Mesh, *, in_turn: bool = False) -> None:
        self._collect, self._mesh, self._in_turn = collect, mesh, in_turn
        self._begun: dict[int, _Collection] = {}
        self._closed = False

    def start(self, iteration: int, params: Params, first_prompt: int | None, stopwatch: Clock) -> None:
        """Begins to collect an iteration.

        Args:
          iteration: Its number; they come in order.
          params: Of the policy that samples; nobody may donate them.
          first_prompt: Place in the stream of prompts at which it begins; None: as its number says. Of collections in
            turn it is read of the first one alone.
          stopwatch: Receives what the collection waits for.
        """
        before = self._begun.get(iteration - 1) if self._in_turn else None
        found = _Collection(params, Future(), Future())
        if before is None:
            found.first_prompt.set_result(first_prompt)
        self._begun[iteration] = found
        # A daemon: a reward function that never answers must not keep the process from ending.
        threading.Thread(
            target=self._run,
            args=(iteration, found, before, stopwatch),
            name=f"rollouts-{iteration}",
            daemon=True,
        ).start()

    def take(self, iteration: int) -> Experience:
        """Waits for the rollouts of an iteration; they are given once.

        Raises:
          Exception: What their collection failed with.
        """
        experience = self._begun[iteration].experience.result()
        del self._begun[iteration]
        return experience

    def close(self) -> None:
        """Gives up what is on its way: no thread sends anything to a device from here on."""
        with DISPATCH:
            self._closed = True
        self._begun = {}

    def _run(self, iteration: int, own: _Collection, before: _Collection | None, stopwatch: Clock) -> None:
        """One collection, from its thread's beginning to its end."""
        try:
            if before is not None:
                first, used = before.first_prompt.result(), before.experience.result().num_prompts
                own.first_prompt.set_result(None if first is None else first + used)
            with DISPATCH, jax.set_mesh(self._mesh):
                self._go_on()
                found = self._collect(
                    iteration, own.params, own.first_prompt.result(), self._clock(stopwatch)
                )
            own.experience.set_result(found)
        except BaseException as error:  # whoever takes it is told
            own.experience.set_exception(error)
            if not own.first_prompt.done():
                own.first_prompt.set_exception(error)

    def _clock(self, stopwatch: Clock) -> Clock:
        """Lets the other threads go on while this one waits, and measures that."""

        @contextmanager
        def wait(name: str) -> Iterator[Any]:
            with DISPATCH.left(), stopwatch(name):
                yield
            self._go_on()

        return wait

    def _go_on(self) -> None:
        if self._closed:
            raise _Abandoned
