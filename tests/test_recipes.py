# SPDX-License-Identifier: Apache-2.0
"""Every recipe loads, says how it is run, keeps the numbers that it writes, and fits the hardware that it names."""

import functools
import re
from pathlib import Path

import jax
import pytest

import jrl
from jrl.sweep import read_plan
from tests.flat_recipes import command_of, ddpo_sections, is_ddpo, is_flat, parse, sections
from tests.recipe_shapes import ARCHITECTURES, AbstractRun, abstract_run

ROOT = Path(__file__).parents[1]
ALL = sorted((ROOT / "configs").glob("*.yaml"))
DDPO = [path for path in ALL if is_flat(path) and is_ddpo(path)]
FLAT = [path for path in ALL if is_flat(path) and path not in DDPO]
NESTED = [path for path in ALL if not is_flat(path)]
IMAGES = [path for path in NESTED if "RewardGradientConfig" in path.read_text(encoding="utf-8")]
RECIPES = [path for path in NESTED if path not in IMAGES]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
# Those that are run as they are, on the model that they name; of the others an example brings its own.
REAL = [path for path in RECIPES if path.stem == "ppo_imdb" or "  jrl " in path.read_text(encoding="utf-8")]
GIB = 2**30
# What the default tier weighs: one of each size. The rest, and the updates, are slow.
WEIGHED = {
    "ilql_imdb",
    "ppo_hh_gptj_6b",
    "ilql_hh_gptj_6b",
    "ppo_hh_neox_20b",
    "ilql_hh_neox_20b",
    "ppo_imdb_llama_7b",
}


def slow_but(paths, always):
    """The recipes as parameters, slow but for those of the default tier."""
    return [path if path.stem in always else pytest.param(path, marks=pytest.mark.slow) for path in paths]


def head_of(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


@functools.cache
def real_run(path: Path) -> AbstractRun:
    return abstract_run(jrl.TRLConfig.load_yaml(path))


def test_there_are_recipes():
    stems = {path.stem for path in RECIPES}
    assert stems >= {"ppo_sentiment", "sft_sentiment", "ppo_randomwalks"}
    # The sizes that trlX ships.
    models = {jrl.TRLConfig.load_yaml(path).model.model_path for path in REAL}
    assert models >= {"gpt2", "EleutherAI/gpt-j-6b", "EleutherAI/gpt-neox-20b", "NousResearch/Llama-2-7b-hf"}


@pytest.mark.parametrize("path", NESTED, ids=lambda path: path.stem)
def test_recipe_loads_and_survives_a_round_trip(path):
    config = jrl.TRLConfig.load_yaml(path)
    assert jrl.TRLConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert isinstance(config.optimizer.kwargs["lr"], float)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_recipe_says_how_it_is_run(path):
    head = head_of(path)
    assert "command:" in head and "hardware:" in head
    assert "measured" in head, "what it reached, or `no run is measured`"


@pytest.mark.parametrize("path", FLAT, ids=lambda path: path.stem)
def test_flat_recipe_is_of_its_commands_fields(path):
    """The file is read as the command line reads it: unknown keys, doubled ones and wrong types are errors there."""
    _, config, model, _ = parse(path)
    assert type(config).__name__.lower() == f"{command_of(path)}config"
    assert model.model_name_or_path in ARCHITECTURES
    assert isinstance(config.learning_rate, float)
    found = sections(path)
    assert found.train.trainer.lower() == f"{command_of(path)}trainer"
    assert found.optimizer.kwargs["lr"] == config.learning_rate
    assert found.train.seq_length == config.max_length


@pytest.mark.parametrize("path", DDPO, ids=lambda path: path.stem)
def test_ddpo_recipe_is_of_its_commands_fields(path):
    script, config, found = ddpo_sections(path)
    assert script.pretrained_model in (
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "stabilityai/stable-diffusion-2-1",
        "stabilityai/stable-diffusion-3.5-medium",
        "stabilityai/stable-diffusion-xl-base-1.0",
        "black-forest-labs/FLUX.1-dev",
    )
    assert isinstance(config.train_learning_rate, float) and found.train.trainer == "DDPOTrainer"
    assert config.train_learning_rate == (3e-4 if script.use_lora else 1e-5)
    # Enough samples to learn from, and a few updates of them.
    assert found.method.num_samples >= 128 and found.method.num_samples // found.train.batch_size == 2


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_a_recipe_of_reward_gradients_is_the_default_with_fewer_activations(path):
    config, default = jrl.TRLConfig.load_yaml(path), jrl.default_reward_gradient_config()
    assert config.train.trainer == "RewardGradientTrainer" and config.train.remat
    assert config.model.peft_config == default.model.peft_config
    assert (config.train.batch_size, config.train.total_steps) == (16, 2000)
    assert config.optimizer.kwargs["lr"] == 3e-4


def test_flat_recipes_quote_their_sources():
    """TRL's own figures: batches, ranks and rates of its scripts."""
    found = {path.stem: sections(path) for path in FLAT}
    dpo, sft = found["dpo_llama2_7b_lora"], found["sft_llama_7b_packed"]
    assert (dpo.train.batch_size, dpo.train.minibatch_size, dpo.train.total_steps) == (16, 4, 1000)
    assert dpo.model.frozen_dtype == "nf4" and dpo.model.peft_config["r"] == 8
    assert sft.method.packing and sft.train.total_steps == 5000
    reward = found["reward_opt_350m_lora"]
    assert (reward.train.batch_size, reward.model.peft_config["modules_to_save"]) == (1024, ["score"])


@pytest.mark.slow
@pytest.mark.parametrize("path", FLAT, ids=lambda path: path.stem)
def test_a_flat_recipes_update_keeps_the_state_at_its_real_size(path):
    config = sections(path)
    run = abstract_run(config)
    state, metrics = run.trace()
    shapes, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, run.state))
    assert shapes == expected and metrics


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_command_names_the_recipe_and_files_that_exist(path):
    command = head_of(path).partition("command:")[2].partition("hardware:")[0]
    for name in re.findall(r"(?:examples|configs)/[\w/.]+\.(?:py|yaml)", command):
        assert (ROOT / name).is_file(), name
    if "jrl " in command:
        assert f"configs/{path.name}" in command
        algorithm = re.search(r"jrl (\w+) ", command)[1]
    if "jrl " in command and path in NESTED:
        expected = {f"{algorithm.replace('_', '')}trainer"}
        if jrl.trainers.config.entries()[algorithm].recipe is not None:
            expected.add("onlinetrainer")
        assert jrl.TRLConfig.load_yaml(path).train.trainer.lower() in expected


@pytest.mark.parametrize("path", slow_but(REAL, WEIGHED), ids=lambda path: path.stem)
def test_what_stays_on_a_device_fits_it_and_is_what_the_head_says(path):
    """Half of the memory is left to activations and logits."""
    run = real_run(path)
    found = run.device_bytes()
    head = head_of(path)
    hardware = re.search(r"hardware: (one|\d+) GPUs?(?: of (\d+) GB)?", head)
    count = 1 if hardware[1] == "one" else int(hardware[1])
    assert run.mesh.size == count
    memory = int(hardware[2] or 24) * 1e9
    assert sum(found.values()) < memory / 2
    assert run.load_bytes() < 0.7 * memory  # read in whole, before anything is rounded
    if path.stem != "ppo_imdb":
        held, rollouts = re.search(r"([\d.]+) GiB (?:on each|there) .*? ([\d.]+) GiB for", head).groups()
        assert float(rollouts) == pytest.approx((found["cache"] + found["rollouts"]) / GIB, abs=0.06)
        staying = sum(found[name] for name in ("state", "frozen", "reference", "gradient"))
        assert float(held) == pytest.approx(staying / GIB, abs=0.06)


def test_the_state_takes_what_the_estimated_cost_says():
    run = real_run(ROOT / "configs" / "sft_hh_gptj_6b.yaml")
    cost = jrl.estimate_cost(ARCHITECTURES[run.config.model.model_path](), mesh=run.mesh)
    assert run.device_bytes()["state"] == pytest.approx(cost.parameter_bytes + cost.optimizer_bytes, rel=1e-6)
    assert run.load_bytes() == cost.parameter_bytes


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_update_keeps_the_state_at_its_real_size(path):
    run = real_run(path)
    state, metrics = run.trace()
    shapes, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, run.state))
    assert shapes == expected and metrics
    sizes = {leaf.shape for leaf in jax.tree.leaves(metrics)}
    assert sizes == {()}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweep_loads_and_says_how_it_is_run(path):
    plan = read_plan(path)
    head = head_of(path)
    assert plan.num_trials > 1 and "command:" in head and "hardware:" in head
