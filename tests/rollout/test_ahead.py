# SPDX-License-Identifier: Apache-2.0
"""Collections by other threads: one sends programs at a time, what they wait for overlaps, failures are told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jrl.mesh import make_mesh
from jrl.placement import DISPATCH
from jrl.rollout.ahead import RolloutsAhead

SECONDS = 60.0
"""After which a test that waits for another thread gives up."""


@contextlib.contextmanager
def stopwatch(name: str) -> Iterator[None]:
    yield


def rollouts(collect: Callable[..., Any], *, in_turn: bool = False) -> RolloutsAhead:
    return RolloutsAhead(collect, make_mesh(), in_turn=in_turn)


def test_one_thread_at_a_time_sends_programs():
    inside, most, lock = 0, list[int](), threading.Lock()
    both = threading.Barrier(2)

    def collect(iteration: int, params: Any, first_prompt: int | None, clock: Any) -> int:
        nonlocal inside
        with clock("sample"):
            both.wait(SECONDS)  # from here on they compete
        for _ in range(20):
            with lock:
                inside += 1
                most.append(inside)
            threading.Event().wait(0.001)
            with lock:
                inside -= 1
        return iteration

    ahead = rollouts(collect)
    for iteration in range(2):
        ahead.start(iteration, None, None, stopwatch)
    assert [ahead.take(iteration) for iteration in range(2)] == [0, 1]
    assert set(most) == {1}


def test_a_thread_that_waits_lets_the_others_send():
    """Each waits for the other: neither would end if waiting kept the devices."""
    said = [threading.Event(), threading.Event()]

    def collect(iteration: int, params: Any, first_prompt: int | None, clock: Any) -> int:
        said[iteration].set()
        with clock("reward"):
            assert said[1 - iteration].wait(SECONDS)
        return iteration

    ahead = rollouts(collect)
    for iteration in range(2):
        ahead.start(iteration, None, None, stopwatch)
    assert ahead.take(1) == 1 and ahead.take(0) == 0


def test_collections_in_turn_know_where_those_before_ended():
    def collect(iteration: int, params: Any, first_prompt: int | None, clock: Any) -> Any:
        return SimpleNamespace(num_prompts=iteration + 2, first_prompt=first_prompt)

    ahead = rollouts(collect, in_turn=True)
    for iteration in range(3):
        ahead.start(iteration, None, 7, stopwatch)
    assert [ahead.take(iteration).first_prompt for iteration in range(3)] == [7, 9, 12]


def test_collections_by_number_begin_where_they_are_told():
    ahead = rollouts(lambda iteration, params, first_prompt, clock: (params, first_prompt))
    ahead.start(4, "policy 3", 8, stopwatch)
    ahead.start(5, "policy 4", 10, stopwatch)
    assert ahead.take(4) == ("policy 3", 8) and ahead.take(5) == ("policy 4", 10)


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_failure_is_told_to_whoever_takes_it(in_turn: bool):
    def collect(iteration: int, params: Any, first_prompt: int | None, clock: Any) -> Any:
        if iteration == 1:
            raise LookupError("no reward for that")
        return SimpleNamespace(num_prompts=1)

    ahead = rollouts(collect, in_turn=in_turn)
    for iteration in range(3):
        ahead.start(iteration, None, 0, stopwatch)
    assert ahead.take(0).num_prompts == 1
    with pytest.raises(LookupError, match="no reward for that"):
        ahead.take(1)
    if in_turn:  # it does not know where it would begin
        with pytest.raises(LookupError, match="no reward for that"):
            ahead.take(2)
    else:
        assert ahead.take(2).num_prompts == 1


def test_nothing_is_sent_after_the_end():
    waits, goes_on, sent = threading.Event(), threading.Event(), list[int]()

    def collect(iteration: int, params: Any, first_prompt: int | None, clock: Any) -> int:
        try:
            with clock("reward"):
                waits.set()
                assert goes_on.wait(SECONDS)
        except Exception:
            sent.append(iteration)  # a user's function that swallows errors does not go on either
        sent.append(iteration)
        return iteration

    ahead = rollouts(collect)
    ahead.start(0, None, None, stopwatch)
    assert waits.wait(SECONDS)
    (thread,) = [found for found in threading.enumerate() if found.name == "rollouts-0"]
    ahead.close()
    goes_on.set()
    thread.join(SECONDS)
    assert not thread.is_alive() and not sent


def test_the_mesh_is_that_which_samples():
    mesh = make_mesh()
    ahead = RolloutsAhead(lambda *given: jax.sharding.get_abstract_mesh(), mesh)
    ahead.start(0, None, None, stopwatch)
    assert ahead.take(0) == mesh.abstract_mesh


def test_the_devices_are_free_when_a_collection_is_over():
    ahead = rollouts(lambda *given: 1)
    ahead.start(0, None, None, stopwatch)
    ahead.take(0)
    free = threading.Event()

    def enter() -> None:
        with DISPATCH:
            free.set()

    threading.Thread(target=enter, daemon=True).start()
    assert free.wait(SECONDS)
