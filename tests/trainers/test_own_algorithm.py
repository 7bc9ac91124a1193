# SPDX-License-Identifier: Apache-2.0
"""An algorithm that is registered from outside has all that jrl's own have: nothing in the package names it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import jrl
from jrl.cli import main
from jrl.mesh import abstract_mesh
from jrl.trainers.cards.card import method_names
from jrl.trainers.cards.citations import citations
from jrl.trainers.config import entries, entry_of
from jrl.trainers.config.method import _ENTRIES
from jrl.trainers.config.registry import METHODS
from jrl.trainers.loggers.console import headline_names
from jrl.trainers.plan.run_plan import plan_run
from tests.trainers.runs import PROMPTS, count_vowels, tiny_run

BIBTEX = "@article{williams1992simple,\n  title = {Simple statistical gradient-following algorithms},\n}"


@dataclass(kw_only=True)
class ToyConfig(jrl.OnlineConfig):
    """REINFORCE with a constant baseline."""

    name: str = "ToyConfig"
    baseline: float = 0.3


def toy_recipe(config: ToyConfig) -> jrl.Recipe:
    return jrl.Recipe(
        prefix="toy",
        estimate=jrl.learners.returns_to_go(baseline=config.baseline),
        loss=jrl.PolicyLoss(surrogate=jrl.losses.reinforce(), prefix="toy"),
    )


TOY = jrl.Method(
    name="toy",
    config=ToyConfig,
    recipe=toy_recipe,
    default=lambda: jrl.default_config(ToyConfig()),
    title="the toy",
    summary="a toy against a reward function",
    tags=("toy",),
    papers=lambda config: (BIBTEX,),
    headlines={"toy/entropy": "entropy"},
)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    jrl.register(TOY)
    yield
    del _ENTRIES[ToyConfig], METHODS._classes["toyconfig"], METHODS._spelled["toyconfig"]


def toy_config(checkpoint: str, folder: Path, baseline: float = 0.1, **train: object) -> jrl.TRLConfig:
    method = {"num_rollouts": 8, "chunk_size": 4, "gen_kwargs": {"max_new_tokens": 6}, "baseline": baseline}
    config = tiny_run(TOY.default().evolve(method=method), checkpoint, folder)
    sizes = {
        "batch_size": 8,
        "minibatch_size": 4,
        "total_steps": 4,
        "eval_interval": 2,
        "checkpoint_interval": 2,
    }
    return config.evolve(train=sizes | train)


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=toy_config(checkpoint, folder / "run"))


def test_it_learns_without_critic_and_reference(trained):
    assert type(trained) is jrl.OnlineTrainer and trained.ref_params is None
    assert "v_head" not in trained.params
    records = [record for record in trained.history if "toy/policy_loss" in record]
    assert len(records) == 4 and not [name for name in records[0] if name.startswith(("kl/", "ppo/"))]
    assert all(record["toy/ratio_max_dev_first_minibatch"] < 1e-5 for record in records)
    assert trained.update._cache_size() == 1


def test_a_file_names_it(trained, checkpoint, tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(yaml.safe_dump(toy_config(checkpoint, tmp_path).to_dict()))
    found = jrl.TRLConfig.load_yaml(recipe)
    assert type(found.method) is ToyConfig and entry_of(found.method) is TOY
    with pytest.raises(ValueError, match="Did you mean `baseline`"):
        found.evolve(method={"baselin": 0.1})


def test_its_memory_is_planned(checkpoint, tmp_path, capsys):
    config = toy_config(checkpoint, tmp_path)
    mesh = abstract_mesh(num_devices=2, fsdp=2, data=1, tensor=1)
    plan = plan_run(config, mesh)
    assert plan.held["reference's own parameters"] == 0 and plan.sampling["cache"] > 0
    assert plan.held["optimizer"] > plan.held["parameters that train"] > 0
    # A single step an iteration is scored by nobody else.
    assert not plan.score_traffic and plan_run(config.evolve(train={"batch_size": 4}), mesh).score_traffic
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    assert main(["plan", "--config", str(recipe)]) == 0
    assert "memory of each device" in capsys.readouterr().out


def test_cards_citations_and_the_console_know_it(trained, tmp_path):
    assert method_names(ToyConfig()) == ("the toy", ("toy",)) and citations(ToyConfig()) == [BIBTEX]
    card = (trained.save_pretrained(tmp_path / "model") / "README.md").read_text(encoding="utf-8")
    assert "trained by the toy" in card and "williams1992simple" in card
    assert headline_names()["toy/entropy"] == "entropy"


@pytest.fixture(scope="module")
def commanded(checkpoint, tmp_path_factory):
    """The run folder of a command that makes the first two steps of `trained`, with the baseline said in a flag."""
    folder = tmp_path_factory.mktemp("command")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    recipe = folder / "toy.yaml"
    recipe.write_text(yaml.safe_dump(toy_config(checkpoint, folder / "run", 0.3, total_steps=2).to_dict()))
    reward = "tests.trainers.runs:count_vowels"
    words = ["toy", "--config", str(recipe), "--reward", reward, "--prompts", str(prompts)]
    assert main([*words, "--method.baseline", "0.1"]) == 0
    return folder / "run"


def test_it_is_a_command(commanded, capsys):
    saved = yaml.safe_load((commanded / "checkpoint_2" / "config.yaml").read_text())
    assert saved["method"]["baseline"] == 0.1
    records = (commanded / "metrics.jsonl").read_text().splitlines()
    assert any("toy/policy_loss" in json.loads(line) for line in records)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "a toy against a reward function" in capsys.readouterr().out


def test_a_resumed_run_is_the_run_that_never_stopped(trained, commanded, checkpoint):
    config = toy_config(checkpoint, commanded, resume_from_checkpoint=str(commanded))
    resumed = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, trained.params)


def test_what_is_no_algorithm_is_refused():
    with pytest.raises(TypeError, match=r"must be a subclass of jrl\.OnlineConfig"):
        jrl.register(
            jrl.Method(
                name="wrong",
                config=jrl.MethodConfig,
                recipe=toy_recipe,
                default=TOY.default,
                title="x",
                summary="x",
            )
        )
    assert "wrong" not in entries()
