# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO of a whole folder of Stable Diffusion 3, tiny: an adapter, the whole denoiser, the command, and plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrl.cli import main
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from tests.models.diffusion.tiny_sd3_folder import save_tiny_sd3_folder
from tests.trainers.diffusion.runs import brightness, draw_prompt

pytestmark = pytest.mark.slow
FIELDS: dict[str, Any] = {
    "num_epochs": 1,
    "sample_num_steps": 3,
    "sample_eta": 0.7,
    "sample_guidance_scale": 4.5,
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 1,
    "sample_images_per_prompt": 4,
    "advantage": "group",
    "advantage_std": "global",
    "beta_kl": 0.05,
    "train_batch_size": 4,
    "train_skip_last_steps": 1,
    "train_clip_range": 0.01,
    "train_learning_rate": 1e-2,
    "sample_height": 8,
    "sample_width": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd3_folder(tmp_path_factory.mktemp("sd3") / "tiny")


def trained(folder: Path, run_dir: Path, *, use_lora: bool) -> DDPOTrainer:
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=use_lora)
    trainer = DDPOTrainer(DDPOConfig(**FIELDS, logdir=str(run_dir)), brightness, draw_prompt, pipeline)
    trainer.train()
    record = trainer.native.history[0]
    assert record["ddpo/pre_update_ratio_max_dev"] < 1e-5
    assert record["optim/grad_norm"] > 0 and np.isfinite(record["ddpo/loss"])
    return trainer


def test_an_adapter(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path / "run", use_lora=True)
    before, after = load_diffusion_model(folder), tmp_path / "saved"
    trainer.save_pretrained(after)
    found = load_diffusion_model(after)
    assert found.found_lora is not None and found.found_lora.adapters
    # The base, encoders and decoder are what they were, to the bit.
    jax.tree.map(np.testing.assert_array_equal, dict(found.weights), dict(before.weights))
    adapters = jax.device_get(trainer.native.params["lora"])
    jax.tree.map(np.testing.assert_array_equal, dict(found.found_lora.adapters), adapters)
    assert any(np.any(matrices["B"]) for matrices in adapters.values())


def test_the_whole_denoiser(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path / "run", use_lora=False)
    trainer.save_pretrained(tmp_path / "saved")
    before, after = load_diffusion_model(folder), load_diffusion_model(tmp_path / "saved")
    assert after.found_lora is None
    for part in ("vae", "text_encoder"):
        jax.tree.map(np.testing.assert_array_equal, after.weights[part], before.weights[part])
    kernels = [model.weights["unet"]["proj_out"]["kernel"] for model in (before, after)]
    assert (kernels[0] != kernels[1]).any()
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=False)
    trainer.sd_pipeline.save_checkpoint([], [], tmp_path / "checkpoint")
    pipeline.load_checkpoint([], tmp_path / "checkpoint")
    found = pipeline.get_trainable_layers()["unet"]["proj_out"]["kernel"]
    np.testing.assert_array_equal(found, kernels[1])


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
