# SPDX-License-Identifier: Apache-2.0
"""DDPO of a tiny Stable Diffusion: adapters and whole networks, every option, and without torch."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl.models.diffusion.clip_config import ClipTextConfig
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import VAEConfig
from jrl.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from tests.diffusion_toy import SD_SCHEDULE
from tests.models.diffusion.tiny_folder import random_weights, save_tiny_folder
from tests.trainers.diffusion.runs import brightness, draw_prompt
from tests.trainers.diffusion.runs import make as toy_trainer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_folder(tmp_path_factory.mktemp("diffusion") / "tiny")


def make(model, logdir, *, use_lora=True, hook=None, **fields):
    given = {
        "num_epochs": 2,
        "sample_batch_size": 2,
        "train_batch_size": 2,
        "sample_num_steps": 2,
        "train_clip_range": 0.01,
        "train_learning_rate": 1e-2,
        "logdir": str(logdir),
    }
    pipeline = DefaultDDPOStableDiffusionPipeline(model, use_lora=use_lora)
    return DDPOTrainer(DDPOConfig(**{**given, **fields}), brightness, draw_prompt, pipeline, hook)


def images_of(pipeline):
    return pipeline(
        ["a cat"], num_inference_steps=2, guidance_scale=3.0, generator=1, output_type="np", height=8, width=8
    ).images


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """(trainer, images before, frozen weights before)."""
    trainer = make(folder, tmp_path_factory.mktemp("lora"))
    frozen = jax.tree.map(np.array, jax.device_get(trainer.native.frozen))
    before = images_of(trainer.sd_pipeline)
    trainer.train()
    return trainer, before, frozen


class TestAnAdapter:
    def test_it_begins_as_the_model_alone(self, trained, folder):
        _, before, _ = trained
        np.testing.assert_array_equal(before, images_of(DefaultDDPOStableDiffusionPipeline(folder)))

    def test_it_trains_and_the_model_does_not(self, trained):
        trainer, before, frozen = trained
        for old, new in zip(jax.tree.leaves(frozen), jax.tree.leaves(trainer.native.frozen), strict=True):
            np.testing.assert_array_equal(old, new)
        assert np.abs(images_of(trainer.sd_pipeline) - before).max() > 1e-4
        record = trainer.native.history[0]
        assert record["ddpo/pre_update_ratio_max_dev"] < 1e-5 and record["optim/grad_norm"] > 0

    def test_what_is_saved_is_what_was_trained(self, trained, tmp_path):
        trainer, _, _ = trained
        trainer.save_pretrained(tmp_path)
        found = DefaultDDPOStableDiffusionPipeline(tmp_path)
        np.testing.assert_allclose(images_of(found), images_of(trainer.sd_pipeline), atol=1e-6)
        # Merged, it is the same model without an adapter.
        merged = DefaultDDPOStableDiffusionPipeline(tmp_path, use_lora=False)
        np.testing.assert_allclose(images_of(merged), images_of(trainer.sd_pipeline), atol=1e-4)

    def test_one_that_came_with_the_model_trains_on(self, trained, tmp_path):
        trainer, _, _ = trained
        trainer.save_pretrained(tmp_path / "model")
        more = make(tmp_path / "model", tmp_path / "run")
        start = jax.device_get(more.native.params["lora"])
        expected = jax.device_get(trainer.native.params["lora"])
        assert start.keys() == expected.keys()
        for name in expected:
            for leaf in ("A", "B"):
                np.testing.assert_allclose(start[name][leaf], expected[name][leaf], atol=1e-6)
        with pytest.warns(UserWarning, match="trains on with its own rank 4"):
            make(tmp_path / "model", tmp_path / "run", lora_rank=2)

    def test_checkpoints_of_the_pipeline(self, trained, tmp_path):
        trainer, _, _ = trained
        pipeline = trainer.sd_pipeline
        now = jax.tree.map(np.array, jax.device_get(trainer.native.params))
        pipeline.save_checkpoint([None], [now], tmp_path)
        trainer.native.replace_params(jax.tree.map(np.zeros_like, now))
        pipeline.load_checkpoint([None], tmp_path)
        for one, other in zip(jax.tree.leaves(trainer.native.params), jax.tree.leaves(now), strict=True):
            np.testing.assert_array_equal(one, other)


def test_all_options_together(folder, tmp_path):
    """Groups, KL, recomputed densities, skipped steps, another size, remat, running mean, evaluation, warm-up."""
    trainer = make(
        folder,
        tmp_path,
        use_lora=False,
        sample_num_steps=3,
        sample_images_per_prompt=2,
        advantage="group",
        advantage_std="global",
        share_initial_noise=True,
        beta_kl=0.1,
        old_log_probs="recompute",
        train_skip_last_steps=1,
        sample_height=24,
        sample_width=8,
        guidance_rescale=0.5,
        gradient_checkpointing=True,
        ema_decay=0.5,
        eval_every=1,
        eval_prompts=["a cat", "a dog", "a bird"],
        lr_warmup_steps=1,
        async_reward_computation=True,
        train_num_inner_epochs=2,
        negative_prompts="ugly, blurred",
    )
    shapes = []
    trainer.image_samples_callback = lambda data, step, tracker: shapes.append(data[0][0].shape)
    trainer.train()
    native = trainer.native
    assert shapes == [(2, 3, 24, 8)] * 2 and trainer.num_train_timesteps == 2
    records = [record for record in native.history if "iteration" in record]
    assert [record["step"] for record in records] == [4, 8]
    assert all(np.isfinite(record["ddpo/loss"]) and "ddpo/kl" in record for record in records)
    assert sum("evaluation" in record for record in native.history) == 3
    # What is evaluated and saved is the running mean.
    differs = [
        np.abs(np.asarray(one) - np.asarray(other)).max()
        for one, other in zip(
            jax.tree.leaves(native.params), jax.tree.leaves(native.sampling_params), strict=True
        )
    ]
    assert max(differs) > 0
    trainer.save_pretrained(tmp_path / "saved")
    saved = DefaultDDPOStableDiffusionPipeline(tmp_path / "saved", use_lora=False)
    np.testing.assert_allclose(images_of(saved), images_of(trainer.sd_pipeline), atol=1e-5)


@pytest.mark.parametrize(("dtype", "loss_scaling"), [("bfloat16", 0.0), ("float16", 4096.0)])
def test_other_precisions(dtype, loss_scaling, tmp_path):
    """Of the toy: on a CPU, XLA computes not all of the real networks in half precision."""
    sections = {"train": {"compute_dtype": dtype, "epochs": 3}, "method": {"loss_scaling": loss_scaling}}
    trainer = toy_trainer(tmp_path, **sections)
    trainer.learn()
    record = trainer.history[-1]
    assert np.isfinite(record["ddpo/loss"]) and record["optim/skipped_in_a_row"] == 0
    # Where the first factor was too large, a step or two went before it had been halved.
    assert record["optim/skipped_steps"] <= (2 if loss_scaling else 0)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.params)} == {np.dtype("float32")}
    assert (trainer.state.loss_scale is None) == (loss_scaling == 0)
    if loss_scaling:
        with pytest.raises(ValueError, match=r"`method\.loss_scaling` must be positive where"):
            toy_trainer(tmp_path, train={"compute_dtype": dtype})


def test_shapes_of_the_public_tiny_checkpoint(tmp_path):
    """Those that TRL's own test looks for: its checkpoint's architecture, with weights of ours."""
    parts = {
        "unet": UNet(
            UNetConfig(
                sample_size=64,
                block_out_channels=(32, 64),
                layers_per_block=2,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=32,
                attention_head_dim=8,
            )
        ),
        "vae": VAE(
            VAEConfig(
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                block_out_channels=(32, 64),
            )
        ),
        "text_encoder": ClipText(
            ClipTextConfig(
                vocab_size=1000,
                hidden_size=32,
                intermediate_size=37,
                num_hidden_layers=5,
                num_attention_heads=4,
                max_position_embeddings=77,
            )
        ),
    }
    weights = {name: random_weights(part) for name, part in parts.items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(weights["unet"])) == 1_427_012
    model = DiffusionModel(
        name="checkpoint D",
        **parts,
        tokenizer=lambda texts: np.full((len(texts), 77), 7, np.int32),
        schedule=SD_SCHEDULE,
        weights=weights,
        sample_size=(64, 64),
    )
    trainer = make(model, tmp_path, num_epochs=1, sample_batch_size=1, train_batch_size=1)
    samples, pairs = trainer._generate_samples(1, 2)
    found = samples[0]
    assert found["latents"].shape == found["next_latents"].shape == (2, 2, 4, 64, 64)
    assert found["prompt_embeds"].shape == found["negative_prompt_embeds"].shape == (2, 77, 32)
    assert pairs[0][0].shape == (2, 3, 128, 128)
    loss, approx_kl, clipfrac = trainer.calculate_loss(
        found["latents"][:1, 0],
        found["timesteps"][:1, 0],
        found["next_latents"][:1, 0],
        found["log_probs"][:1, 0],
        np.array([1.0]),
        np.concatenate([found["negative_prompt_embeds"][:1], found["prompt_embeds"][:1]]),
    )
    assert {np.shape(x) for x in (loss, approx_kl, clipfrac)} == {()}
    assert float(loss) == pytest.approx(-1.0, abs=1e-4)


SCRIPT = """
import sys
for name in ("torch", "diffusers", "accelerate", "peft"):
    sys.modules[name] = None  # an import of it fails
import jrl
from tests.trainers.diffusion.runs import brightness, draw_prompt, toy_model
config = jrl.DDPOConfig(num_epochs=1, sample_batch_size=2, sample_num_steps=2, logdir=sys.argv[2])
pipeline = jrl.DefaultDDPOStableDiffusionPipeline(toy_model(), use_lora=False)
trainer = jrl.DDPOTrainer(config, brightness, draw_prompt, pipeline)
trainer.train()
trainer.save_pretrained(sys.argv[2] + "/saved")
assert not {"transformers"} & sys.modules.keys(), "transformers was imported"
pipeline = jrl.DefaultDDPOStableDiffusionPipeline(sys.argv[1])
assert pipeline.tokenizer(["a cat"]).shape == (1, 16)
print("done")
"""


def test_without_torch_and_diffusers(folder, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("done")
