# SPDX-License-Identifier: Apache-2.0
"""DDPO of the toy model: what it learns from a bright reward, a dark one, and one that says nothing; the example."""

import json
import random

import jax
import numpy as np
import pytest

import jrl
from examples.shapes.networks import toy_model
from examples.shapes.pictures import PROMPTS
from jrl.image_rewards import brightness
from tests.examples.processes import EXAMPLES, finish, start


def dark(images, prompts, metadata):
    """The same with the other sign."""
    return -brightness(images, prompts, metadata)[0], {}


def indifferent(images, prompts, metadata):
    """Always the same."""
    return np.ones(len(prompts)), {}


def learn(reward, folder, *, epochs, weight_decay=0.0):
    """A trainer that has run; the U-Net begins with random weights."""
    config = jrl.DDPOConfig(
        seed=0,
        logdir=str(folder),
        num_epochs=epochs,
        save_freq=0,
        sample_num_steps=5,
        sample_guidance_scale=1.0,
        train_cfg=False,
        sample_batch_size=32,
        sample_num_batches_per_epoch=2,
        train_batch_size=16,
        train_skip_last_steps=2,
        train_learning_rate=3e-4,
        train_adam_weight_decay=weight_decay,
        train_clip_range=5e-3,
    )
    pipeline = jrl.DefaultDDPOStableDiffusionPipeline(toy_model(16, seed=0), use_lora=False)
    trainer = jrl.DDPOTrainer(config, reward, lambda: (random.choice(PROMPTS), {}), pipeline)
    start = jax.device_get(trainer.native.params)
    trainer.train()
    return trainer, start, [record for record in trainer.native.history if "reward/mean" in record]


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "sign"), [(brightness, 1.0), (dark, -1.0)], ids=["bright", "dark"])
def test_an_untrained_network_learns_what_is_rewarded(reward, sign, tmp_path):
    """Brightness rises by more than its deviation over the first samples, or falls where that is rewarded."""
    _, _, epochs = learn(reward, tmp_path, epochs=8)
    means = [sign * record["reward/mean"] for record in epochs]
    assert sign * (np.mean(means[-3:]) - means[0]) > epochs[0]["reward/std"]
    assert all(np.isfinite(record["ddpo/approx_kl"]) for record in epochs)
    assert all(record["ddpo/pre_update_clip_fraction"] == 0 for record in epochs)


@pytest.mark.slow
def test_a_reward_that_says_nothing_moves_nothing(tmp_path):
    trainer, start, epochs = learn(indifferent, tmp_path, epochs=2)
    assert [record["reward/std"] for record in epochs] == [0.0, 0.0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.native.params), start)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "flags"), [("brightness", "--seed 3 4"), ("jpeg", "--lora"), ("flow", "")])
def test_the_example_runs_and_uses_its_model_again(task, flags, tmp_path):
    folder = tmp_path / "run"
    words = [
        *("--task", task, *flags.split(), "--output-dir", folder, "--pretraining-steps", 4),
        *("--num_epochs", 2, "--sample_num_steps", 3, "--sample_batch_size", 8, "--train_batch_size", 8),
        *("--evaluation-samples", 16),
    ]
    printed = finish(start(*words, cwd=tmp_path, program=[EXAMPLES / "ddpo_shapes.py"]))
    assert "loss" in printed
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [record["seed"] for record in records] == ([3, 4] if task == "brightness" else [0])
    for record in records:
        assert record["task"] == task and len(record["curve"]) == 2
        assert np.isfinite([record["rise"], record["standard_error"]]).all()
        assert record["pre_update_clip_fraction"] == 0
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "model.npz").exists()
    if task == "jpeg":
        again = finish(
            start(*words, "--overwrite", "true", cwd=tmp_path, program=[EXAMPLES / "ddpo_shapes.py"])
        )
        assert "loss" not in again
        first, second = (json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines())
        assert first["curve"] == second["curve"]


@pytest.mark.slow
def test_an_unknown_field_is_refused(tmp_path):
    process = start("--train_lerning_rate", "1e-4", cwd=tmp_path, program=[EXAMPLES / "ddpo_shapes.py"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "--train_learning_rate" in output.splitlines()[-1]
