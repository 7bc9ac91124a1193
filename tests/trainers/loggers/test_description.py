# SPDX-License-Identifier: Apache-2.0
"""What a run says of optimizer batches that do not fit the rows that there are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jrl.trainers.loggers.console import RichConsole
from jrl.trainers.loggers.description import (
    WARNING,
    describe_intervals,
    join_warnings,
    warn_of_batches,
    warn_of_slow_controller,
    warn_of_unused_evaluation_steps,
)
from jrl.trainers.ppo import PPOTrainer
from jrl.trainers.sft import SFTTrainer
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, save_tiny_checkpoint, sft_config


@pytest.mark.parametrize(("batch_size", "ragged"), [(8, True), (4, True), (1, True), (3, False)])
def test_batches_that_fit_are_not_spoken_of(batch_size, ragged):
    assert warn_of_batches(batch_size, 8, "the samples", ragged=ragged) == {}


@pytest.mark.parametrize(
    ("batch_size", "says"),
    [
        (3, "does not divide the rows (8): a pass is 3 optimizer steps, the last of them on 2 rows"),
        (64, "is more than the rows (8): every optimizer step is on 8 rows"),
    ],
)
def test_what_becomes_of_others_is_said(batch_size, says):
    (line,) = warn_of_batches(batch_size, 8, "the rows", ragged=True).values()
    assert line.startswith(f"`train.batch_size` = {batch_size} {says}")


def test_a_controller_that_cannot_move_is_told():
    """13 iterations of 128 rollouts: 1.00256 to the 13th power; 79 of them come to 1.22."""
    (line,) = warn_of_slow_controller(6.0, 10000, iterations=13, rollouts=128).values()
    assert line.startswith(
        "`method.target` = 6 can raise the KL weight by 3.4 % at most in the run's 1,664 rollouts"
    )
    assert "larger `method.init_kl_coef`, or a shorter `method.horizon`" in line
    assert warn_of_slow_controller(6.0, 10000, iterations=79, rollouts=128) == {}
    assert warn_of_slow_controller(6.0, 1000, iterations=13, rollouts=128) == {}


def test_several_warnings_are_one_line():
    assert join_warnings({}, {}) == {}
    assert join_warnings({WARNING: "a"}, {}, {WARNING: "b"}) == {WARNING: "a; b"}


@pytest.mark.parametrize(
    ("step", "evaluation", "checkpoint", "says"),
    [
        (0, 100, 10000, "evaluation every 100, next at 112; checkpoint every 10,000, next at 200"),
        (112, 100, 0, "evaluation every 100, next at 200; checkpoint at the end"),
        (0, 16, 32, "evaluation every 16, next at 16; checkpoint every 32, next at 32"),
        (0, 1, 17, "evaluation every 1, next at 16; checkpoint every 17, next at 32"),
    ],
)
def test_intervals_end_with_their_iteration(step, evaluation, checkpoint, says):
    """As `Run.after` does it: an interval's end lies in (before, step]."""
    found = describe_intervals(step, 200, iteration=16, evaluation=evaluation, checkpoint=checkpoint)
    assert found == {"intervals": f"an iteration is 16 steps; {says}"}


def test_the_console_shows_it():
    out = io.StringIO()
    RichConsole(Console(file=out, width=200)).start(warn_of_batches(64, 8, "the rows"), total_steps=1, step=0)
    assert "warning  `train.batch_size` = 64" in out.getvalue()


@pytest.mark.slow
def test_ppo_tells_of_its_controller(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    for target, told in ((None, False), (6.0, True)):
        ppo = PPOTrainer(
            ppo_config(checkpoint, tmp_path / "ppo", method={"target": target, "horizon": 10000}),
            reward_fn=count_vowels,
        )
        ppo.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=None)
        assert ("`method.target` = 6" in ppo.description().get(WARNING, "")) == told


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "says"), [(3, "does not divide"), (64, "is more than"), (4, None)])
def test_ppo_and_sft_say_it(tmp_path, batch_size, says):
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    train = {"train": {"batch_size": batch_size, "minibatch_size": None}}
    ppo = PPOTrainer(ppo_config(checkpoint, tmp_path / "ppo", **train), reward_fn=count_vowels)
    ppo.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=None)
    found = ppo.description().get(WARNING, "")
    assert (says or "") in found and bool(found) == (says is not None)
    sft = SFTTrainer(sft_config(checkpoint, tmp_path / "sft", **train))
    sft.add_data(samples=PROMPTS, rewards=None, prompts=None, eval_prompts=None)
    assert (WARNING in sft.description()) == (batch_size == 64)


def test_steps_of_evaluations_that_nobody_asks_for_are_told():
    told = warn_of_unused_evaluation_steps(20, 0)[WARNING]
    assert "`method.eval_num_steps` = 20 does nothing, for `method.eval_prompts` is empty" in told
    assert "give some prompts, or leave it out" in told
    assert warn_of_unused_evaluation_steps(20, 2) == warn_of_unused_evaluation_steps(None, 0) == {}
