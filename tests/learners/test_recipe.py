# SPDX-License-Identifier: Apache-2.0
"""Rewards, advantages and loss of one's own inside the compiled PPO update, on a tabular policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.credit import Credit
from jrl.learners.ppo import PPOConfig, ppo_policy_loss, ppo_recipe
from jrl.learners.recipe import Recipe, mean_loss
from jrl.losses.policy_gradient import KLTerm, Targets
from jrl.ops.masking import masked_mean
from jrl.ops.metrics import finalize
from jrl.ops.policy_gradient import clipped_surrogate, clipped_value_loss
from jrl.typing import Predictions, Rollouts
from tests.learners.batches import CHUNK_BYTES, sgd
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.learners.tabular import tabular_batch, tabular_params, tabular_policy

PARAMS, FROZEN = tabular_params(seed=3)
CONFIG = PPOConfig(ppo_epochs=2, init_kl_coef=0.1, vf_coef=0.5, scale_reward=None)
OWN = ppo_recipe(CONFIG)


@pytest.fixture(scope="module")
def batch() -> Rollouts:
    return tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=6)


@pytest.fixture(scope="module")
def plain(batch: Rollouts) -> tuple[Any, dict[str, Any]]:
    return train(batch)


def train(batch: Rollouts, recipe: Recipe | None = None, **sizes: int) -> tuple[Any, dict[str, Any]]:
    optimizer = sgd()
    cut = {"batch_size": 12, "minibatch_size": 4, **sizes}
    update = ppo_update(
        tabular_policy(),
        optimizer,
        CONFIG,
        logprob_chunk_bytes=CHUNK_BYTES,
        temperature=1.0,
        recipe=recipe,
        **cut,
    )
    state, metrics = jax.jit(update)(ppo_state(PARAMS, optimizer, CONFIG), FROZEN, batch, jax.random.key(0))
    return state.train.params, finalize(metrics)


def as_means(now: Predictions, targets: Targets) -> tuple[Any, dict[str, Any]]:
    """jrl's own loss, written as scripts write theirs: a mean over the minibatch."""
    policy = clipped_surrogate(
        now.logprobs, targets.old_logprobs, targets.advantages, clip_range=CONFIG.cliprange
    )
    value = clipped_value_loss(
        now.values, targets.old_values, targets.returns, clip_range=CONFIG.cliprange_value
    )
    loss = masked_mean(policy + CONFIG.vf_coef * value, targets.mask)
    return loss, {"own/loss": loss, "own/policy": policy, "own/top": now.logits().max(axis=-1)}


def test_a_mean_over_ragged_minibatches_is_the_mean_over_the_batch(
    batch: Rollouts, plain: tuple[Any, dict[str, Any]]
) -> None:
    """Of 6 rows in minibatches of 4, two are mere padding, and rows differ in length."""
    wanted, metrics = plain
    found, own = train(batch, replace(OWN, loss=mean_loss(as_means, ppo_policy_loss(CONFIG))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)
    assert own["own/policy"] == pytest.approx(metrics["ppo/policy_loss"], abs=1e-6)
    total = metrics["ppo/policy_loss"] + CONFIG.vf_coef * metrics["ppo/value_loss"]
    assert own["own/loss"] == pytest.approx(total, abs=1e-6)
    watched = {"ppo/policy_loss", "ppo/value_loss"} ^ metrics.keys()
    assert watched <= own.keys() and own["ppo/policy_kl"] == pytest.approx(metrics["ppo/policy_kl"], abs=1e-6)


def test_the_functions_are_what_trains(batch: Rollouts, plain: tuple[Any, dict[str, Any]]) -> None:
    """Rewards that are negated turn the policy's step around; returns that are the old values stop the critic's."""
    before, _ = plain
    mirrored = replace(
        OWN,
        penalize=lambda *given: -OWN.penalize(*given),
        estimate=lambda rewards, values, mask, groups: Credit(
            OWN.estimate(rewards, 0 * values, mask, groups).advantages, values
        ),
    )
    after, _ = train(batch, mirrored)
    np.testing.assert_allclose(after["v_head"]["kernel"], PARAMS["v_head"]["kernel"], atol=1e-6)
    moved, back = (tree["table"]["kernel"] - PARAMS["table"]["kernel"] for tree in (before, after))
    assert float(np.sum(np.asarray(moved) * np.asarray(back))) < 0


def test_a_minibatch_without_actions_has_no_weight(batch: Rollouts) -> None:
    """Two of three minibatches are padding, over which the script's mean is 0/0."""
    empty = batch.sequences.mask.at[2:].set(False)
    batch = batch._replace(sequences=batch.sequences._replace(mask=empty))
    params, metrics = train(
        batch, replace(OWN, loss=mean_loss(as_means, ppo_policy_loss(CONFIG))), minibatch_size=2
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert metrics["optim/skipped_steps"] == 0 and np.isfinite(metrics["own/loss"])


def test_logits_are_made_only_where_a_loss_asks(batch: Rollouts) -> None:
    asked: list[int] = []

    def loss(now: Predictions, targets: Targets) -> tuple[Any, dict[str, Any]]:
        asked.append(now.logits().shape[-1])
        return jnp.mean(jnp.where(targets.mask, now.logprobs, 0.0)), {}

    train(batch, replace(OWN, loss=mean_loss(loss, ppo_policy_loss(CONFIG))))
    assert set(asked) == {8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": "other"}, r"`prefix` of a recipe must be that of its loss, 'ppo', got 'other'"),
        ({"critic": False}, r"`critic` of a recipe must be True beside a `value_loss`, got False"),
        ({"kl": None, "loss": replace(ppo_policy_loss(CONFIG), kl=KLTerm(0.1))}, "`kl` of a recipe must be"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OWN, **changes)


def test_a_kl_term_in_the_loss_pulls_towards_the_reference(batch: Rollouts) -> None:
    """Without advantages nothing moves the policy but β·k2, whose step lowers the distance to the reference."""
    far = batch.scored._replace(ref_logprobs=batch.scored.logprobs - 0.5)
    mask = batch.sequences.mask
    recipe = replace(
        OWN,
        penalize=lambda rewards, scored, mask, kl_coef: 0.0 * rewards,
        estimate=lambda rewards, values, mask, groups: Credit(0.0 * rewards, values),
        loss=replace(ppo_policy_loss(CONFIG), kl=KLTerm(0.1)),
        num_epochs=1,
    )
    after, metrics = train(batch._replace(scored=far), recipe)
    assert metrics["ppo/kl_term"] == pytest.approx(0.5 * 0.5**2, rel=1e-5)
    now = Reader(tabular_policy(), chunk_bytes=CHUNK_BYTES)(after, FROZEN, batch.sequences).logprobs
    assert float(jnp.sum(jnp.where(mask, now - batch.scored.logprobs, 0.0))) < 0
