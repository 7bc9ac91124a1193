# SPDX-License-Identifier: Apache-2.0
"""Routing replay in a run: the sampler's choices reach scoring and update, or the run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jrl
from jrl.typing import ModelInputs
from tests.models.family_cases_moe import CASES
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config


def config_of(checkpoint: str, run_dir: Path, **method: Any) -> jrl.TRLConfig:
    """One PPO iteration of a tiny mixture with random weights, whose tokenizer is the checkpoint's."""
    config = ppo_config(checkpoint, run_dir, train={"total_steps": 4})
    return config.evolve(
        model={"model_path": CASES["mixtral"]},
        tokenizer={"tokenizer_path": checkpoint},
        method={"routing_replay": True, **method},
    )


@pytest.mark.slow
def test_the_rollouts_of_an_iteration_hold_the_record(checkpoint, tmp_path):
    """Two calls of four rows, cut where a stop string ends a row: a record for every token before the last."""
    seen: list[ModelInputs] = []

    class Watched(jrl.PPOTrainer):
        def _learn_from(self, experience: Any, *rest: Any) -> Any:
            seen.append(experience.rollouts.sequences.inputs)
            return super()._learn_from(experience, *rest)

    config = config_of(checkpoint, tmp_path)
    trainer = Watched(config, reward_fn=count_vowels, stop_sequences=["e"])
    trainer.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=None)
    trainer.learn()
    inputs = seen[0]
    record, mask = np.asarray(inputs.experts), np.asarray(inputs.attention_mask)
    assert record.shape == (*mask.shape, 2, 2)
    known = np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True) - 1
    assert (record[known] >= 0).all()
    (line,) = (line for line in trainer.history if "ppo/ratio_max_dev_first_minibatch" in line)
    assert line["ppo/ratio_max_dev_first_minibatch"] < 1e-5


def test_slots_keep_no_record(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match=r"`method\.routing_replay` must be False beside `method\.rollout_slots`"
    ):
        config_of(checkpoint, tmp_path, rollout_slots=2)


def test_an_environment_is_refused(checkpoint, tmp_path):
    class Echo:
        def reset(self, **given: Any) -> str:
            return "x"

        def step(self, action: str) -> Any:
            return "", 0.0, True

    with pytest.raises(ValueError, match=r"`method\.routing_replay` must be False with an environment"):
        jrl.PPOTrainer(config_of(checkpoint, tmp_path), environment=Echo)


def test_a_model_without_experts_is_refused(checkpoint, tmp_path):
    config = ppo_config(checkpoint, tmp_path, method={"routing_replay": True})
    with pytest.raises(ValueError, match="`routing_replay` must be False for a model without a mixture"):
        jrl.PPOTrainer(config, reward_fn=count_vowels)
