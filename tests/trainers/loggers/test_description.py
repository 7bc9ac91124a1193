# SPDX-License-Identifier: Apache-2.0
"""What a run says of optimizer batches that do not fit the rows that there are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jrl.trainers.loggers.console import RichConsole
from jrl.trainers.loggers.description import WARNING, warn_of_batches
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


def test_the_console_shows_it():
    out = io.StringIO()
    RichConsole(Console(file=out, width=200)).start(warn_of_batches(64, 8, "the rows"), total_steps=1, step=0)
    assert "warning  `train.batch_size` = 64" in out.getvalue()


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
