# SPDX-License-Identifier: Apache-2.0
"""TRL's face of DDPO on the toy denoiser: its own tests, ported, and what its users met."""

import dataclasses
import sys
import warnings

import jax
import numpy as np
import pytest

from jrl.rollout.rewards import RewardError
from jrl.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from jrl.trl.ddpo_native import native_config
from tests.trainers.diffusion.runs import brightness, draw_prompt, toy_model


def config_of(folder, **fields):
    """2 samples an epoch, as TRL's own test has it."""
    given = {
        "num_epochs": 2,
        "train_gradient_accumulation_steps": 1,
        "per_prompt_stat_tracking_buffer_size": 32,
        "sample_num_batches_per_epoch": 2,
        "sample_batch_size": 2,
        "sample_num_steps": 2,
        "save_freq": 1000000,
        "train_clip_range": 0.1,
        "logdir": str(folder),
    }
    return DDPOConfig(**{**given, **fields})


def make(folder, *, trainer_class=DDPOTrainer, hook=None, reward=brightness, **fields):
    pipeline = DefaultDDPOStableDiffusionPipeline(toy_model(), use_lora=False)
    return trainer_class(config_of(folder, **fields), reward, draw_prompt, pipeline, hook)


class Counting(DDPOTrainer):
    """Overrides what may be overridden."""

    steps = 0

    def step(self, epoch, global_step):
        self.steps += 1
        return super().step(epoch, global_step)

    def compute_rewards(self, prompt_image_pairs, is_async=False):
        assert len(prompt_image_pairs) == 2
        rewards = [-brightness(*batch)[0] for batch in reversed(prompt_image_pairs)]
        return tuple(reversed(rewards)), ({},) * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two epochs of a subclass."""
    found = make(tmp_path_factory.mktemp("trained"), trainer_class=Counting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.train()
    return found


class TestTheTrainer:
    def test_it_runs_to_its_end_through_the_overrides(self, trained):
        records = [record for record in trained.native.history if "iteration" in record]
        assert trained.steps == 2 and [record["step"] for record in records] == [4, 8]
        assert all(record["reward/mean"] < 0 for record in records)
        assert all(np.isfinite(record["ddpo/loss"]) for record in records)
        assert trained.num_train_timesteps == 2

    def test_loss(self, trained):
        """TRL's own test."""
        assert float(trained.loss(np.array([-1.0]), 0.0001, np.array([1.0]))) == 1.0
        assert float(trained.loss(np.array([1.0]), 0.1, np.array([2.0]))) == pytest.approx(-1.1)

    def test_samples(self, trained):
        """TRL's own test: counts and shapes."""
        samples, pairs = trained._generate_samples(1, 2)
        assert len(samples) == len(pairs) == 1
        found = samples[0]
        assert set(found) == {
            "prompt_ids",
            "prompt_embeds",
            "negative_prompt_embeds",
            "timesteps",
            "latents",
            "next_latents",
            "log_probs",
        }
        assert found["latents"].shape == found["next_latents"].shape == (2, 2, 4, 4, 4)
        assert found["timesteps"].tolist() == [[501, 1]] * 2 and found["log_probs"].shape == (2, 2)
        np.testing.assert_array_equal(found["latents"][:, 1], found["next_latents"][:, 0])
        images, prompts, metadata = pairs[0]
        assert images.shape == (2, 3, 8, 8) and len(prompts) == len(metadata) == 2
        others, _ = trained._generate_samples(1, 2)
        assert (others[0]["latents"] != found["latents"]).any()

    def test_calculate_loss(self, trained):
        """TRL's own test, and more: straight after sampling the ratio is 1, so the loss is minus the advantage."""
        (found,), _ = trained._generate_samples(1, 2)
        for column in (0, 1):
            loss, approx_kl, clipfrac = trained.calculate_loss(
                found["latents"][:, column],
                found["timesteps"][:, column],
                found["next_latents"][:, column],
                found["log_probs"][:, column],
                np.array([1.0, -3.0]),
                np.concatenate([found["negative_prompt_embeds"], found["prompt_embeds"]]),
            )
            assert float(loss) == pytest.approx(1.0, abs=1e-4)
            assert float(approx_kl) < 1e-10 and float(clipfrac) == 0
        with pytest.raises(ValueError, match="`timesteps` must be among those sampled at"):
            trained.calculate_loss(
                found["latents"][:, 0],
                np.array([500, 1]),
                found["next_latents"][:, 0],
                found["log_probs"][:, 0],
                np.ones(2),
                np.concatenate([found["negative_prompt_embeds"], found["prompt_embeds"]]),
            )

    def test_the_pipeline_has_what_was_trained(self, trained, tmp_path):
        pipeline = trained.sd_pipeline
        now = jax.device_get(trained.native.params)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), pipeline.get_trainable_layers(), now))
        trained.save_pretrained(tmp_path)
        assert (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").is_file()
        assert "ddpo" in (tmp_path / "README.md").read_text()
        trained.create_model_card("A title")
        assert "# A title" in (trained.native.run_dir / "README.md").read_text()
        before = jax.tree.map(np.array, now)
        pipeline.save_checkpoint([None], [], tmp_path)
        trained.native.replace_params(jax.tree.map(np.zeros_like, now))
        pipeline.load_checkpoint([None], tmp_path)
        for one, other in zip(jax.tree.leaves(trained.native.params), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize(
        "name",
        [
            "loss",
            "calculate_loss",
            "_generate_samples",
            "_train_batched_samples",
            "_setup_optimizer",
            "_save_model_hook",
        ],
    )
    def test_what_nothing_calls_is_not_overridden(self, name):
        cls = type("Other", (DDPOTrainer,), {name: lambda self, *args: 0.0})
        with pytest.raises(
            TypeError, match=rf"Other must not override `{name}`: nothing here calls it.*\. \S"
        ):
            cls(None, print, print, None)


@pytest.fixture(scope="module")
def called():
    """(a pipeline, what it makes of two prompts)."""
    pipeline = DefaultDDPOStableDiffusionPipeline(toy_model(), use_lora=False)
    found = pipeline(["a cat", "a dog"], num_inference_steps=2, eta=1.0, generator=1, output_type="np")
    return pipeline, found


class TestThePipeline:
    def test_its_call(self, called):
        pipeline, found = called
        assert found.images.shape == (2, 3, 8, 8)
        assert [x.shape for x in found.latents] == [(2, 4, 4, 4)] * 3
        assert [x.shape for x in found.log_probs] == [(2,)] * 2
        again = pipeline(["a cat", "a dog"], num_inference_steps=2, eta=1.0, generator=1, return_dict=False)
        np.testing.assert_array_equal(again[1][-1], found.latents[-1])
        assert again[0][0].size == (8, 8)

    def test_a_step_has_the_density_of_the_call(self, called):
        """The last step of the loop, taken again from its own result."""
        pipeline, found = called
        pipeline.scheduler.set_timesteps(2)
        output = np.zeros_like(found.latents[0])
        step = pipeline.scheduler_step(output, 501, found.latents[0], eta=1.0, generator=3)
        again = pipeline.scheduler_step(output, 501, found.latents[0], eta=1.0, prev_sample=step.latents)
        np.testing.assert_allclose(again.log_probs, step.log_probs, atol=1e-6)
        with pytest.raises(ValueError, match="`prev_sample` must be None"):
            pipeline.scheduler_step(output, 501, found.latents[0], generator=3, prev_sample=step.latents)
        with pytest.raises(ValueError, match=r"`timestep` must be one of the scheduler's \[501, 1\]"):
            pipeline.scheduler_step(output, 500, found.latents[0])

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"callback": print}, "`callback` must be None"),
            ({"negative_prompt": ["a", "b"]}, "`negative_prompt` must be the same in all rows"),
            ({"latents": np.zeros((2, 4, 4, 4))}, r"`latents` must have the shape \(1, 4, 4, 4\)"),
            ({"generator": "x"}, "`generator` must be a seed"),
            ({"prompt": None}, "`prompt` must be given"),
            ({"height": 3}, "`height` must be a positive multiple"),
        ],
    )
    def test_what_it_refuses(self, called, arguments, reason):
        with pytest.raises(ValueError, match=reason):
            called[0](**{"prompt": "a cat", "num_inference_steps": 2, **arguments})

    def test_its_parts(self, called):
        pipeline, _ = called
        assert pipeline.unet.config.in_channels == 4 and pipeline.vae.factor == 2
        assert pipeline.scheduler.config["steps_offset"] == 1
        pipeline.set_progress_bar_config(disable=True)
        with pipeline.autocast():
            assert pipeline.tokenizer(["a"]).shape == (1, 3) and pipeline.text_encoder is not None


class TestTheConfiguration:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            (
                {"sample_batch_size": 1, "train_batch_size": 2},
                "`sample_batch_size` must be at least `train_batch_size` = 2",
            ),
            (
                {"sample_batch_size": 3, "train_batch_size": 2},
                "`sample_batch_size` must be divisible by `train_batch_size`",
            ),
            ({"train_gradient_accumulation_steps": 3}, "is divisible by `train_batch_size`"),
            ({"train_use_8bit_adam": True}, r"must be False: train an adapter \(`use_lora=True`\)"),
            ({"push_to_hub": True}, "must be False: training uploads nothing by itself"),
            ({"mixed_precision": "fp8"}, "`mixed_precision` must be 'no', 'fp16', 'bf16' or None"),
            ({"log_with": "comet"}, "`log_with` must be one of"),
            ({"negative_prompts": ["a", "b"]}, "`negative_prompts` must be one text"),
            ({"project_kwargs": {"dir": "x"}}, "`project_kwargs` must be a mapping of"),
            ({"num_epochs": 0}, "`num_epochs` must be at least 1"),
        ],
    )
    def test_what_it_refuses_at_once(self, fields, reason):
        with pytest.raises(ValueError, match=reason):
            DDPOConfig(**fields)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"sample_eta": 0.0}, "`sample_eta` must be in"),
            (
                {"sample_num_steps": 5, "train_timestep_fraction": 0.1},
                "`train_timestep_fraction` must be so large",
            ),
            (
                {"per_prompt_stat_tracking": True, "per_prompt_stat_tracking_min_count": 33},
                "`per_prompt_stat_tracking_min_count` must be at most",
            ),
            ({"advantage": "best"}, "`advantage` must be one of"),
            ({"train_skip_last_steps": 2}, "`train_skip_last_steps` must be in"),
        ],
    )
    def test_what_the_trainer_refuses(self, fields, reason, tmp_path):
        with pytest.raises(ValueError, match=reason):
            make(tmp_path, **fields)

    def test_what_it_becomes(self):
        config = DDPOConfig(
            run_name="first",
            project_kwargs={"project_dir": "there", "total_limit": 3, "logging_dir": "logs"},
            tracker_kwargs={"wandb": {"entity": "we", "tags": ["x"]}},
            num_epochs=10,
            save_freq=2,
            eval_every=5,
            sample_batch_size=8,
            sample_num_batches_per_epoch=4,
            train_batch_size=4,
            train_gradient_accumulation_steps=2,
            train_num_inner_epochs=2,
            lr_warmup_steps=7,
            resume_from="there/checkpoint_8",
            lora_rank=8,
            negative_prompts=["ugly, blurred"],
        )
        found = native_config(config, model="sd", use_lora=True)
        found.validate()
        train = found.train
        assert (train.batch_size, train.minibatch_size, train.epochs, train.total_steps) == (8, 4, 10, 80)
        assert (train.checkpoint_interval, train.eval_interval, train.keep_checkpoints) == (16, 40, 3)
        assert (train.checkpoint_dir, train.logging_dir, train.run_name) == ("there", "logs", "first")
        assert (train.entity_name, train.tags, train.resume_from_checkpoint) == (
            "we",
            ["x"],
            "there/checkpoint_8",
        )
        assert train.compute_dtype == "float32" and train.seed == 42
        assert found.method.sample_batch_size == 8 and found.method.negative_prompts == "ugly, blurred"
        assert found.model.peft_config["r"] == 8 and found.scheduler.kwargs == {"warmup_steps": 7}
        assert native_config(config, model="sd", use_lora=False).model.peft_config is None

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_half_precision_is_float32_on_a_cpu(self, precision):
        with pytest.warns(UserWarning, match=f"`mixed_precision` {precision} computes in float32 on a CPU"):
            found = native_config(DDPOConfig(mixed_precision=precision), model="sd", use_lora=True)
        assert found.train.compute_dtype == "float32" and found.method.loss_scaling == 0

    def test_half_precision_scales_the_loss_elsewhere(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        found = native_config(DDPOConfig(mixed_precision="fp16"), model="sd", use_lora=True)
        found.validate()
        assert found.train.compute_dtype == "float16" and found.method.loss_scaling > 1
        assert found.train.max_bad_steps == 15
        for precision, dtype in ((None, "bfloat16"), ("bf16", "bfloat16"), ("no", "float32")):
            config = DDPOConfig(mixed_precision=precision)
            assert native_config(config, model="sd", use_lora=True).train.compute_dtype == dtype

    @pytest.mark.parametrize(
        ("script", "name"), [("/a/run.py", "run"), ("/a/train", "train"), ("jrl", "jrl")]
    )
    def test_its_name_loses_nothing(self, script, name, monkeypatch):
        monkeypatch.setattr(sys, "argv", [script])
        assert DDPOConfig().exp_name == name

    def test_it_is_a_flat_dictionary(self):
        config = DDPOConfig()
        found = config.to_dict()
        assert list(found) == [entry.name for entry in dataclasses.fields(config)]
        assert DDPOConfig(**found) == config
        assert config.MEANINGS.keys() == found.keys()


def test_rewards_of_an_override_are_checked(trained, monkeypatch):
    monkeypatch.setattr(trained, "compute_rewards", lambda *_: ((np.zeros(2),), ({},)))
    with pytest.raises(RewardError, match="must return one entry a sampling batch, got 1 and 1 for 2"):
        trained.step(0, 0)
