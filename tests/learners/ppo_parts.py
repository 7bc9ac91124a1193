# SPDX-License-Identifier: Apache-2.0
"""PPO's update and the parts of its recipe, as tests ask for them: by configuration, or by single options."""

from __future__ import annotations

from typing import Any

from jrl.forward import Reader
from jrl.learners.credit import Scaling, ScoreMoments, generalized_advantages, penalize
from jrl.learners.online import OnlineState, init_online_state, make_online_update
from jrl.learners.ppo import PPOConfig, ppo_policy_loss, ppo_recipe
from jrl.learners.recipe import Recipe
from jrl.losses import Targets
from jrl.typing import PolicyFns, Scored, Update


def ppo_update(
    policy: PolicyFns,
    optimizer: Any,
    config: PPOConfig,
    *,
    temperature: float = 1.0,
    logprob_chunk_bytes: int = 2**28,
    recipe: Recipe | None = None,
    **sizes: Any,
) -> Update:
    """The update of a configuration, or of another recipe."""
    reader = Reader(policy, temperature, chunk_bytes=logprob_chunk_bytes)
    return make_online_update(reader, optimizer, recipe or ppo_recipe(config), **sizes)


def ppo_state(params: Any, optimizer: Any, config: PPOConfig) -> OnlineState:
    """The state before the first update."""
    return init_online_state(params, optimizer, ppo_recipe(config))


def scaled(rewards: Any, mask: Any, moments: ScoreMoments, **options: Any) -> tuple[Any, ScoreMoments]:
    """`Scaling` with these options, called."""
    return Scaling(**options)(rewards, mask, moments)


def first_moments(ref_std: float | None) -> ScoreMoments:
    """Moments before the first score."""
    return Scaling(ref_std=ref_std).init()


def targets_of(
    rewards: Any,
    scored: Scored,
    mask: Any,
    *,
    kl_coef: Any,
    gamma: float,
    gae_lambda: float,
    kl_penalty: str = "kl",
    whiten_rewards: bool = False,
) -> Targets:
    """What PPO learns from under these options."""
    recipe = Recipe(
        penalize=penalize(kl_penalty),
        estimate=generalized_advantages(gamma=gamma, gae_lambda=gae_lambda, whiten_rewards=whiten_rewards),
        loss=ppo_policy_loss(PPOConfig()),
        critic=True,
        prefix="ppo",
    )
    return recipe.targets(rewards, scored, mask, kl_coef)
