# SPDX-License-Identifier: Apache-2.0
"""Plans of models that are not language models: what they hold is what a trainer's arrays take."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from transformers import BertConfig, GPT2Config

import jrl
from jrl.api import prepare
from jrl.cli import main
from jrl.learners.reward_gradient import reward_gradient_loss
from jrl.mesh import abstract_mesh
from jrl.models.cost import device_bytes, format_bytes, results_of_rows
from jrl.trainers.config.method import Footprint
from jrl.trainers.diffusion import DDPOTrainer
from jrl.trainers.loading.setup import mesh_of
from jrl.trainers.plan import model_part as model_part_module
from jrl.trainers.plan.run_plan import RunPlan, plan_run
from jrl.typing import Trajectories
from tests.diffusion_toy import LATENT, PROMPT, SD_SCHEDULE, WIDTH, toy_denoiser, toy_frozen, toy_params
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.trainers.diffusion.runs import STEPS, brightness, ddpo_config, draw_prompt, toy_model
from tests.trainers.diffusion.test_train_reward_gradient import bright, run_config
from tests.trainers.runs import COMPARISONS, reward_config

ONE = abstract_mesh(num_devices=1)
SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
DECODER = GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)
ENCODER = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=128
)
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "init_lora_weights": "gaussian"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_folder(tmp_path_factory.mktemp("plan") / "diffusion"))


def holds(plan: RunPlan, train: Any, frozen: Any) -> None:
    assert plan.held["parameters that train"] == device_bytes(train.params)
    assert plan.held["optimizer"] == device_bytes(train.opt_state)
    assert plan.held["frozen parameters"] == device_bytes(frozen)
    assert plan.held["reference's own parameters"] == 0


@pytest.mark.parametrize("layers", [-1, 1], ids=["all layers", "the last layer"])
def test_a_reward_model_holds_what_its_trainer_holds(layers: int, checkpoint: str, tmp_path: Path) -> None:
    config = reward_config(checkpoint, tmp_path, model={"num_layers_unfrozen": layers})
    trainer = prepare(config=config, samples=COMPARISONS)
    holds(plan_run(config, ONE), trainer.state, trainer.frozen)


def test_a_decoder_that_scores_is_counted_as_a_language_model_without_logits() -> None:
    pairs = jrl.default_reward_config().evolve(
        model={"model_path": DECODER}, train={"batch_size": 4, "minibatch_size": 2, "seq_length": 16}
    )
    texts = jrl.default_sft_config().evolve(
        model={"model_path": DECODER}, train={"batch_size": 8, "minibatch_size": 4, "seq_length": 16}
    )
    mesh = abstract_mesh(fsdp=2, num_devices=2)
    scored, written = plan_run(pairs, mesh), plan_run(texts, mesh)
    assert scored.is_whole and scored.microbatches == written.microbatches == 2
    logits, layer, kept = "while it reads logits", "in a layer", "activations of a microbatch"
    assert set(written.learning) - set(scored.learning) == {logits, "in the gradient of logits"}
    # As many rows: two of each pair.
    assert scored.learning[layer][kept] == written.learning[layer][kept] > 0


def test_an_encoder_that_scores_has_a_plan_of_its_arrays() -> None:
    config = jrl.default_reward_config().evolve(
        model={"model_path": ENCODER}, train={"batch_size": 4, "seq_length": 16}
    )
    plan = plan_run(config, ONE)
    # Ids and masks of two texts, a margin and a flag for each pair; a key.
    assert plan.learning["of what is counted"]["batch"] == 4 * (2 * 16 * (4 + 1) + 4 + 1) + 8
    assert not plan.is_whole and plan.sampling == {}
    assert "memory of each device, at least" in plan.table()
    assert "may fit into 1.0 GiB" in plan.table(1 << 30) and "does not fit" in plan.table(1 << 10)


@pytest.mark.parametrize(
    ("adapter", "method"),
    [(ADAPTER, {}), (ADAPTER, {"beta_kl": 0.1}), (None, {"beta_kl": 0.1, "ema_decay": 0.9})],
    ids=["adapter", "adapter and reference", "whole"],
)
def test_a_diffusion_model_holds_what_its_trainer_holds(
    adapter: dict[str, Any] | None, method: dict[str, Any], folder: str, tmp_path: Path
) -> None:
    model = {"model_path": folder, "peft_config": adapter}
    config = ddpo_config(tmp_path, model=model, method=method)
    trainer = DDPOTrainer(config, reward_function=brightness, prompt_function=draw_prompt)
    plan = plan_run(config, ONE)
    holds(plan, trainer.state.train, trainer.frozen)
    assert sum(plan.held.values()) == device_bytes((trainer.state, trainer.frozen))
    assert plan.microbatches == 2 * STEPS


def test_samples_of_a_diffusion_model_are_counted(folder: str, tmp_path: Path) -> None:
    """Four images of 16 x 16 from latents of 8 x 8 x 4 and prompts of 16 vectors of 8 numbers, two calls an epoch."""
    config = ddpo_config(tmp_path, model={"model_path": folder, "peft_config": ADAPTER})
    plan, halves = (plan_run(config, abstract_mesh(data=n, num_devices=n)) for n in (1, 2))
    trajectory = 4 * ((STEPS + 1) * 8 * 8 * 4 + STEPS + 16 * 8)
    assert plan.sampling["samples"] == 4 * (trajectory + 4 * 16 * 16 * 3) == 2 * halves.sampling["samples"]
    negative, key = 4 * 16 * 8, 8
    assert plan.learning["of what is counted"]["batch"] == 8 * (trajectory + 4 + 1) + negative + key
    assert not plan.is_whole


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    config = ddpo_config(tmp_path, model={"model_path": str(folder), "peft_config": ADAPTER})
    assert plan_run(config, ONE).held["frozen parameters"] > 0


def test_a_flat_recipe_of_ddpo_is_planned(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    lines = [f"pretrained_model: {folder}", "mixed_precision: bf16", "sample_batch_size: 4"]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    command = ["plan", "--config", str(recipe), "--method.sample_num_steps", "3", "--devices", "4"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "data=4" in table and "a step has 3 microbatches" in table
    # TRL's sizes are of a device. Trajectories are float32 whatever is computed in, and so are the images of 16 x 16.
    image = 4 * (4 * 8 * 8 * 4 + 3 + 16 * 16 * 3) + 2 * 16 * 8
    line = next(line for line in table.splitlines() if line.startswith("  samples"))
    assert line.endswith(f" {format_bytes(4 * image)}")


@pytest.mark.parametrize(("target", "dtype"), [("--devices=1", "float32"), ("--target=gpu:h100", "bfloat16")])
def test_a_flat_recipe_that_names_no_precision_computes_as_its_devices_do(
    target: str, dtype: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"pretrained_model: {folder}", encoding="utf-8")
    assert main(["plan", "--config", str(recipe), target]) == 0
    assert f"computed in {dtype}" in capsys.readouterr().out


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy in the place of what a path names."""
    shapes = replace(toy_model(), weights=jax.eval_shape(lambda: dict(toy_model().weights)))
    monkeypatch.setattr(model_part_module, "describe_diffusion_model", lambda path: shapes)


def test_a_reward_gradient_holds_what_its_trainer_holds(toy: None, tmp_path: Path) -> None:
    config = run_config(tmp_path)
    trainer = jrl.RewardGradientTrainer(
        config, reward_function=bright, prompt_function=draw_prompt, model=toy_model()
    )
    plan = plan_run(config, ONE)
    holds(plan, trainer.state, trainer.frozen)
    assert sum(plan.held.values()) == device_bytes((trainer.state, trainer.frozen))
    assert plan.microbatches == 2
    # Four images of 8 x 8 from latents of 4 x 4 x 4 in three steps, and prompts of three vectors of eight numbers.
    trajectory = 4 * (4 * 4 * 4 * 4 + 3 + 3 * 8)
    assert plan.sampling["samples"] == 4 * (trajectory + 4 * 8 * 8 * 3)
    assert plan.learning["of what is counted"]["batch"] == 4 * trajectory + 4 * 3 * 8 + 8
    assert "not counted: the reward, what remat computes again" in plan.table()


def activations(config: jrl.TRLConfig, *, devices: int = 1) -> int:
    plan = plan_run(config, abstract_mesh(data=devices, num_devices=devices))
    return plan.learning["of what is counted"]["activations of a microbatch"]


def test_activations_of_a_reward_gradient_are_those_of_its_last_steps(toy: None, tmp_path: Path) -> None:
    """Counted through one step and through two, and from there on as a line: as three are when they are traced."""
    one, two, three = (activations(run_config(tmp_path, method={"num_last_steps": k})) for k in (1, 2, 3))
    assert 0 < one < two < three
    config = run_config(tmp_path, method={"num_last_steps": 3})
    method, denoiser = config.method, toy_denoiser()
    rows = config.train.rows_per_pass

    def trace(count: int) -> Any:
        def kept(params: Any, trajectories: Trajectories, negative: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                return reward_gradient_loss(
                    denoiser,
                    params,
                    toy_frozen(),
                    trajectories,
                    negative,
                    bright,
                    schedule=SD_SCHEDULE,
                    eta=method.sample_eta,
                    num_last_steps=3,
                    guidance_scale=method.sample_guidance_scale,
                )[0]

            return jax.vjp(loss, params)[1]

        latents, context = jnp.zeros((count, 4, *LATENT)), jnp.zeros((count, PROMPT, WIDTH))
        drawn = Trajectories(latents, jnp.zeros((count, 3)), context)
        return jax.make_jaxpr(kept)(toy_params(), drawn, context[:1]).jaxpr

    found = results_of_rows(trace, rows)
    assert three == sum(n * math.prod(shape) * dtype.itemsize for (shape, dtype), n in found.items())


def test_activations_grow_with_the_rows_of_a_device(toy: None, tmp_path: Path) -> None:
    two, four = (run_config(tmp_path, train={"minibatch_size": rows}) for rows in (2, 4))
    assert activations(four) == 2 * activations(two) == 2 * activations(four, devices=2)


@pytest.mark.slow
def test_activations_of_stable_diffusion_are_what_a_compiler_keeps(folder: str, tmp_path: Path) -> None:
    """Within a quarter of what XLA reserves for the update on a CPU; with remat only the inputs of blocks are kept."""
    config = run_config(
        tmp_path,
        model={"model_path": folder, "peft_config": ADAPTER},
        train={"batch_size": 8, "minibatch_size": 8},
    )
    mesh = mesh_of(config)
    with jax.set_mesh(mesh):
        part = model_part_module.model_part(config, mesh.abstract_mesh, Footprint())
        programs = {p.name: p for p in jrl.RewardGradientTrainer.programs(config, part, mesh)}
        update = programs["update"]
        reserved = update.function.lower(*update.arguments).compile().memory_analysis().temp_size_in_bytes
    assert activations(config) == pytest.approx(reserved, rel=0.25)
    assert activations(config.evolve(train={"remat": True})) < activations(config) / 2
