# SPDX-License-Identifier: Apache-2.0
"""Reward functions that fail in the middle of a run: it stops, loses nothing, and goes on once they are mended."""

import json

import pytest

from tests.faults.jobs import assert_same_run, last_step, start

pytestmark = pytest.mark.slow
SAID = {
    "raises": r"`reward_fn` raised ConnectionError: the judge does not answer",
    "hangs": "took longer than `train.reward_timeout`, 10 s",
    "garbage": "must be a number, a list of numbers, one a token, or None where it does not apply; got 'garbage'",
    "count": "must return one reward a sample: got 3 for 4 samples",
}
TRAIN = {"reward_timeout": 10.0}


@pytest.mark.parametrize("fault", SAID)
def test_the_run_ends_keeps_what_it_has_and_goes_on(fault, checkpoint, whole, tmp_path):
    whole_folder, steps = whole("ppo")
    folder = tmp_path / "run"
    # A call that hangs must not keep an interpreter from ending; for the others a branch will do.
    options = dict(steps=steps, train=TRAIN, branch=fault != "hangs")
    # One call is the first evaluation's, two are an iteration's: the fault shows in the middle of the fifth one.
    said = start("ppo", checkpoint, folder, reward={"fault": fault, "call": 11}, **options).finish(status=1)
    assert SAID[fault] in said
    assert last_step(folder) == 16  # the four iterations before it, though a checkpoint was not due
    (kept,) = (folder / "failed_rollouts").glob("*.jsonl")
    assert f"kept in {kept}" in said
    assert len([json.loads(line)["output"] for line in kept.read_text().splitlines()]) == 4
    assert "resumed at 16" in start("ppo", checkpoint, folder, **options).finish()
    assert_same_run(folder, whole_folder)


def test_where_errors_are_skipped_a_hang_costs_its_call_only(checkpoint, tmp_path):
    folder = tmp_path / "run"
    options = dict(train={"reward_timeout": 2.0, "reward_errors": "skip"}, branch=True)
    fault = {"fault": "hangs", "call": 4, "until": 5}  # half of the second iteration's rollouts
    said = start("ppo", checkpoint, folder, steps=8, reward=fault, **options).finish()
    assert "took too long: all 4 samples of this call are left out" in said
    assert last_step(folder) == 8


# Evaluations after steps 8 and 16: the number of the second one's call, and of the last one's.
EVALUATED = {"eval_interval": 8, "checkpoint_interval": 1000}
HEALTHY = {"fault": "raises", "call": 10_000}


@pytest.mark.parametrize("fault", ["raises", "exits"])
@pytest.mark.parametrize(
    ("algorithm", "which", "call"),
    [
        ("ppo", "reward", 6),
        ("ppo", "reward", 11),
        ("ppo", "metric", 2),
        ("rft", "metric", 3),
        ("ilql", "metric", 2),
        ("sft", "metric", 3),
        ("dpo", "metric", 2),
        ("ddpo", "reward", 10),
    ],
)
def test_an_evaluation_that_failed_comes_again(algorithm, which, call, fault, checkpoint, tmp_path):
    def run(name, found=HEALTHY, **others):
        job = start(
            *(algorithm, checkpoint, tmp_path / name),
            **dict(steps=16, train=EVALUATED, branch=True, metric=HEALTHY) | {which: found} | others,
        )
        return job

    run("whole").finish()
    said = run("run", {"fault": fault, "call": call}).finish(status=1)
    assert ("raised SystemExit: 0" if fault == "exits" else "the judge does not answer") in said
    at = last_step(tmp_path / "run")
    assert at in (8, 16)
    assert f"resumed at {at}" in run("run").finish()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
