# SPDX-License-Identifier: Apache-2.0
"""Every recipe loads, says how it is run, and keeps the numbers that it writes."""

from pathlib import Path

import pytest

import jrl

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"ppo_sentiment", "sft_sentiment", "ppo_randomwalks"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_survives_a_round_trip(path):
    config = jrl.TRLConfig.load_yaml(path)
    assert jrl.TRLConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert isinstance(config.optimizer.kwargs["lr"], float)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_how_it_is_run(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("command:" in line for line in head) and any("hardware:" in line for line in head)
