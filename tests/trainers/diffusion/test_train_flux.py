# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO and reward gradients of a whole folder of FLUX.1, tiny: adapter, whole denoiser, command, and plans."""

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
from tests.models.diffusion.tiny_flux_folder import save_tiny_flux_folder
from tests.trainers.diffusion.runs import brightness, draw_prompt
from tests.trainers.diffusion.test_train_reward_gradient import bright, run_config
from tests.trainers.diffusion.test_train_sd3 import FIELDS as SD3_FIELDS

pytestmark = pytest.mark.slow
FIELDS: dict[str, Any] = {**SD3_FIELDS, "sample_guidance_scale": 3.5, "sample_height": 8, "sample_width": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux_folder(tmp_path_factory.mktemp("flux") / "tiny")


def trained(folder: Path, run_dir: Path, *, use_lora: bool, **changes: Any) -> DDPOTrainer:
    pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=use_lora)
    config = DDPOConfig(**{**FIELDS, **changes}, logdir=str(run_dir))
    trainer = DDPOTrainer(config, brightness, draw_prompt, pipeline)
    trainer.train()
    record = trainer.native.history[0]
    assert record["ddpo/pre_update_ratio_max_dev"] < 1e-5
    assert record["optim/grad_norm"] > 0 and np.isfinite(record["ddpo/loss"])
    return trainer


def test_an_adapter(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path / "run", use_lora=True)
    # 4 × 6 latents are 2 × 3 patches: μ = 0.5 + (6 − 256)·(1.15 − 0.5)/(4096 − 256).
    assert trainer.native.model.schedule.resolution_shift == pytest.approx(0.5 - 250 * 0.65 / 3840)
    before, after = load_diffusion_model(folder), tmp_path / "saved"
    trainer.save_pretrained(after)
    found = load_diffusion_model(after)
    assert found.found_lora is not None and found.found_lora.adapters
    # The base, encoders and decoder are what they were, to the bit.
    jax.tree.map(np.testing.assert_array_equal, dict(found.weights), dict(before.weights))
    adapters = jax.device_get(trainer.native.params["lora"])
    jax.tree.map(np.testing.assert_array_equal, dict(found.found_lora.adapters), adapters)
    assert any(np.any(matrices["B"]) for matrices in adapters.values())
    # The pipeline samples at any other scale, in one pass, and refuses what would need a second one.
    pipeline = trainer.sd_pipeline
    latents = np.random.default_rng(0).standard_normal((1, 16, 4, 6)).astype(np.float32)
    images = [
        pipeline(
            "a red cat", 8, 12, num_inference_steps=2, guidance_scale=w, latents=latents, output_type="np"
        )
        for w in (1.0, 3.5)
    ]
    assert np.abs(images[0].latents[-1] - images[1].latents[-1]).max() > 1e-4
    with pytest.raises(ValueError, match=r"the negative prompt must be left at its default.*true_cfg_scale"):
        pipeline("a red cat", 8, 12, negative_prompt="a dog", num_inference_steps=2)


def test_the_whole_denoiser(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path / "run", use_lora=False, kl_to_go=True, old_log_probs="recompute")
    trainer.save_pretrained(tmp_path / "saved")
    before, after = load_diffusion_model(folder), load_diffusion_model(tmp_path / "saved")
    assert after.found_lora is None
    for part in ("vae", "text_encoder"):
        jax.tree.map(np.testing.assert_array_equal, after.weights[part], before.weights[part])
    kernels = [model.weights["unet"]["proj_out"]["kernel"] for model in (before, after)]
    assert (kernels[0] != kernels[1]).any()


def test_schnell_is_sampled_and_trained_without_guidance(tmp_path: Path) -> None:
    folder = save_tiny_flux_folder(tmp_path / "schnell", kind="schnell")
    with pytest.raises(ValueError, match=r"`sample_guidance_scale` must be at most 1, got 3\.5"):
        trained(folder, tmp_path / "refused", use_lora=True)
    trainer = trained(folder, tmp_path / "run", use_lora=True, sample_guidance_scale=1.0)
    assert trainer.native.model.schedule.sigmas(2).tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"negative_prompts": "a dog"}, "the negative prompt"),
        ({"guidance_rescale": 0.5}, "`guidance_rescale`"),
    ],
)
def test_what_is_of_a_second_pass_is_refused(
    field: dict[str, Any], name: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be left at its default"):
        trained(folder, tmp_path / "run", use_lora=True, **field)


def test_reward_gradients(folder: Path, tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        model={"model_path": str(folder), "peft_config": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}},
        method={"sample_num_steps": 2, "sample_guidance_scale": 3.5, "sample_height": 8, "sample_width": 8},
        train={"total_steps": 2},
    )
    trainer = jrl.RewardGradientTrainer(config, reward_function=bright, prompt_function=draw_prompt)
    trainer.learn()
    steps = [record for record in trainer.history if "optim/grad_norm" in record]
    assert len(steps) == 2 and all(record["optim/grad_norm"] > 0 for record in steps)
    assert any(np.any(matrices["B"]) for matrices in jax.device_get(trainer.params["lora"]).values())


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
