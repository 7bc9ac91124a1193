# SPDX-License-Identifier: Apache-2.0
"""Planned programs are the programs of a run: the same functions, called with arrays of the planned shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jrl
from jrl.api import prepare
from jrl.models.diffusion import DiffusionModel
from jrl.trainers.config.method import footprint_of
from jrl.trainers.config.registry import get_trainer
from jrl.trainers.diffusion import DDPOTrainer
from jrl.trainers.loading.setup import mesh_of
from jrl.trainers.plan import model_part as model_part_module
from jrl.trainers.plan.model_part import model_part
from jrl.trainers.programs import Program
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.tiny import EOS_ID, PAD_ID
from tests.trainers.diffusion.runs import brightness, ddpo_config, draw_prompt, toy_model
from tests.trainers.diffusion.test_train_reward_gradient import bright, run_config
from tests.trainers.runs import (
    COMPARISONS,
    PREFERENCES,
    REWARDED,
    count_vowels,
    dpo_config,
    grpo_config,
    ilql_config,
    ppo_config,
    reward_config,
    rft_config,
    sft_config,
)

LENGTH = 16
PROMPTS = ["the cat!", "a dog is", "well, we", "so it go", "the rain", "one more"]
"""As many letters, which are tokens, as `LENGTH` leaves beside a completion of 8."""
SAMPLING = {"max_new_tokens": 8, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
SAMPLES = ["the cat sat dow", "a dog ran off i", "so it goes on o", "rain falls here"]


def planned(config: jrl.TRLConfig) -> dict[str, Program]:
    """The programs of a run, of which nothing is computed: its devices might be absent."""
    mesh, footprint = mesh_of(config), footprint_of(config)
    assert footprint is not None
    with jax.set_mesh(mesh), jax.transfer_guard("disallow_explicit"):
        model = model_part(config, mesh.abstract_mesh, footprint, attends_as_configured=True)
        programs = get_trainer(config.train.trainer).programs(config, model, mesh)
    return {program.name: program for program in programs}


def text(config: jrl.TRLConfig, program: Program, function: Any = None) -> str:
    with jax.set_mesh(mesh_of(config)):
        lowered: str = (function or program.function).lower(*program.arguments).as_text()
    return lowered


def signature(arguments: Any) -> dict[str, Any]:
    """Shape and dtype of every array, by its path."""
    found = jax.tree_util.tree_leaves_with_path(arguments)
    return {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype)) for path, leaf in found}


class Recorder:
    """A program that notes what it is called with; it is not run where a result is given."""

    def __init__(self, function: Any, result: Any = None) -> None:
        self.function, self.result, self.signature = function, result, dict[str, Any]()

    def __call__(self, *arguments: Any) -> Any:
        self.signature = signature(arguments)
        return self.function(*arguments) if self.result is None else self.result


def config_of(
    make: Any, checkpoint: str, tmp_path: Path, *, is_whole: bool = False, **method: Any
) -> jrl.TRLConfig:
    """A run of one iteration, which ends behind its first step or, if it is whole, behind its last."""
    sizes = {"seq_length": LENGTH, "epochs": 1, "total_steps": 100 if is_whole else 1}
    config: jrl.TRLConfig = make(checkpoint, tmp_path / "run", train=sizes).evolve(method=method)
    return config


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (ppo_config, {"ppo_epochs": 1, "gen_kwargs": SAMPLING, "is_whole": True}),
        (grpo_config, {"num_iterations": 2, "beta": 0.1, "gen_kwargs": SAMPLING}),
        (grpo_config, {"num_iterations": 2, "beta": 0.1, "kl_estimator": "full", "gen_kwargs": SAMPLING}),
    ],
    ids=["ppo", "grpo", "grpo that reads its reference"],
)
def test_an_online_run_calls_what_was_planned(
    make: Any, method: dict[str, Any], checkpoint: str, tmp_path: Path
) -> None:
    config = config_of(make, checkpoint, tmp_path, **method)
    programs = planned(config)
    trainer = prepare(config=config, reward_fn=count_vowels, prompts=PROMPTS)
    collect = trainer.collect
    calls = {"score": Recorder(collect._join_and_score), "update": Recorder(trainer.update)}
    collect._join_and_score, trainer.update = calls["score"], calls["update"]
    trainer.learn()
    settings, rows = trainer.rollout_settings(), config.method.chunk_size
    with jax.set_mesh(trainer.mesh):
        sample = trainer.sampler.program(settings, rows, config.method.num_generations)
    assert text(config, programs["sample"]) == text(config, programs["sample"], sample)
    for name, call in calls.items():
        assert call.signature == signature(programs[name].arguments)
        assert text(config, programs[name]) == text(config, programs[name], call.function)


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (sft_config, {"samples": SAMPLES}),
        (dpo_config, {"samples": PREFERENCES}),
        (ilql_config, {"samples": [text for text, _ in REWARDED], "rewards": [r for _, r in REWARDED]}),
        (rft_config, {"prompts": PROMPTS, "reward_fn": count_vowels}),
        (reward_config, {"samples": COMPARISONS}),
    ],
    ids=["sft", "dpo", "ilql", "rft", "reward model"],
)
def test_an_offline_run_compiles_what_was_planned(
    make: Any, data: dict[str, Any], checkpoint: str, tmp_path: Path
) -> None:
    config = config_of(make, checkpoint, tmp_path)
    update = planned(config)["update"]
    trainer = prepare(config=config, **data)
    assert text(config, update) == text(config, update, trainer.update)
    state, frozen = signature(trainer.state), signature(trainer.frozen)
    assert (state, frozen) == (signature(update.arguments[0]), signature(update.arguments[1]))


@pytest.mark.parametrize(
    ("make", "samples"), [(sft_config, SAMPLES), (reward_config, COMPARISONS)], ids=["sft", "reward model"]
)
def test_the_batches_of_samples_have_the_planned_shapes(
    make: Any, samples: list[Any], checkpoint: str, tmp_path: Path
) -> None:
    config = config_of(make, checkpoint, tmp_path)
    update = planned(config)["update"]
    trainer = prepare(config=config, samples=samples)
    found = signature(trainer.place(trainer.samples.batch(0, config.train.batch_size)))
    assert found == signature(update.arguments[2])


def test_an_evaluation_of_a_reward_model_calls_what_was_planned(checkpoint: str, tmp_path: Path) -> None:
    config = config_of(reward_config, checkpoint, tmp_path)
    evaluate = planned(config)["evaluate"]
    trainer = prepare(config=config, samples=COMPARISONS)
    call = trainer._measure = Recorder(trainer._measure, {})
    trainer.measure_samples(trainer.samples)
    assert call.signature == signature(evaluate.arguments)
    assert text(config, evaluate) == text(config, evaluate, call.function)


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "init_lora_weights": "gaussian"}


@pytest.mark.parametrize("make", [sft_config, reward_config, ddpo_config])
def test_an_adapter_is_planned_of_shapes(make: Any, checkpoint: str, tmp_path: Path) -> None:
    if make is ddpo_config:
        folder = save_tiny_folder(tmp_path / "model")
        config = ddpo_config(tmp_path / "run", model={"model_path": str(folder)})
    else:
        config = config_of(make, checkpoint, tmp_path)
    state = planned(config.evolve(model={"peft_config": ADAPTER}))["update"].arguments[0]
    assert any("lora" in path for path in signature(state))


def assert_a_diffusion_run_calls_what_was_planned(
    config: jrl.TRLConfig, model: DiffusionModel | None = None
) -> None:
    """Nothing is sampled or learned: each call gets its arguments, and a sampling call answers with zeros."""
    programs = planned(config)
    trainer = DDPOTrainer(config, reward_function=brightness, prompt_function=draw_prompt, model=model)
    sampler, images = trainer.collect.sampler, programs["sample"].result()
    calls = {
        "sample": Recorder(sampler._sample, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), images)),
        "update": Recorder(trainer.update, (trainer.state, {})),
    }
    sampler._sample, trainer.update = calls["sample"], calls["update"]
    trainer.learn()
    for name, call in calls.items():
        assert call.signature == signature(programs[name].arguments)
        assert text(config, programs[name]) == text(config, programs[name], call.function)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_diffusion_run_calls_what_was_planned(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = replace(toy_model(), weights=jax.eval_shape(lambda: dict(toy_model().weights)))
    monkeypatch.setattr(model_part_module, "describe_diffusion_model", lambda path: shapes)
    sizes = {"epochs": 1, "total_steps": 100 if is_whole else 1, "eval_interval": 0}
    assert_a_diffusion_run_calls_what_was_planned(ddpo_config(tmp_path, train=sizes), toy_model())


def test_a_reward_gradient_calls_what_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reward that stands in a plan: the mean of all pixels."""
    shapes = replace(toy_model(), weights=jax.eval_shape(lambda: dict(toy_model().weights)))
    monkeypatch.setattr(model_part_module, "describe_diffusion_model", lambda path: shapes)
    config = run_config(tmp_path, train={"total_steps": 1, "eval_interval": 0})
    programs = planned(config)
    trainer = jrl.RewardGradientTrainer(
        config, reward_function=bright, prompt_function=draw_prompt, model=toy_model()
    )
    sampler, images = trainer.sampler, programs["sample"].result()
    calls = {
        "sample": Recorder(sampler._sample, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), images)),
        "update": Recorder(trainer.update, (trainer.state, {})),
    }
    sampler._sample, trainer.update = calls["sample"], calls["update"]
    trainer.learn()
    for name, call in calls.items():
        assert call.signature == signature(programs[name].arguments)
        assert text(config, programs[name]) == text(config, programs[name], call.function)


@pytest.mark.slow
def test_a_run_of_stable_diffusion_calls_what_was_planned(tmp_path: Path) -> None:
    config = ddpo_config(
        tmp_path / "run",
        model={"model_path": str(save_tiny_folder(tmp_path / "model")), "peft_config": ADAPTER},
        train={"epochs": 1, "eval_interval": 0},
        method={"sample_num_steps": 2, "beta_kl": 0.1, "ema_decay": 0.9},
    )
    assert_a_diffusion_run_calls_what_was_planned(config)
