# SPDX-License-Identifier: Apache-2.0
"""`jrl.trlx` says what it does while it loads model and data, as `jrl.train` does."""

import functools

import pytest

from jrl import trlx
from jrl.trainers.loop.activity import says_what_takes_long
from jrl.trlx import api
from jrl.trlx.trainer import accelerate_base_trainer, accelerate_sft_trainer
from tests.trainers.runs import save_tiny_checkpoint, sft_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a small run; the notice comes after a millisecond and not after ten seconds."""
    notice = functools.partial(says_what_takes_long, quiet_seconds=0.001)
    for module in (api, accelerate_base_trainer):
        monkeypatch.setattr(module, "says_what_takes_long", notice)
    return sft_config(save_tiny_checkpoint(tmp_path / "model"), tmp_path / "run")


def test_train_says_it(config, monkeypatch, capsys):
    monkeypatch.setattr(accelerate_sft_trainer.AccelerateSFTTrainer, "learn", lambda self: {})
    trlx.train(samples=["the cat sat"] * 8, config=config)
    assert "still loading model and data, 0 s" in capsys.readouterr().err


def test_a_trainer_by_itself_says_it(config, capsys):
    trlx.AccelerateSFTTrainer(config)
    assert "still loading model and data, 0 s" in capsys.readouterr().err
