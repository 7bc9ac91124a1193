# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from jrl.data.prompts import PromptSet
from jrl.learners.config import MethodConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.trainers.config.registry import (
    METHODS,
    PIPELINES,
    TRAINERS,
    Registry,
    get_method,
    get_pipeline,
    get_trainer,
)
from jrl.trainers.ppo import PPOTrainer


class First:
    """An entry."""


class Second:
    """Another."""


@pytest.fixture
def registry():
    return Registry("train.thing", prefix="Accelerate", suffix="Config")


class TestRegister:
    def test_bare_and_with_a_name(self, registry):
        assert registry.register(First) is First
        assert registry.register("Other")(Second) is Second
        assert dict(registry) == {"first": First, "other": Second}

    def test_a_class_defined_anew_replaces_the_old_one(self, registry):
        registry.register(First)
        again = type("First", (), {"__module__": First.__module__})
        registry.register(again)
        assert registry["first"] is again

    def test_a_script_may_be_imported_twice(self, registry, monkeypatch):
        """Once as `__main__`, once under its own name."""
        registry.register(First)
        monkeypatch.setitem(sys.modules, "twice", sys.modules[First.__module__])
        again = type("First", (), {"__module__": "twice"})
        registry.register(again)
        assert registry["first"] is again

    def test_a_name_that_is_taken(self, registry):
        registry.register(First)
        with pytest.raises(ValueError, match=r"the name 'first' belongs to .*First; register .*Second under"):
            registry.register("first")(Second)
        assert registry["first"] is First

    def test_a_class_of_another_kind(self):
        registry = Registry("method.name", base=MethodConfig)
        with pytest.raises(
            TypeError, match=r"First must be a subclass of jrl\.learners\.config\.MethodConfig"
        ):
            registry.register(First)
        assert not registry


class TestFind:
    @pytest.mark.parametrize(
        "name", ["FirstConfig", "firstconfig", "First", "AccelerateFirst", "ACCELERATEFIRSTCONFIG"]
    )
    def test_case_prefix_and_suffix_do_not_matter(self, registry, name):
        registry.register("FirstConfig")(First)
        assert registry.find(name) is registry.get_known(name) is First

    def test_a_name_without_the_suffix_may_be_given_with_it(self, registry):
        registry.register(Second)
        assert registry.find("SecondConfig") is Second

    def test_a_name_with_the_prefix_in_it(self, registry):
        registry.register("AccelerateFirst")(First)
        assert registry.find("AccelerateFirst") is First

    def test_unknown_names_list_those_registered(self, registry):
        registry.register("ZedConfig")(First)
        registry.register(Second)
        assert registry.find("secnd") is None
        with pytest.raises(
            ValueError,
            match=r"`train.thing` must be one of Second, ZedConfig, got 'secnd'. Did you mean `Second`\?",
        ):
            registry.get_known("secnd")


class TestTables:
    def test_what_jrl_brings(self):
        assert {"ppoconfig", "ilqlconfig", "sftconfig", "rftconfig"} <= set(METHODS)
        assert {"ilqltrainer", "ppotrainer", "rfttrainer", "sfttrainer"} <= set(TRAINERS)
        assert PIPELINES["promptpipeline"] is PromptSet

    @pytest.mark.parametrize("name", ["PPOConfig", "ppoconfig", "PPO"])
    def test_methods_with_and_without_config(self, name):
        assert get_method(name) is PPOConfig

    def test_names_of_trlx(self):
        assert get_trainer("AcceleratePPOTrainer") is PPOTrainer
        assert get_pipeline("promptpipeline") is PromptSet

    def test_a_method_of_ones_own(self, monkeypatch):
        monkeypatch.setattr(METHODS, "_classes", dict(METHODS))
        monkeypatch.setattr(METHODS, "_spelled", dict(METHODS._spelled))

        @METHODS.register
        @dataclass(kw_only=True)
        class OwnConfig(ILQLConfig):
            """A method with one more field."""

            name: str = "OwnConfig"
            strength: float = 1.0

        assert get_method("own") is OwnConfig
