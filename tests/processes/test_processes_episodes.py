# SPDX-License-Identifier: Apache-2.0
"""Episodes and slots of several processes: what they sample and learn is what one process does."""

import pytest

from tests.processes.conftest import assert_same_run

pytestmark = pytest.mark.slow
TURNS = {"gen_kwargs": {"max_new_tokens": 12, "max_turn_tokens": 3, "max_turns": 3}}


def episodes(run, algorithm, num_processes, num_devices, environment="Parrot", **sections):
    return run(
        algorithm,
        num_processes,
        num_devices,
        environment=environment,
        **{**sections, "method": {**TURNS, **sections.get("method", {})}},
    )


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_episodes_of_two_processes_are_as_one(run, algorithm):
    got, alone = episodes(run, algorithm, 2, 1), episodes(run, algorithm, 1, 2)
    assert_same_run(got, alone)
    assert any(len(row["turns"]) > 1 for row in got.rollouts)


def test_each_world_is_of_one_process(run):
    """Of every call of 4 rows, 2 each; seeds are of the prompt's number, whichever process plays it."""
    got, alone = episodes(run, "ppo", 2, 1), episodes(run, "ppo", 1, 2)
    first, second = (result["worlds"] for result in got.results)
    assert len(first) >= len(second) >= 6
    assert sorted(first + second) == sorted(alone.results[0]["worlds"])


def test_process_0_plays_all_worlds_where_it_judges_all_rows(run):
    got = episodes(run, "ppo", 2, 1, train={"rewards_on": "main"})
    assert_same_run(got, episodes(run, "ppo", 1, 2))
    assert got.results[1]["worlds"] == []


def test_worlds_that_fail_end_their_own_rows_whichever_process_plays_them(run):
    sections = {"train": {"reward_errors": "skip"}}
    got = episodes(run, "ppo", 2, 1, "Moody", **sections)
    assert_same_run(got, episodes(run, "ppo", 1, 2, "Moody", **sections))
    assert any(row["reward"] is None for row in got.rollouts)


def test_a_world_that_computes_by_jax_runs_in_its_process_alone(run):
    assert_same_run(episodes(run, "ppo", 2, 1, "Computing"), episodes(run, "ppo", 1, 2, "Computing"))


@pytest.mark.parametrize("slots", [2, 3])
def test_slots_of_two_processes_are_as_one(run, slots):
    """2 are split over both; 3 do not divide, and are whole on each."""
    sections = {"method": {"rollout_slots": slots}}
    got = run("ppo", 2, 1, **sections)
    assert_same_run(got, run("ppo", 1, 2, **sections))
    assert_same_run(got, run("ppo", 1, 2))


def test_slots_of_a_model_split_over_processes(run):
    sections = {"family": "llama", "train": {"mesh": {"data": 1, "tensor": 2}}}
    method = {"method": {"rollout_slots": 2}}
    assert_same_run(run("ppo", 2, 1, **sections, **method), run("ppo", 1, 2, **sections))
