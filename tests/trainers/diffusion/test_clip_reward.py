# SPDX-License-Identifier: Apache-2.0
"""The CLIP reward without torch: its gradient, what it asks of prompts, what is refused, and DDPO with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.models.diffusion.clip_model import Clip, read_clip_model_config
from jrl.trainers.diffusion.clip_reward import Pixels, read_pixels
from tests.models.diffusion.tiny_folder import change_json
from tests.trainers.diffusion.runs import make
from tests.trainers.diffusion.tiny_clip_model import CONFIG, PROCESSOR, save_tiny_clip

IMAGES = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 20, 24, 3)), jnp.float32)
PROMPTS = ("a red cat", "the blue dog")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> jrl.DifferentiableReward:
    return jrl.load_clip_reward(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny"))


def test_a_step_along_its_gradient_raises_it(reward: jrl.DifferentiableReward) -> None:
    tokens = reward.conditions_of(PROMPTS, ({}, {}))

    def total(images: jax.Array) -> jax.Array:
        return reward(images, tokens).sum()

    graded, judged = jax.jit(jax.value_and_grad(total)), jax.jit(lambda *inputs: reward(*inputs))
    value, gradient = graded(IMAGES)
    assert -2.0 <= float(value) <= 2.0
    size = float(jnp.square(gradient).sum())
    assert size > 0
    step = 1e-3 / size**0.5
    rise = float(graded(IMAGES + step * gradient)[0] - value)
    assert rise == pytest.approx(step * size, rel=0.05)
    assert float(jnp.abs(judged(IMAGES, tokens) - judged(IMAGES, tokens[::-1])).max()) > 1e-3


def test_pixels_of_their_own_size_are_only_normalised() -> None:
    pixels = Pixels(16, (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    images = IMAGES[:, :16, :16]
    wanted = (np.asarray(images) - np.asarray([0.5, 0.25, 0.0])) / np.asarray([0.5, 1.0, 2.0])
    np.testing.assert_allclose(pixels(images), wanted, atol=1e-6)
    assert pixels(IMAGES).shape == (2, 16, 16, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resample": 2}, "`resample` must be 3, bicubic"),
        ({"crop_size": 8}, "`crop_size` must be 16, the image size of the model"),
        ({"size": {"shortest_edge": 32}}, "`size` must be a shortest edge of 16"),
        ({"do_normalize": False}, "`do_normalize` must be true"),
        ({"image_mean": [0.5]}, "`image_mean` must be three numbers"),
        ({"rescale_factor": 1.0}, "`rescale_factor` must be 1/255"),
    ],
)
def test_other_rules_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pixels(PROCESSOR | changes, 16)


def vision(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", vision_config=CONFIG["vision_config"] | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (vision(num_channels=1), "`num_channels` must be 3"),
        (vision(patch_sizes=4), "`patch_sizes` is unknown.*patch_size"),
        (vision(num_attention_heads=5), "`num_attention_heads` must be a divisor"),
        (lambda folder: change_json(folder / "config.json", text_config=None), "`text_config` must be"),
        (
            lambda folder: (folder / "preprocessor_config.json").unlink(),
            "preprocessor_config.json is missing",
        ),
        (
            lambda folder: change_json(folder / "config.json", model_type="siglip"),
            "`model_type` must be 'clip'",
        ),
    ],
)
def test_bad_folders(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = save_tiny_clip(tmp_path / "clip")
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        jrl.load_clip_reward(folder)


def test_a_second_copy_of_a_towers_config_rules() -> None:
    old = {**CONFIG, "text_config": {"vocab_size": 9}, "text_config_dict": CONFIG["text_config"]}
    assert read_clip_model_config(old) == read_clip_model_config(CONFIG)


def test_a_stored_config_is_read_again() -> None:
    config = read_clip_model_config(CONFIG)
    again = read_clip_model_config(json.loads(json.dumps(Clip(config).stored_config())))
    assert again == config


@pytest.mark.slow
def test_ddpo_is_rewarded_by_it(reward: jrl.DifferentiableReward, tmp_path: Path) -> None:
    trainer = make(tmp_path, reward=reward, train={"epochs": 1, "total_steps": 1})
    trainer.learn()
    assert -1 <= trainer.history[0]["reward/mean"] <= 1 and trainer.history[0]["reward/std"] > 0
