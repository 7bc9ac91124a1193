# SPDX-License-Identifier: Apache-2.0
"""The watch over a step-by-step PPO."""

from __future__ import annotations

import json
import warnings

import pytest

from jrl.trainers.loggers.watch import FOUND
from jrl.trl.step_records import WatchedHistory


def record(step, **figures):
    return {"step": step, "iteration": step, **figures}


def test_a_constant_reward_is_warned_of_once():
    history = []
    records = WatchedHistory(history, watch=True)
    for step in range(1, 4):
        records.add(record(step, **{"reward/std": 0.0, "reward/mean": 1.0}))
    with pytest.warns(UserWarning, match="constant_reward.*Remedy"):
        records.add(record(4, **{"reward/std": 0.0, "reward/mean": 1.0}))
    records.add(record(5, **{"reward/std": 0.0, "reward/mean": 1.0}))
    assert [one.get(FOUND) for one in history] == [None] * 4 + ["constant_reward", None]


def test_what_the_history_tells_already_is_not_said_again():
    history = [record(1), {"step": 1, FOUND: "learning_rate"}]
    WatchedHistory(history, watch=True).add(record(2, **{"optim/learning_rate": 2.0}))
    assert len(history) == 3


def test_without_a_watch_records_are_kept_alone():
    history = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WatchedHistory(history, watch=False).add(record(1, **{"optim/learning_rate": 2.0}))
    assert len(history) == 1


@pytest.mark.slow
def test_step_feeds_the_watch(checkpoint):
    from jrl.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    from tests.tiny import tiny_tokenizer

    config = PPOConfig(batch_size=2, mini_batch_size=1, ppo_epochs=1, learning_rate=2.0, log_with=None)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoint)
    trainer = PPOTrainer(config, model, None, tiny_tokenizer())
    with pytest.warns(UserWarning, match="learning_rate: optim/learning_rate is 2"):
        trainer.step([[5, 6, 7], [8, 9]], [[10, 11], [12]], [1.0, 0.0])
    assert [one[FOUND] for one in trainer.history if FOUND in one] == ["learning_rate"]


def low(step):
    return record(step, **{"ppo/entropy": 0.01 if step > 2 else 2.0, "reward/std": 0.0, "reward/mean": 1.0})


def test_a_watch_goes_on_where_it_was_saved():
    """Baselines are those of the first records, windows go on, and nothing is said twice."""
    whole, first, second = ([], [], [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = WatchedHistory(whole, watch=True)
        for step in range(1, 9):
            records.add(low(step))
        for saved_at in range(1, 8):
            first, second = [], []
            before = WatchedHistory(first, watch=True)
            for step in range(1, saved_at + 1):
                before.add(low(step))
            after = WatchedHistory(second, watch=True)
            after.load(json.loads(json.dumps(before.state())))
            for step in range(saved_at + 1, 9):
                after.add(low(step))
            assert first + second == whole
    assert [one[FOUND] for one in whole if FOUND in one] == ["constant_reward", "entropy_collapse"]
