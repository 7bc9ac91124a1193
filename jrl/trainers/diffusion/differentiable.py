# SPDX-License-Identifier: Apache-2.0
"""Rewards that JAX can differentiate: plain functions as such, and such rewards as the functions that DDPO calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.compilation import COMPILER_OPTIONS
from jrl.rollout.keywords import refuse_async
from jrl.trainers.diffusion.ddpo_rewards import RewardFunction
from jrl.typing import DifferentiableReward


def as_differentiable(reward: Any) -> DifferentiableReward:
    """The reward itself, or a function of images alone as one.

    Args:
      reward: `images (B, height, width, 3) in [0, 1] -> rewards (B,)`, in JAX; or a `DifferentiableReward`.
    Raises:
      ValueError: If it is neither.
    """
    if isinstance(reward, DifferentiableReward):
        return reward
    if not callable(reward):
        raise ValueError(
            "`reward_function` must be a JAX function of images (B, height, width, 3), or a "
            f"`jrl.DifferentiableReward`, got {type(reward).__name__}."
        )
    refuse_async(reward, "reward_function")
    return DifferentiableReward(_OfImages(reward))


class _OfImages:
    """A function of images alone, under its own name.

    Args:
      function: The user's.
    """

    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self._function = function
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, params: Any, images: jax.Array, conditions: Any) -> jax.Array:
        """Rewards of images."""
        del params, conditions
        return self._function(images)


@functools.lru_cache(maxsize=16)
def as_reward_function(reward: DifferentiableReward) -> RewardFunction:
    """A reward as DDPO calls one: `(images (B 3 Y X), prompts, metadata) -> (rewards, {})`, compiled.

    Args:
      reward: Any.
    """
    score = jax.jit(reward.score, compiler_options=COMPILER_OPTIONS)

    def reward_function(
        images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        conditions = reward.conditions_of(prompts, metadata)
        found = score(reward.params, jnp.moveaxis(jnp.asarray(images, jnp.float32), 1, -1), conditions)
        return np.asarray(found, np.float32), {}

    return reward_function
