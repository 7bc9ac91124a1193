# SPDX-License-Identifier: Apache-2.0
"""Entries that would fail in the middle of a run are refused when they are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

import jrl
from jrl.cli.names import ALGORITHMS, TOOLS
from jrl.trainers.config import entries
from jrl.trainers.config.method import _ENTRIES, COMMANDS, commands
from jrl.trainers.config.registry import METHODS
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, tiny_run


@dataclass(kw_only=True)
class DrillConfig(jrl.OnlineConfig):
    """The section of the entry that the tests spoil."""

    name: str = "DrillConfig"


@dataclass(kw_only=True)
class NamedAsTheCommand(jrl.OnlineConfig):
    """A section whose name finds nothing."""

    name: str = "drill"


class NoDataclass(jrl.OnlineConfig):
    """A section that is not decorated: its own fields would be none."""

    baseline: float = 0.3


def recipe(config: Any) -> jrl.Recipe:
    return jrl.Recipe(
        estimate=jrl.learners.returns_to_go(), loss=jrl.PolicyLoss(surrogate=jrl.losses.reinforce())
    )


DRILL = jrl.Method(
    name="drill",
    config=DrillConfig,
    recipe=recipe,
    default=lambda: jrl.default_config(DrillConfig()),
    title="the drill",
    summary="a drill",
)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test registers is known to that test alone."""
    assert entries()  # jrl's own are registered
    known, classes, spelled = dict(_ENTRIES), dict(METHODS._classes), dict(METHODS._spelled)
    yield
    for table, before in ((_ENTRIES, known), (METHODS._classes, classes), (METHODS._spelled, spelled)):
        table.clear()
        table.update(before)


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ({"papers": ("williams1992",)}, TypeError, "`papers` of the method 'drill' must be a function"),
        ({"default": None}, TypeError, "`default` of the method 'drill' must be a function"),
        ({"recipe": "nix"}, TypeError, "`recipe` of the method 'drill' must be a function"),
        ({"name": "my algo"}, ValueError, "lower-case letters"),
        ({"name": "plan"}, ValueError, "none of the commands"),
        ({"name": "ppo"}, ValueError, "'ppo' is that of PPOConfig"),
        ({"config": NamedAsTheCommand}, ValueError, "must be `name: str = 'NamedAsTheCommand'`"),
        ({"config": NoDataclass}, TypeError, "@dataclass"),
        ({"config": dict}, TypeError, "subclass of jrl.OnlineConfig"),
    ],
)
def test_a_part_that_is_none_is_refused(parts: dict[str, Any], error: type[Exception], said: str) -> None:
    before = dict(entries())
    with pytest.raises(error, match=said):
        jrl.register(dataclasses.replace(DRILL, **parts))
    assert dict(entries()) == before


def test_commands_are_those_of_the_parser() -> None:
    assert {*TOOLS, *(alias for tool in TOOLS.values() for alias in tool.aliases)} == set(COMMANDS)
    found = {entry.name: (entry.summary, tuple(entry.variants)) for entry in entries().values()}
    assert {name: (known.summary, known.aliases) for name, known in ALGORITHMS.items()} == found
    assert set(COMMANDS).isdisjoint(commands())


@pytest.mark.parametrize(
    ("papers", "error"), [(("nobody2099nothing",), ValueError), ("schulman2017proximal", TypeError)]
)
def test_a_paper_that_is_none_ends_a_run_before_it_begins(
    papers: Any, error: type[Exception], tmp_path: Path
) -> None:
    jrl.register(dataclasses.replace(DRILL, papers=lambda config: papers))
    config = tiny_run(DRILL.default(), "nowhere", tmp_path)
    with pytest.raises(error, match="papers"):
        jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)


def test_a_model_given_as_a_config_is_read_back(checkpoint: str, tmp_path: Path) -> None:
    model = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=97)
    config = ppo_config(checkpoint, tmp_path).evolve(model={"model_path": model})
    read = jrl.TRLConfig.from_dict({**config.to_dict(), "model": {"model_path": model.to_dict()}})
    assert isinstance(read.model.model_path, GPT2Config) and read.model.model_path.n_embd == 16
    with pytest.raises(ValueError, match="model_type"):
        jrl.TRLConfig.from_dict({**config.to_dict(), "model": {"model_path": {"n_embd": 16}}})
