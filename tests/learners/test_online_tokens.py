# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jrl
from jrl.learners.grpo import grpo_recipe
from jrl.learners.online_tokens import token_figures
from jrl.learners.ppo import ppo_recipe
from jrl.ops import gae, whiten
from jrl.typing import ModelInputs, Rollouts, Scored, Sequences

TOKENS = jnp.array([[7, 8, 1, 2, 3], [9, 4, 5, 0, 0], [9, 6, 5, 0, 0]])
STARTS = jnp.array([1, 0, 0])
MASK = jnp.array([[True, True, True], [True, True, False], [True, True, False]])
LOGPROBS = -jnp.array([[1.0, 2.0, 3.0], [0.5, 0.25, jnp.nan], [0.5, 0.5, jnp.nan]])
REWARDS = jnp.array([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0], [0.0, -1.0, 0.0]])
VALUES = jnp.array([[0.5, 0.25, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.0]])


def rollouts(**more) -> Rollouts:
    inputs = ModelInputs(TOKENS, TOKENS != 0)
    return Rollouts(Sequences(inputs, STARTS, MASK), Scored(LOGPROBS, **more), REWARDS)


def test_ppo_has_all_four_figures():
    method = jrl.PPOConfig(init_kl_coef=0.5, target=None, gamma=1.0, lam=0.9, scale_reward=None)
    recipe = ppo_recipe(method)
    batch = rollouts(ref_logprobs=LOGPROBS - 0.5, values=VALUES)
    found = token_figures(recipe, recipe.scaling.init(), jnp.float32(0.5), batch, num_rows=2)
    assert found.tokens[0].tolist() == [1, 2, 3] and found.tokens[1, :2].tolist() == [4, 5]
    assert found.prompt[found.prompt_mask].tolist() == [7, 8, 9]
    assert found.reward.tolist() == [1.0, 2.0]
    assert found.kl is not None and found.values is not None
    np.testing.assert_allclose(np.where(MASK[:2], found.kl, 0.5), 0.5)
    # log π − log π_ref is 1/2 everywhere, so each action pays 1/4; all three rows are whitened together.
    penalized = jnp.where(MASK, REWARDS - 0.25, 0)
    expected = whiten(gae(penalized, VALUES, MASK, gamma=1.0, gae_lambda=0.9), MASK)
    np.testing.assert_allclose(
        np.where(MASK[:2], found.advantages, 0), np.where(MASK, expected, 0)[:2], rtol=1e-5
    )


def test_grpo_compares_the_group_and_has_no_value():
    recipe = grpo_recipe(jrl.GRPOConfig(num_rollouts=3, chunk_size=3, num_generations=3))
    batch = rollouts()._replace(groups=jnp.zeros(3, jnp.int32))
    found = token_figures(recipe, recipe.scaling.init(), jnp.float32(0.0), batch, num_rows=3)
    assert found.values is None and found.kl is None
    expected = np.array([1.0, 2.0, -1.0]) - 2 / 3  # nothing divides by default
    np.testing.assert_allclose(found.advantages[MASK], np.repeat(expected, [3, 2, 2]), rtol=1e-5)


def test_a_row_that_the_loss_leaves_out_has_no_advantage():
    recipe = grpo_recipe(jrl.GRPOConfig(num_rollouts=3, chunk_size=3, num_generations=3))
    batch = rollouts()._replace(groups=jnp.zeros(3, jnp.int32), kept=jnp.array([True, False, True]))
    found = token_figures(recipe, recipe.scaling.init(), jnp.float32(0.0), batch, num_rows=3)
    has_one = np.isfinite(found.advantages).any(axis=1)
    assert has_one.tolist() == [True, False, True]
