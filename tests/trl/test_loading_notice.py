# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL's shape say what they do while they load model and data, as jrl's own do."""

import functools

import pytest

from jrl import trl
from jrl.trainers.loop.activity import says_what_takes_long
from jrl.trl import flat_trainer, handles, ppo
from tests.tiny import tiny_tokenizer


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """The notice comes after a millisecond and not after ten seconds."""
    notice = functools.partial(says_what_takes_long, quiet_seconds=0.001)
    for module in (flat_trainer, handles, ppo):
        monkeypatch.setattr(module, "says_what_takes_long", notice)


def test_flat_trainers_say_it(checkpoint, tmp_path, capsys):
    trl.SFTTrainer(checkpoint, args=trl.SFTConfig(str(tmp_path)), train_dataset=[{"text": "the cat"}] * 8)
    assert "still loading model and data, 0 s" in capsys.readouterr().err


def test_ppo_says_it(checkpoint, capsys):
    trl.PPOTrainer(trl.PPOConfig(batch_size=2, mini_batch_size=2), checkpoint, tokenizer=tiny_tokenizer())
    assert "still loading model and data, 0 s" in capsys.readouterr().err


def test_a_model_without_a_trainer_says_it(checkpoint, tmp_path, capsys):
    trl.AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "copy")
    assert "still loading the model, 0 s" in capsys.readouterr().err
