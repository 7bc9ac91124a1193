# SPDX-License-Identifier: Apache-2.0
"""CLIP against transformers' of torch: vectors of texts and images, the cosine, pixels, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from transformers import CLIPConfig, CLIPModel

import jrl
from jrl.trainers.diffusion.clip_reward import ClipScore
from tests.models.diffusion.tiny_pipelines import perturb
from tests.trainers.diffusion.tiny_clip_model import CONFIG, save_clip_extras, save_tiny_clip

pytestmark = pytest.mark.parity
PROMPTS = ["a red cat", "", "the blue dog " * 20]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, jrl.DifferentiableReward]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip") / "theirs"
    theirs = CLIPModel(CLIPConfig(**CONFIG))
    perturb(theirs, 1)
    theirs.save_pretrained(folder)
    return theirs, jrl.load_clip_reward(save_clip_extras(folder))


def score_of(reward: jrl.DifferentiableReward) -> ClipScore:
    assert isinstance(reward.score, ClipScore)
    return reward.score


def test_vectors_and_cosine(both: tuple[Any, jrl.DifferentiableReward]) -> None:
    theirs, reward = both
    score, tokens = score_of(reward), reward.conditions_of(PROMPTS, ({},) * 3)
    pixels = np.random.default_rng(0).standard_normal((3, 16, 16, 3)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs(
            input_ids=torch.from_numpy(tokens).long(),
            pixel_values=torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()),
        )
    text = score.clip.encode_text(reward.params, tokens, dtype=jnp.float32)
    image = score.clip.encode_image(reward.params, jnp.asarray(pixels), dtype=jnp.float32)
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (text, image)]
    np.testing.assert_allclose(unit[0], wanted.text_embeds.numpy(), atol=1e-5)
    np.testing.assert_allclose(unit[1], wanted.image_embeds.numpy(), atol=1e-5)
    assert wanted.image_embeds.std() > 0.1 and wanted.text_embeds.std() > 0.1
    cosines = (unit[0] * unit[1]).sum(axis=-1)
    logits = np.diag(wanted.logits_per_image.numpy()) / float(theirs.logit_scale.detach().exp())
    np.testing.assert_allclose(cosines, logits, atol=1e-5)


def test_gradient_of_pixels(both: tuple[Any, jrl.DifferentiableReward]) -> None:
    theirs, reward = both
    score = score_of(reward)
    pixels = np.random.default_rng(1).standard_normal((2, 16, 16, 3)).astype(np.float32)
    given = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).requires_grad_()
    features = theirs.visual_projection(theirs.vision_model(given).pooler_output)
    features.square().sum().backward()

    def total(pixels: jax.Array) -> jax.Array:
        return jnp.square(score.clip.encode_image(reward.params, pixels, dtype=jnp.float32)).sum()

    wanted = given.grad.numpy().transpose(0, 2, 3, 1)
    found = jax.jit(jax.grad(total))(jnp.asarray(pixels))
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("size", [(16, 16), (40, 48), (30, 30), (12, 20)])
def test_pixels_are_those_of_pillow(
    size: tuple[int, int], both: tuple[Any, jrl.DifferentiableReward]
) -> None:
    """But for the rounding to bytes before and behind the resizing: at most two of 255 levels."""
    pillow = pytest.importorskip("PIL.Image")
    pixels = score_of(both[1]).pixels
    noise = np.random.default_rng(0).integers(0, 256, size=(4, 5, 3)).astype(np.uint8)
    image = pillow.fromarray(noise).resize(size[::-1], pillow.BICUBIC)
    edge = [max(16, int(16 * side / min(size))) for side in size]
    resized = np.asarray(image.resize(edge[::-1], pillow.BICUBIC), np.float32)
    top, left = ((side - 16) // 2 for side in edge)
    wanted = resized[top : top + 16, left : left + 16] / 255
    found = pixels(jnp.asarray(np.asarray(image), jnp.float32)[None] / 255)[0]
    found = np.clip(np.asarray(found) * np.asarray(pixels.deviation) + np.asarray(pixels.mean), 0, 1)
    np.testing.assert_allclose(found, wanted, atol=2 / 255)


def test_torch_reads_what_jrl_writes(tmp_path: Path) -> None:
    folder = save_tiny_clip(tmp_path / "ours")
    theirs, info = CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert set(info["missing_keys"]) <= {"logit_scale"}
    reward = jrl.load_clip_reward(folder)
    tokens = reward.conditions_of(PROMPTS, ({},) * 3)
    with torch.no_grad():
        features = theirs.get_text_features(torch.from_numpy(tokens).long())
    wanted = getattr(features, "pooler_output", features).numpy()
    found = score_of(reward).clip.encode_text(reward.params, tokens, dtype=jnp.float32)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
