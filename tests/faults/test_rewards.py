# SPDX-License-Identifier: Apache-2.0
"""Reward functions that fail in the middle of a run: it stops, loses nothing, and goes on once they are mended."""

import json

import pytest

from tests.faults.jobs import assert_same_run, last_step, start

pytestmark = pytest.mark.slow
SAID = {
    "raises": r"`reward_fn` raised ConnectionError: the judge does not answer",
    "hangs": "took longer than `train.reward_timeout`, 10 s",
    "garbage": "The reward must be a number, or a list of numbers, one a token; got 'garbage'",
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
