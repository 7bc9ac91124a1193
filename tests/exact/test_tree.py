# SPDX-License-Identifier: Apache-2.0
"""The world of 19,608 completions: its optimum, and the gradients of jrl's recipes as sums over all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.credit import Credit, returns_to_go
from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import algorithm
from jrl.learners.recipe import Recipe
from jrl.ops import kl_from_logits, place_scores
from jrl.typing import Predictions, Scored
from tests.exact.enumerable import (
    GOLDEN,
    action_logprobs,
    objective,
    optimal_logits,
    optimum,
    state_divergences,
    tree,
)

BETAS = [0.05, 0.1, 0.5, 1.0]


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def some_logits() -> np.ndarray:
    """A policy that is neither the reference nor the optimum."""
    noise = np.random.default_rng(0).normal(size=tree().ref_logits.shape)
    return tree().ref_logits + 0.5 * noise


def expected_gradient(
    recipe: Recipe, logits: np.ndarray, beta: float, *, sampler: np.ndarray | None = None
) -> np.ndarray:
    """−∇ of a recipe's loss, every completion weighed by its probability under the sampler.

    What is weighed is the loss of a completion, so the recipe must have no statistics over completions.
    """
    world = tree()
    mask, logits = jnp.asarray(world.mask), jnp.asarray(logits)
    drawn = logits if sampler is None else jnp.asarray(sampler)
    sampler_logprobs, old = action_logprobs(drawn), action_logprobs(logits)
    chances = jnp.exp(jnp.sum(sampler_logprobs, axis=1))
    rewards = place_scores(jnp.asarray(world.rewards), mask)
    scored = Scored(old, action_logprobs(world.ref_logits))
    targets = recipe.targets(rewards, scored, mask, beta, None, sampler_logprobs)
    # Shares take the place of the reduction: the sum over tokens, times the chance of the completion.
    shares = jnp.where(mask, chances[:, None], 0.0)

    def loss(table: Any) -> Any:
        full_kl = state_divergences(table) if recipe.reads_reference else None
        now = Predictions(action_logprobs(table), None, None, lambda: table, full_kl)
        return recipe.loss(now, targets._replace(shares=shares)).loss_sum

    return -np.asarray(jax.jit(jax.grad(loss))(logits))


def plain(**fields: Any) -> Recipe:
    """REINFORCE on returns to go, k1 in the reward, no whitening: nothing that needs other completions."""
    config = algorithm("reinforce_pp", **fields)
    return replace(grpo_recipe(config), estimate=returns_to_go())


def true_gradient(logits: np.ndarray, beta: float) -> np.ndarray:
    return np.asarray(jax.jit(jax.grad(lambda table: objective(table, beta)))(jnp.asarray(logits)))


def test_the_world_is_that_of_the_specification():
    world, wanted = tree(), GOLDEN["world"]
    assert world.rewards.shape == (wanted["num_sequences"],) == (19608,)
    assert world.ref_logits.shape == (wanted["num_states"], 8)
    chances = np.exp(np.asarray(action_logprobs(world.ref_logits)).sum(axis=1))
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert chances @ world.rewards == pytest.approx(wanted["ref_value"], abs=1e-12)
    assert chances @ world.mask.sum(axis=1) == pytest.approx(wanted["mean_length"], abs=1e-12)
    assert world.rewards.max() == wanted["max_reward"]


@pytest.mark.parametrize("beta", BETAS)
def test_the_optimum_and_its_table(beta):
    """J* in closed form, reached by π* as a table; its share of the best completion."""
    wanted = GOLDEN["world"][f"beta={beta}"]
    value, logprobs = optimum(beta)
    assert value == pytest.approx(wanted["J_star"], abs=1e-10)
    assert np.exp(logprobs.max()) == pytest.approx(wanted["p_best"], abs=1e-10)
    assert float(objective(jnp.asarray(optimal_logits(beta)), beta)) == pytest.approx(value, abs=1e-9)


def test_regret_is_the_divergence_from_the_optimum():
    """J* − J(π) = β·KL(π ‖ π*)."""
    logits = jnp.asarray(some_logits())
    logprobs = np.asarray(action_logprobs(logits)).sum(axis=1)
    for beta in BETAS:
        value, best = optimum(beta)
        regret = value - float(objective(logits, beta))
        assert regret == pytest.approx(beta * float(np.exp(logprobs) @ (logprobs - best)), abs=1e-10)


@pytest.mark.parametrize("surrogate", ["clipped", "reinforce"])
def test_k1_in_the_reward_has_the_true_gradient(surrogate):
    """Return to go with the penalty of each token in it: the gradient of E r − β·KL, of the clipped surrogate too."""
    logits, beta = some_logits(), 0.5
    found = expected_gradient(plain(surrogate=surrogate), logits, beta)
    np.testing.assert_allclose(found, true_gradient(logits, beta), atol=1e-12)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_the_optimum_is_the_fixed_point_of_k1_in_the_reward(beta):
    found = expected_gradient(plain(), optimal_logits(beta), beta)
    assert np.abs(found).max() < 1e-10


def test_the_whole_divergence_in_the_loss_is_that_of_fixed_states():
    """Nothing is estimated: by hand, each state's ∂KL/∂logits times the chance to be there, sampler or no sampler."""
    world, logits, beta = tree(), some_logits(), 0.5
    recipe = plain(beta=beta, kl_placement="loss", kl_estimator="full")
    silent = replace(recipe, estimate=lambda rewards, values, mask, groups: Credit(0.0 * rewards, None))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (logits, world.ref_logits))
    slopes = p * (np.log(p / q) - (p * np.log(p / q)).sum(axis=1, keepdims=True))
    for sampler in (logits, logits + 0.5 * np.random.default_rng(1).normal(size=logits.shape)):
        chances = np.exp(np.asarray(action_logprobs(sampler)).sum(axis=1))
        visits = np.zeros(len(logits))
        np.add.at(visits, world.states[world.mask], np.repeat(chances, world.mask.sum(axis=1)))
        found = expected_gradient(silent, logits, beta, sampler=sampler)
        np.testing.assert_allclose(found, -beta * visits[:, None] * slopes, atol=1e-9)
    # On the policy k2 has the same expectation, and the effect on later states is missing from both.
    found, sampled = (
        expected_gradient(plain(beta=beta, kl_placement="loss", kl_estimator=name), logits, beta)
        for name in ("full", "k2")
    )
    np.testing.assert_allclose(found, sampled, atol=1e-9)
    assert np.abs(found - true_gradient(logits, beta)).max() > 1e-3


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_no_form_in_the_loss_has_the_optimum_as_its_fixed_point(estimator):
    """The states are held fixed there: what an action does to the KL of later states is missing."""
    recipe = plain(beta=0.5, kl_placement="loss", kl_estimator=estimator)
    found = expected_gradient(recipe, optimal_logits(0.5), 0.5)
    assert np.abs(found).max() > 1e-3


def test_lore_6_1_the_product_weight_makes_another_samplers_gradient_exact():
    """A sampler whose logits are off by N(0, s²): exact by the completion's weight, to first order by the token's."""
    logits, beta = some_logits(), 0.5
    noise = np.random.default_rng(1).normal(size=logits.shape)
    wanted = true_gradient(logits, beta)
    errors = {}
    for dose in (0.05, 0.2):
        for mode in ("none", "token_truncate", "sequence_truncate"):
            fields = {} if mode == "none" else {"importance_sampling_mode": mode}
            recipe = plain(importance_sampling_clip_max=1e6, **fields)
            found = expected_gradient(recipe, logits, beta, sampler=logits + dose * noise)
            errors[mode, dose] = np.abs(found - wanted).max() / np.abs(wanted).max()
    for dose in (0.05, 0.2):
        assert errors["sequence_truncate", dose] < 1e-10
        assert errors["token_truncate", dose] < errors["none", dose]
        assert errors["none", dose] > 0.2 * dose
    assert errors["none", 0.2] > 2 * errors["none", 0.05]


def test_the_bandits_fixed_points():
    """One state, three actions: k2 and the whole divergence in the loss lead to π*, k3 to β·π_ref/(λ − r)."""
    bandit = GOLDEN["bandit"]
    rewards, ref = np.array(bandit["rewards"]), np.log(bandit["ref"])
    points = {"k2": bandit["optimum"], "full": bandit["optimum"], "k3": bandit["k3_loss_fixed_point"]}
    for estimator, point in points.items():
        config = algorithm("reinforce_pp", beta=bandit["beta"], kl_placement="loss", kl_estimator=estimator)
        recipe = replace(grpo_recipe(config), estimate=returns_to_go())
        logits, mask = jnp.log(jnp.array(point)), jnp.ones((3, 1), bool)
        scored = Scored(logits[:, None], jnp.asarray(ref)[:, None])
        targets = recipe.targets(jnp.asarray(rewards)[:, None], scored, mask, bandit["beta"])
        targets = targets._replace(shares=jnp.exp(logits)[:, None])

        def loss(table: Any, recipe: Recipe = recipe, targets: Any = targets) -> Any:
            now, full_kl = jax.nn.log_softmax(table)[:, None], None
            if recipe.reads_reference:
                full_kl = jnp.broadcast_to(kl_from_logits(table, jnp.asarray(ref)), (3, 1))
            return recipe.loss(Predictions(now, None, None, lambda: now, full_kl), targets).loss_sum

        assert np.abs(np.asarray(jax.grad(loss)(logits))).max() < 1e-9, estimator
