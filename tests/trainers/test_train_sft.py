# SPDX-License-Identifier: Apache-2.0
import jax
import numpy as np
import pytest

import jrl
from tests.trainers.runs import repeatable, sft_config

SAMPLES = [
    "the cat sat",
    ["a dog", " ran off"],
    ["who", " me", "no", " you then"],
    "so it goes on and on",
    "rain",
]


def train(config):
    return jrl.train(samples=SAMPLES, eval_prompts=["the", "a"], config=config)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    return train(sft_config(checkpoint, tmp_path_factory.mktemp("whole")))


def test_loss_falls(whole):
    losses = [record["sft/loss"] for record in whole.history if "sft/loss" in record]
    assert np.mean(losses[-4:]) < 0.8 * losses[0]


@pytest.mark.slow
def test_resumed_equals_never_stopped_bit_for_bit(whole, checkpoint, tmp_path):
    train(sft_config(checkpoint, tmp_path, train={"total_steps": 3}))
    resumed = train(sft_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)}))
    for expected, got in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(expected, got)
    training = [record for record in repeatable(whole.history) if "iteration" in record]
    assert [record for record in repeatable(resumed.history) if "iteration" in record] == training


def test_generate_answers_texts(whole):
    outputs = whole.generate(["the", "a dog"], gen_kwargs={"max_new_tokens": 4})
    assert len(outputs) == 2 and all(isinstance(text, str) for text in outputs)
    assert outputs == whole.generate(["the", "a dog"], gen_kwargs={"max_new_tokens": 4})


def test_rewards_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="SFTTrainer learns from `samples`"):
        jrl.train(samples=["a"], rewards=[1.0], config=sft_config(checkpoint, tmp_path))


def test_reward_function_without_a_ppo_config_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="SFTTrainer learns from `samples`"):
        jrl.train(reward_fn=len, prompts=["a"], config=sft_config(checkpoint, tmp_path))


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="Nothing to train on"):
        jrl.train()
