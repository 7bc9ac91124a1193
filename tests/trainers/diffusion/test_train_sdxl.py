# SPDX-License-Identifier: Apache-2.0
"""DDPO and reward gradients of a whole folder of Stable Diffusion XL, tiny; the command, and plans of its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.cli import main
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from tests.models.diffusion.tiny_sdxl_folder import save_tiny_sdxl_folder
from tests.trainers.diffusion.runs import brightness, draw_prompt
from tests.trainers.diffusion.test_train_reward_gradient import bright, run_config

pytestmark = pytest.mark.slow
FIELDS: dict[str, Any] = {
    "num_epochs": 1,
    "sample_num_steps": 3,
    "sample_guidance_scale": 5.0,
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 4,
    "train_learning_rate": 1e-2,
    "train_clip_range": 0.01,
    "sample_height": 8,
    "sample_width": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sdxl_folder(tmp_path_factory.mktemp("sdxl") / "tiny")


@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
def test_an_epoch(use_lora: bool, folder: Path, tmp_path: Path) -> None:
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=use_lora)
    config = DDPOConfig(**FIELDS, logdir=str(tmp_path / "run"))
    trainer = DDPOTrainer(config, brightness, draw_prompt, pipeline)
    trainer.train()
    record = trainer.native.history[0]
    assert record["ddpo/pre_update_ratio_max_dev"] < 1e-5
    assert record["optim/grad_norm"] > 0 and np.isfinite(record["ddpo/loss"])
    trainer.save_pretrained(tmp_path / "saved")
    before, after = load_diffusion_model(folder), load_diffusion_model(tmp_path / "saved")
    # What does not train is what it was, to the bit.
    for part in ("vae", "text_encoder", *(["unet"] if use_lora else [])):
        jax.tree.map(np.testing.assert_array_equal, after.weights[part], before.weights[part])
    if use_lora:
        assert after.found_lora is not None
        adapters = jax.device_get(trainer.native.params["lora"])
        jax.tree.map(np.testing.assert_array_equal, dict(after.found_lora.adapters), adapters)
        assert any(np.any(matrices["B"]) for matrices in adapters.values())
    else:
        assert after.found_lora is None
        for layer in ("conv_out", "add_embedding"):
            moved = jax.tree.map(
                lambda x, y: (x != y).any(), before.weights["unet"][layer], after.weights["unet"][layer]
            )
            assert jax.tree.all(moved), layer


def test_a_call_without_a_negative_prompt_is_guided_by_zeros(folder: Path) -> None:
    pipeline = DefaultDDPOStableDiffusionPipeline(folder)
    options: dict[str, Any] = {
        "prompt": "a red cat",
        "num_inference_steps": 2,
        "latents": np.random.default_rng(0).standard_normal((1, 4, 8, 8)),
        "output_type": "latent",
    }
    zeros = pipeline(**options, negative_prompt_embeds=np.zeros((1, 9, 20)))
    for nothing in (None, "", [""]):
        np.testing.assert_array_equal(pipeline(**options, negative_prompt=nothing).images, zeros.images)
    assert np.abs(pipeline(**options, negative_prompt="a dog").images - zeros.images).max() > 1e-3


def test_reward_gradients(folder: Path, tmp_path: Path) -> None:
    config = run_config(
        tmp_path / "run",
        model={"model_path": str(folder), "peft_config": {"peft_type": "LORA", "r": 2}},
        method={"sample_height": 8, "sample_width": 8},
        train={"total_steps": 1},
    )
    trainer = jrl.RewardGradientTrainer(config, reward_function=bright, prompt_function=draw_prompt)
    trainer.learn()
    record = next(record for record in trainer.history if "optim/grad_norm" in record)
    assert record["optim/grad_norm"] > 0


def test_the_command_and_its_plan(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    words = [f"--{name}={value}" for name, value in FIELDS.items()]
    asked = [f"--pretrained_model={folder}", f"--prompts={tmp_path / 'prompts.txt'}", "--reward=brightness"]
    assert main(["ddpo", *asked, f"--logdir={tmp_path / 'run'}", *words]) == 0
    assert list((tmp_path / "run").rglob("pytorch_lora_weights.safetensors"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**FIELDS, "pretrained_model": str(folder)}))
    capsys.readouterr()
    assert main(["plan", "--config", str(recipe)]) == 0
    assert "frozen parameters" in capsys.readouterr().out
