# SPDX-License-Identifier: Apache-2.0
"""A field that is declared a number holds one, in every algorithm's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jrl.bench.models import Shapes
from jrl.forward import Reader
from jrl.learners.config import MethodConfig
from jrl.learners.credit import rollout_metrics
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.online import online_objective, run_epochs
from jrl.learners.ppo import PPOConfig, ppo_recipe
from jrl.learners.recipe import KLControl
from jrl.learners.reward_model_config import RewardConfig
from jrl.trainers.config.sections import TrainConfig


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (PPOConfig, "cliprange", "a", "a number, got str 'a'"),
        (PPOConfig, "cliprange", None, "a number, got NoneType None"),
        (PPOConfig, "target", "6", "a number, or None, got str '6'"),
        (PPOConfig, "num_rollouts", [128], r"a number, got list \[128\]"),
        (GRPOConfig, "num_generations", "8", "a number, got str '8'"),
        (DPOConfig, "beta", "0.1", "a number, got str '0.1'"),
        (ILQLConfig, "tau", "0.7", "a number, got str '0.7'"),
        (DDPOConfig, "sample_num_steps", "50", "a number, got str '50'"),
        (RewardConfig, "center_rewards_coefficient", "1", "a number, or None, got str '1'"),
    ],
)
def test_what_is_no_number_is_named(kind: type[MethodConfig], field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^`method.{field}` must be {message}"):
        kind(**{field: value})


def test_numbers_of_numpy_are_numbers() -> None:
    assert PPOConfig(cliprange=np.float32(0.25)).cliprange == 0.25


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (Reader, "chunk_bytes"),
        (online_objective, "prefix"),
        (rollout_metrics, "prefix"),
        (run_epochs, "watched_kl"),
    ],
)
def test_a_default_has_one_home(function: Callable[..., Any], argument: str) -> None:
    """The configuration's, or the recipe's: a second one would be forgotten when the first is changed."""
    assert inspect.signature(function).parameters[argument].default is inspect.Parameter.empty


def test_a_controller_with_a_target_has_a_horizon() -> None:
    recipe = ppo_recipe(PPOConfig())
    with pytest.raises(ValueError, match="`horizon` of a `KLControl` must be a number of rollouts beside"):
        replace(recipe, kl=KLControl(coef=0.1, target=6.0))


def test_a_measurement_reads_the_default_of_a_run() -> None:
    assert Shapes().logprob_chunk_bytes == TrainConfig.logprob_chunk_bytes
