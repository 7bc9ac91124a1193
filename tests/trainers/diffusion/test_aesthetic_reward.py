# SPDX-License-Identifier: Apache-2.0
"""The aesthetic predictor: against torch's layers on torch's CLIP, its gradient, its file, its name on a command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jrl
from jrl.named_functions import load_differentiable_reward, load_image_reward, names_image_model
from jrl.trainers.diffusion.aesthetic_reward import LAYERS, WIDTHS, AestheticScore, predicted_score
from tests.trainers.diffusion.runs import draw_prompt, toy_model
from tests.trainers.diffusion.test_train_reward_gradient import run_config
from tests.trainers.diffusion.tiny_clip_model import CONFIG, save_clip_extras, save_tiny_clip

WIDTH = CONFIG["projection_dim"]


def tensors(width: int = WIDTH, seed: int = 0) -> dict[str, np.ndarray]:
    """A predictor's state dict."""
    rng, found = np.random.default_rng(seed), {}
    for name, inputs, outputs in zip(LAYERS, (width, *WIDTHS), WIDTHS, strict=False):
        found[f"{name}.weight"] = (rng.standard_normal((outputs, inputs)) / inputs**0.5).astype(np.float32)
        found[f"{name}.bias"] = rng.standard_normal(outputs).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("head") / "aesthetic-model.safetensors"
    save_file(tensors(), file)
    return file


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="module")
def reward(head: Path, clip: Path) -> jrl.DifferentiableReward:
    return jrl.load_aesthetic_reward(head, clip=clip)


def images(count: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).uniform(size=(count, 20, 16, 3)), jnp.float32)


def test_the_predictor_by_hand() -> None:
    """Layers that pass on the sum of two numbers, doubled once, and add 1, 2, 3, 4 and 5 on the way."""
    layers = {}
    for number, (name, inputs, outputs) in enumerate(zip(LAYERS, (2, *WIDTHS), WIDTHS, strict=False)):
        kernel, bias = np.zeros((inputs, outputs), np.float32), np.zeros(outputs, np.float32)
        kernel[:2, 0] = 1.0 if number == 0 else 0.0
        kernel[0, 0] = 2.0 if number == 1 else 1.0
        bias[0] = number + 1
        layers[name] = {"kernel": kernel, "bias": bias}
    # ((0.6 + 0.8 + 1) * 2 + 2) + 3 + 4 + 5 = 18.8
    found = predicted_score(layers, jnp.asarray([[0.6, 0.8], [0.0, 1.0]]))
    np.testing.assert_allclose(found, [18.8, 18.0], rtol=1e-6)


def test_the_score_has_a_gradient_by_images(reward: jrl.DifferentiableReward) -> None:
    """Along it the score rises; the tower of texts is not among the weights."""
    assert isinstance(reward.score, AestheticScore) and set(reward.params["clip"]) == {"vision"}
    given = images()
    climb = jax.jit(jax.value_and_grad(lambda x: reward(x, {}).sum()))
    score, gradient = climb(given)
    assert np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 1e-4
    assert float(climb(given + 1e-2 * gradient / jnp.linalg.norm(gradient))[0]) > float(score)


def test_the_tower_of_texts_is_not_read(
    reward: jrl.DifferentiableReward, head: Path, clip: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(clip, tmp_path / "clip"))
    held = load_file(folder / "model.safetensors")
    images_alone = {name: x for name, x in held.items() if not name.startswith("text_")}
    assert len(images_alone) < len(held)
    save_file(images_alone, folder / "model.safetensors")
    found = jrl.load_aesthetic_reward(head, clip=folder)
    np.testing.assert_array_equal(found(images(), {}), reward(images(), {}))
    with pytest.raises(ValueError, match=r"37 tensors are missing: text_model"):
        jrl.load_clip_reward(folder)


def test_its_name_on_a_command(head: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(place: str) -> jrl.DifferentiableReward:
        return jrl.load_aesthetic_reward(place, clip=clip)

    monkeypatch.setitem(jrl.named_functions._IMAGE_MODELS, "aesthetic", load)  # its CLIP is on the hub
    wanted = load(str(head))(images(), {})
    for by_name in (load_differentiable_reward, load_image_reward):
        found = by_name(f"aesthetic:{head}")
        np.testing.assert_array_equal(found(images(), {}), wanted)
    assert isinstance(load_differentiable_reward(f"clip:{clip}"), jrl.DifferentiableReward)
    assert names_image_model("clip:openai/clip-vit-large-patch14")
    assert not any(map(names_image_model, ("aesthetic:score", "clip", "mine:a.b", "aesthetic:")))


def test_a_file_of_torch_is_refused_with_the_line_that_converts_it(tmp_path: Path, clip: Path) -> None:
    file = tmp_path / "aesthetic-model.pth"
    file.write_bytes(b"\x80\x04.")
    with pytest.raises(FileNotFoundError, match=r"it is a pickle, which can run code.*save_file\(torch.load"):
        jrl.load_aesthetic_reward(file, clip=clip)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*missing\.safetensors"):
        jrl.load_aesthetic_reward(tmp_path / "missing.safetensors", clip=clip)


def test_another_predictor_is_refused(tmp_path: Path, clip: Path) -> None:
    file = tmp_path / "wide.safetensors"
    save_file(tensors(768), file)
    said = r"layers\.0\.weight must have shape \(1024, 10\), got \(1024, 768\)\. Is it for another CLIP\?"
    with pytest.raises(ValueError, match=said):
        jrl.load_aesthetic_reward(file, clip=clip)
    save_file({**tensors(), "layers.9.bias": np.zeros(1, np.float32)}, file)
    with pytest.raises(ValueError, match=r"layers\.9\.bias must have shape none, got \(1,\)"):
        jrl.load_aesthetic_reward(file, clip=clip)


@pytest.mark.slow
def test_a_model_learns_from_it(reward: jrl.DifferentiableReward, tmp_path: Path) -> None:
    trainer = jrl.RewardGradientTrainer(
        run_config(tmp_path), reward_function=reward, prompt_function=draw_prompt, model=toy_model()
    )
    trainer.learn()
    steps = [record for record in trainer.history if "optim/grad_norm" in record]
    assert len(steps) == 3 and all(record["optim/grad_norm"] > 0 for record in steps)
    judged = trainer.compute_rewards([trainer.gallery.last[:3]])[0][0]
    np.testing.assert_allclose(steps[-1]["reward/mean"], judged.mean(), rtol=1e-4)


@pytest.mark.parity
def test_the_score_is_torchs(tmp_path: Path) -> None:
    """Torch's CLIP and a sequence of torch's layers with dropouts, from files that torch's tensors were saved to."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch
    from torch import nn
    from transformers import CLIPConfig, CLIPModel

    from tests.models.diffusion.tiny_pipelines import perturb

    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes: Any = list(zip((WIDTH, *WIDTHS), WIDTHS, strict=False))
            linear = [nn.Linear(*size) for size in sizes]
            drop = [nn.Dropout(0.2), nn.Dropout(0.2), nn.Dropout(0.1)]
            pairs = [layer for pair in zip(linear[:3], drop, strict=True) for layer in pair]
            self.layers = nn.Sequential(*pairs, *linear[3:])

    torch.manual_seed(0)
    theirs, predictor = CLIPModel(CLIPConfig(**CONFIG)), Predictor().eval()
    perturb(theirs, 1)
    perturb(predictor, 2)
    theirs.eval().save_pretrained(tmp_path / "clip")
    save_torch(predictor.state_dict(), tmp_path / "head.safetensors")
    clip = save_clip_extras(tmp_path / "clip")
    reward = jrl.load_aesthetic_reward(tmp_path / "head.safetensors", clip=clip)
    given = jnp.asarray(np.random.default_rng(3).uniform(size=(4, 16, 16, 3)), jnp.float32)
    assert isinstance(reward.score, AestheticScore)
    pixels = torch.from_numpy(np.moveaxis(np.asarray(reward.score.pixels(given)), -1, 1).copy())
    with torch.no_grad():
        found = theirs.visual_projection(theirs.vision_model(pixel_values=pixels).pooler_output)
        wanted = predictor.layers(found / torch.linalg.vector_norm(found, dim=-1, keepdim=True))
    np.testing.assert_allclose(reward(given, {}), wanted.numpy()[:, 0], rtol=0, atol=1e-5)
    assert wanted.std() > 1e-3
