# SPDX-License-Identifier: Apache-2.0
"""Worlds in worker processes: what they answer, what becomes of one that fails, and that they work together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jrl.rewards import isolated_environment
from jrl.rollout.environments import EnvironmentFailure, World
from tests import worlds_that_fail as worlds


def play(environment: Any, prompts: list[str]) -> list[list[str]]:
    """Observations of episodes that take their turns one after the other; a failure stands in their place."""
    made = [World(environment, prompt, {}, seed) for seed, prompt in enumerate(prompts)]
    found: list[list[str]] = [[] for _ in prompts]
    for turn in range(4):
        for row, world in enumerate(made):
            if found[row] and found[row][-1].startswith("`"):
                continue
            try:
                found[row].append(world.step("ab" * (turn + 1), [1]).observation)
            except EnvironmentFailure as error:
                found[row].append(str(error))
    return found


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (worlds.Hangs, "took longer than 1 s"),
        (worlds.Dies, "ended with status 3"),
        (worlds.Exits, "SystemExit"),
        (worlds.Hoards, "MemoryError"),
        (worlds.Raises, "KeyError"),
    ],
)
def test_a_world_that_fails_ends_its_episode_and_no_other(world, said):
    """The others are told their turns again, in another process, and say what they would have said."""
    environment = isolated_environment(world, timeout=1.0, memory=2**30)
    found = play(environment, ["good", "bad", "good"])
    environment.close()
    assert found[0] == ["2", "6", "12", "20"] and found[2] == ["4", "8", "14", "22"]
    assert len(found[1]) == 2 and said in found[1][1]


def test_worlds_of_several_workers_answer_together():
    environment = isolated_environment(worlds.Slow, timeout=5.0, workers=4)
    made = [World(environment, "", {}, 0) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda world: world.step("", []), made))  # they start
        again = [World(environment, "", {}, 0) for _ in range(4)]
        processes = {answer.reward for answer in threads.map(lambda world: world.step("", []), again)}
    environment.close()
    assert len(processes) >= 2


def test_a_worker_keeps_the_worlds_of_its_episodes():
    """No turn is told twice: each of twelve episodes is as old as its own turns."""
    environment = isolated_environment(worlds.Counts, timeout=5.0, workers=2)
    made = [World(environment, "", {}, seed) for seed in range(12)]
    said = [[world.step("", []) for world in made] for _ in range(3)]
    environment.close()
    assert max(answer.reward for turn in said for answer in turn) == 18.0, "36 calls in two processes"
    found = [[answer.observation for answer in turn] for turn in said]
    assert found == [[f"{turn} {seed}" for seed in range(12)] for turn in (1, 2, 3)]


def test_the_class_of_a_script_cannot_live_elsewhere():
    class Local:
        def step(self, text: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    with pytest.raises(ValueError, match="a class that a worker can import"):
        isolated_environment(Local, timeout=1.0)


def test_arguments_must_be_named():
    with pytest.raises(ValueError, match="must name its arguments"):
        isolated_environment(worlds.Greedy, timeout=1.0)
