# SPDX-License-Identifier: Apache-2.0
"""Reward gradients of toys: the reward rises, weights of a reward are arguments, runs repeat and go on, the command."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from examples.shapes.networks import toy_model as shapes_model
from examples.shapes.pictures import PROMPTS as SHAPES
from jrl.cli import main
from jrl.models.diffusion.lora_files import LORA_FILE
from jrl.trainers.diffusion.ddpo_prompts import PromptList
from jrl.trainers.diffusion.differentiable import as_differentiable, as_reward_function
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.trainers.diffusion.runs import PROMPTS, draw_prompt, toy_model


def bright(images: jax.Array) -> jax.Array:
    """Mean of all pixels."""
    return images.mean(axis=(1, 2, 3))


def run_config(run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    return (
        jrl.default_reward_gradient_config()
        .evolve(
            model={"model_path": "toy", "peft_config": None},
            optimizer={"kwargs": {"lr": 1e-3}},
            method={"sample_num_steps": 3, "sample_guidance_scale": 2.0, "num_last_steps": 2},
            train={
                "total_steps": 3,
                "batch_size": 4,
                "minibatch_size": 2,
                "eval_interval": 100,
                "checkpoint_interval": 100,
                "checkpoint_dir": str(run_dir),
                "seed": 3,
            },
        )
        .evolve(**sections)
    )


def make(run_dir: Path, reward: Any = bright, **sections: dict[str, Any]) -> jrl.RewardGradientTrainer:
    return jrl.RewardGradientTrainer(
        run_config(run_dir, **sections),
        reward_function=reward,
        prompt_function=draw_prompt,
        model=toy_model(),
    )


COLOURS = jnp.asarray([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
COLOURFUL = jrl.DifferentiableReward(
    score=lambda params, images, wanted: (
        -jnp.square(images.mean(axis=(1, 2)) - jnp.take(params["colours"], wanted, axis=0)).mean(axis=1)
    ),
    conditions=lambda prompts, metadata: np.asarray([PROMPTS.index(prompt) for prompt in prompts], np.int32),
    params={"colours": COLOURS},
)


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "last"), [(1.0, 1), (-1.0, 3)], ids=["bright", "dark"])
def test_the_reward_rises_on_shapes(sign: float, last: int, tmp_path: Path) -> None:
    """An untrained network learns what is rewarded, by more than the deviation of its first images."""
    config = run_config(
        tmp_path,
        optimizer={"kwargs": {"lr": 3e-4, "weight_decay": 0.0}},
        method={"sample_num_steps": 5, "sample_guidance_scale": 1.0, "num_last_steps": last},
        train={"total_steps": 8, "batch_size": 8, "minibatch_size": 8},
    )

    def reward(images: jax.Array) -> jax.Array:
        return sign * bright(images)

    trainer = jrl.RewardGradientTrainer(
        config,
        reward_function=reward,
        prompt_function=PromptList(list(SHAPES)),
        model=shapes_model(16, seed=0),
    )
    trainer.learn()
    records = [record for record in trainer.history if "reward/std" in record]
    means = [record["reward/mean"] for record in records]
    assert len(means) == 8
    assert np.mean(means[-3:]) - means[0] > 3 * records[0]["reward/std"]


@pytest.mark.slow
def test_weights_of_a_reward_and_what_it_asks_of_prompts(tmp_path: Path) -> None:
    method = {"eval_prompts": list(PROMPTS), "sample_num_steps": 3, "num_last_steps": 3}
    trainer = make(tmp_path, COLOURFUL, method=method, train={"total_steps": 12})
    before = trainer.evaluate()["reward/mean"]
    weights = jax.device_get(trainer.frozen["reward"])
    trainer.learn()
    assert trainer.evaluate()["reward/mean"] > before
    np.testing.assert_array_equal(trainer.frozen["reward"]["colours"], weights["colours"])
    assert "colours" not in str(jax.tree_util.tree_structure(trainer.params))
    steps = [record for record in trainer.history if "optim/grad_norm" in record]
    assert len(steps) == 12 and steps[0]["optim/grad_norm"] > 0


@pytest.mark.slow
def test_a_run_repeats_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", train={"total_steps": 4, "checkpoint_interval": 2})
    whole.learn()
    make(tmp_path / "again", train={"total_steps": 2, "checkpoint_interval": 2}).learn()
    resumed = {"total_steps": 4, "resume_from_checkpoint": str(tmp_path / "again")}
    again = make(tmp_path / "again", train=resumed)
    again.learn()
    assert int(again.optimizer_steps()) == 4
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole.params), jax.device_get(again.params))


@pytest.mark.slow
def test_the_command_trains_an_adapter_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_folder(tmp_path / "tiny")
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    (tmp_path / "bright_reward.py").write_text(
        "def bright(images):\n    return images.mean(axis=(1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = {
        "model.model_path": folder,
        "method.sample_num_steps": 2,
        "train.total_steps": 1,
        "train.batch_size": 2,
        "train.minibatch_size": 2,
        "train.checkpoint_dir": tmp_path / "run",
    }
    words = [f"--{name}={value}" for name, value in fields.items()]
    asked = ["--reward", "bright_reward:bright", "--prompts", "prompts.txt"]
    assert main(["reward_gradient", *asked, *words]) == 0
    assert list((tmp_path / "run").rglob(LORA_FILE))


def test_a_reward_as_ddpo_calls_one() -> None:
    images = np.random.default_rng(0).uniform(size=(3, 3, 4, 4)).astype(np.float32)
    found, more = as_reward_function(COLOURFUL)(images, PROMPTS, ({},) * 3)
    wanted = -np.square(images.mean(axis=(2, 3)) - np.asarray(COLOURS)).mean(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert more == {} and found.dtype == np.float32
    assert as_differentiable(COLOURFUL) is COLOURFUL
    plain = as_differentiable(bright)
    np.testing.assert_allclose(plain(jnp.moveaxis(images, 1, -1), {}), images.mean(axis=(1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"num_last_steps": 0}, r"`method.num_last_steps` must be in 1\.\.50"),
        ({"num_last_steps": 51}, r"`method.num_last_steps` must be in 1\.\.50"),
        ({"sample_eta": 1.5}, r"`method.sample_eta` must be in \[0, 1\]"),
    ],
)
def test_values_out_of_range(method: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jrl.default_reward_gradient_config().evolve(method=method)


def test_what_is_no_reward(tmp_path: Path) -> None:
    config = copy.deepcopy(run_config(tmp_path))
    with pytest.raises(ValueError, match=r"`reward_function` must be a JAX function of images.*got NoneType"):
        jrl.RewardGradientTrainer(config, prompt_function=draw_prompt, model=toy_model())
    with pytest.raises(
        ValueError, match=r"`prompt_function` must be a function given to RewardGradientTrainer"
    ):
        jrl.RewardGradientTrainer(config, reward_function=bright, model=toy_model())
