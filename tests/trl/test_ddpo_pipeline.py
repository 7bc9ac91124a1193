# SPDX-License-Identifier: Apache-2.0
"""TRL's face of DDPO around a run: weights that a script puts in or takes out, precision, and what is compiled once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.trainers.diffusion.ddpo import Epoch
from jrl.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from jrl.trl.ddpo_native import native_config
from jrl.typing import Trajectories
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.trainers.diffusion.runs import brightness, draw_prompt, toy_model
from tests.trl.test_ddpo import config_of, make


def equal(one, other):
    return all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A trainer that has not trained, without TF32."""
    return make(tmp_path_factory.mktemp("fresh"), allow_tf32=False, eval_prompts=["red square"])


def test_a_checkpoint_read_before_the_trainer_is_made_counts(tmp_path):
    other = toy_model(7)
    other.writer({"unet": other.weights["unet"]}, None)(tmp_path)
    pipeline = DefaultDDPOStableDiffusionPipeline(toy_model(), use_lora=False)
    pipeline.load_checkpoint([None], tmp_path)
    assert equal(pipeline.parts().params, {"unet": other.weights["unet"]})
    trainer = DDPOTrainer(config_of(tmp_path / "run"), brightness, draw_prompt, pipeline)
    assert equal(trainer.native.params, {"unet": other.weights["unet"]})


@pytest.mark.slow
def test_so_does_an_adapters(tmp_path):
    model = load_diffusion_model(save_tiny_folder(tmp_path / "tiny"))
    lora = model.unet.bind_lora(LoraConfig(r=2, lora_alpha=2.0, target_modules=["to_q"]))
    shapes = jax.eval_shape(lora.init, jax.random.key(0), model.weights["unet"])
    adapters = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.25, np.float32), shapes)
    model.writer({"lora": adapters}, lora)(tmp_path)
    pipeline = DefaultDDPOStableDiffusionPipeline(model)
    pipeline.load_checkpoint([None], tmp_path)
    assert equal(pipeline.model.found_lora.adapters, adapters)


def test_layers_that_were_asked_for_outlive_the_next_epoch(tmp_path):
    trainer = make(tmp_path)
    given = trainer.sd_pipeline.get_trainable_layers()
    before = jax.device_get(given)
    for leaf in jax.tree.leaves(trainer.native.params):
        leaf.delete()  # as the update does with what it is given
    assert equal(given, before)


def test_rewards_of_a_scripts_own_samples(fresh):
    """As TRL's scripts do, before any epoch."""
    pair = [np.full((2, 3, 8, 8), 0.5, np.float32), ("a", "b"), ({}, {})]
    (rewards,), _ = fresh.compute_rewards([pair])
    assert rewards.tolist() == [0.5, 0.5]


def test_every_call_computes_at_the_precision_that_was_asked_for(fresh, monkeypatch):
    seen = []

    def watch(owner, name):
        def call(*arguments, **keywords):
            seen.append(jax.config.jax_default_matmul_precision)
            raise InterruptedError

        monkeypatch.setitem(vars(owner), name, call)

    rows, context = np.zeros((2, 4, 4, 4), np.float32), np.zeros((4, 3, 8), np.float32)
    watch(fresh, "_objective")
    watch(fresh.sd_pipeline, "_call")
    watch(fresh.native, "make_sampler")  # of an evaluation
    with jax.default_matmul_precision("default"):
        for call in (
            lambda: fresh.calculate_loss(rows, np.array([1, 1]), rows, np.zeros(2), np.ones(2), context),
            lambda: fresh.sd_pipeline("a cat"),
            lambda: fresh.native.evaluate(),
        ):
            with pytest.raises(InterruptedError):
                call()
    assert seen == ["highest"] * 3


def test_samples_are_compiled_once(fresh, monkeypatch):
    seen = []

    class Sampler:
        def __init__(self, rows, eta=None):
            seen.append(rows)

        def negative(self, frozen):
            return np.zeros((1, 3, 8))

        def tokenize(self, texts):
            return np.zeros((len(texts), 3), np.int32)

        def __call__(self, params, frozen, negative, texts, key, **numbers):
            seen.append(jax.config.jax_default_matmul_precision)
            found = Trajectories(np.zeros((1, 3, 4, 4, 4)), np.zeros((1, 2)), np.zeros((1, 3, 8)))
            return found, np.zeros((1, 8, 8, 3))

    monkeypatch.setattr(fresh.native, "make_sampler", Sampler)
    with jax.default_matmul_precision("default"):
        for _ in range(2):
            fresh._generate_samples(1, 1)
    assert seen == [1, "highest", "highest"]


def test_decoder_and_encoder_of_a_call_are_compiled_once(monkeypatch):
    pipeline, traced = DefaultDDPOStableDiffusionPipeline(toy_model(), use_lora=False), []
    parts = pipeline.parts()

    def noted(name):
        inner = getattr(parts.functions, name)

        def call(*arguments):
            traced.append((name, isinstance(arguments[-1], jax.core.Tracer)))
            return inner(*arguments)

        return call

    functions = replace(parts.functions, encode=noted("encode"), decode=noted("decode"))
    pipeline._parts = parts._replace(functions=functions)
    sampled = Trajectories(jnp.zeros((1, 2, 4, 4, 4)), jnp.zeros((1, 1)), jnp.zeros((1, 3, 8)))
    monkeypatch.setattr(pipeline._call, "_program", lambda *_: lambda *_: sampled)
    for seed in (1, 2):
        pipeline("a cat", num_inference_steps=1, generator=seed, output_type="np")
    assert sorted(traced) == [("decode", True), ("encode", True)]


def test_the_hook_is_told_the_step_that_was_passed(tmp_path, monkeypatch):
    steps = []
    trainer = make(tmp_path, hook=lambda data, global_step, tracker: steps.append(global_step))

    def one_epoch(epoch, **_):
        trainer.native.image_samples_hook([], epoch * 4, None)
        return Epoch({}, {}, [])

    monkeypatch.setattr(trainer.native, "one_epoch", one_epoch)
    assert trainer.step(3, 100) == 104 and steps == [100]


def test_rows_of_embeds_are_counted(fresh):
    rows = np.zeros((2, 4, 4, 4), np.float32)
    with pytest.raises(
        ValueError, match="`embeds` must have 4 rows for 2 timesteps where `train_cfg` is True, got 2"
    ):
        fresh.calculate_loss(rows, np.array([1, 1]), rows, np.zeros(2), np.ones(2), np.zeros((2, 3, 8)))


def test_the_loss_is_the_learners(fresh):
    ratio, advantages = jnp.array([0.5, 1.0, 1.5]), jnp.array([-1.0, 2.0, -3.0])
    found = float(fresh.loss(advantages, 0.2, ratio))
    assert found == pytest.approx((0.8 - 2.0 + 4.5) / 3, rel=1e-6)


def test_errors_name_the_fields(tmp_path):
    with pytest.raises(ValueError, match=r"`sample_num_steps` must be in 1\.\.1000"):
        make(tmp_path, sample_num_steps=1001)
    with pytest.raises(ValueError, match="`sample_height` must be a positive multiple of 2"):
        make(tmp_path, sample_height=7)


class TestTheConfiguration:
    def test_tracker_fields_without_effect_are_said_aloud(self):
        with pytest.warns(UserWarning, match="DDPOConfig.tracker_kwargs: dir"):
            DDPOConfig(tracker_kwargs={"wandb": {"entity": "we", "dir": "there"}})

    def test_none_is_no_mapping_and_a_text_is_one(self):
        config = DDPOConfig(
            tracker_kwargs=None,
            project_kwargs=None,
            accelerator_kwargs=None,
            lora_targets="to_q",
            eval_prompts="a cat",
        )
        assert (config.tracker_kwargs, config.project_kwargs, config.accelerator_kwargs) == ({}, {}, {})
        assert config.lora_targets == ["to_q"] and config.eval_prompts == ["a cat"]

    def test_the_experiment_groups_its_runs(self):
        given = {"exp_name": "first"}
        assert native_config(DDPOConfig(**given), model="sd", use_lora=True).train.group_name == "first"
        given["tracker_kwargs"] = {"wandb": {"init_kwargs": {"group": "second"}}}
        assert native_config(DDPOConfig(**given), model="sd", use_lora=True).train.group_name == "second"
