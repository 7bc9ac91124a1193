# SPDX-License-Identifier: Apache-2.0
"""Figures that TRL 0.7.1 gave on small inputs, written out: rewards, advantages, loss and statistics of a PPO step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ppo import PPOConfig
from jrl.trl.ppo_manual import advantages_and_returns, kl_penalty, minibatch_loss, token_rewards
from jrl.trl.ppo_stats import step_stats

OLD = np.array([[-1, -0.5, -2, -0.3, -1.2], [-0.7, -1.1, -0.2, -0.9, -0.4]], np.float32)
REF = np.array([[-1.2, -0.4, -1.5, -0.3, -1], [-0.6, -1.3, -0.5, -0.8, -0.4]], np.float32)
MASK = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
SCORES = np.array([1, -0.5], np.float32)
VALUES = np.array([[0.3, 0.1, 0.2, 0.4, 0.9], [0.5, 0.2, -0.1, 0.3, 0.6]], np.float32)
REAL = MASK != 0
CLOSE = dict(atol=1e-5, rtol=1e-5)


def rewards(kind="kl"):
    return token_rewards(SCORES, OLD, REF, MASK, kl_coef=0.2, kind=kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [[-0.04, 0.02, 0.1, 1, 0.04], [0.02, -0.04, -0.06, 0.02, -0.5]]),
        ("abs", [[-0.04, -0.02, -0.1, 1, -0.04], [-0.02, -0.04, -0.06, -0.02, -0.5]]),
        ("mse", [[-0.004, -0.001, -0.025, 1, -0.004], [-0.001, -0.004, -0.009, -0.001, -0.5]]),
    ],
)
def test_rewards(kind, expected):
    np.testing.assert_allclose(rewards(kind)[0], expected, **CLOSE)


def test_penalties():
    ours = [[0.5, 0.2, 0.1], [0.6, 0.2, 0.1]]
    theirs = [[0.4, 0.3, 0.0], [0.7, 0.1, 0.3]]
    plain = np.array([[0.1, -0.1, 0.1], [-0.1, 0.1, -0.2]])
    for kind, expected in (("kl", plain), ("abs", np.abs(plain)), ("mse", plain**2 / 2)):
        np.testing.assert_allclose(kl_penalty(ours, theirs, kind), expected, atol=1e-6)
    ours = np.log([[[0.98, 0.01, 0.01], [0.01, 0.98, 0.01]], [[0.49, 0.02, 0.49], [0.49, 0.02, 0.49]]])
    theirs = np.log([[[0.01, 0.01, 0.98], [0.01, 0.01, 0.98]], [[0.01, 0.98, 0.01], [0.49, 0.02, 0.49]]])
    found = kl_penalty(ours.astype(np.float32), theirs.astype(np.float32), "full")
    np.testing.assert_allclose(found, [[4.4474, 4.4474], [3.7361, 0]], atol=1e-4)


@pytest.mark.parametrize(
    ("gamma", "advantages", "returns"),
    [
        (
            1.0,
            [1.031166, 0.944102, 0.636814, -0.442958, -0.871168, -1.297956],
            [1.0465, 1.07, 1, -0.44875, -0.425, -0.5],
        ),
        (
            0.9,
            [0.922349, 0.937265, 0.723746, -0.352276, -0.856665, -1.374418],
            [0.860915, 0.973, 1, -0.371828, -0.3805, -0.5],
        ),
    ],
)
def test_advantages(gamma, advantages, returns):
    old, found, targets = advantages_and_returns(
        VALUES, rewards()[0], MASK, gamma=gamma, lam=0.95, whiten_rewards=False
    )
    np.testing.assert_allclose(old, VALUES * MASK, **CLOSE)
    np.testing.assert_allclose(found[REAL], advantages, **CLOSE)
    np.testing.assert_allclose(targets[REAL], returns, **CLOSE)


def test_a_hole_costs_no_credit():
    """Where TRL's recursion runs through the hole, here the next action follows at once."""
    holed = MASK.copy()
    holed[0, 2] = 0
    _, _, found = advantages_and_returns(VALUES, rewards()[0], holed, gamma=1, lam=0.95, whiten_rewards=False)
    closed = [np.delete(x[:1], 2, axis=1) for x in (VALUES, np.asarray(rewards()[0]), MASK)]
    _, _, expected = advantages_and_returns(*closed, gamma=1, lam=0.95, whiten_rewards=False)
    np.testing.assert_allclose(np.delete(found[:1], 2, axis=1), expected, **CLOSE)


def loss(threshold, columns=slice(None)):
    new = np.array([[-0.9, -0.45, -1.5, -0.6, -1.2], [-0.7, -1.1, -0.5, -0.7, -0.35]], np.float32)
    vpreds = np.array([[0.2, 0.4, 0.15, 0.5, 0.9], [0.4, 0.3, 0.3, 0.25, 0.2]], np.float32)
    rows, steps = np.meshgrid(np.arange(2), np.arange(5), indexing="ij")
    logits = np.stack([0.1 * rows, 0.2 * steps, np.full((2, 5), -0.3)], axis=-1).astype(np.float32)
    values, advantages, returns = advantages_and_returns(
        VALUES, rewards()[0], MASK, gamma=1, lam=0.95, whiten_rewards=False
    )
    arrays = (OLD, values, logits, vpreds, new, MASK, advantages, returns)
    config = PPOConfig(cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, ratio_threshold=threshold)
    return minibatch_loss(*(x[:, columns] for x in arrays), config)


def test_loss_and_its_statistics():
    policy, value, stats = loss(10.0)
    assert float(policy) == pytest.approx(0.0156994, abs=1e-5)
    assert float(value) == pytest.approx(0.0289993, abs=1e-5)
    expected = {
        "loss/total": 0.0446987,
        "loss/value": 0.2899928,
        "policy/entropy": 1.0413905,
        "policy/approxkl": 0.0395833,
        "policy/policykl": -0.0333333,
        "policy/clipfrac": 0.3333333,
        "policy/advantages_mean": 0,
        "returns/mean": 0.2904584,
        "returns/var": 0.6731735,
        "val/vpred": 0.3,
        "val/error": 0.5034356,
        "val/clipfrac": 0.3333333,
        "val/mean": 0.25,
        "val/var": 0.059,
    }
    for name, number in expected.items():
        assert float(stats[name]) == pytest.approx(number, abs=1e-5), name


def test_columns_outside_the_mask_change_nothing():
    whole, cut = loss(10.0), loss(10.0, slice(1, None))
    np.testing.assert_allclose(whole[0], cut[0], rtol=1e-6)
    np.testing.assert_allclose(whole[1], cut[1], rtol=1e-6)


def test_the_guard_takes_the_losses_alone():
    kept, left_out = loss(10.0)[2], loss(0.5)[2]
    for name in ("loss/policy", "loss/value", "loss/total"):
        assert float(left_out.pop(name)) == 0
        kept.pop(name)
    for name, value in kept.items():
        np.testing.assert_array_equal(value, left_out[name])


def test_statistics_of_a_step():
    train = {"val/error": np.array([0.5, 0.7]), "returns/var": np.array([1.0, 2.0])}
    found = step_stats(
        0.2,
        scores=SCORES,
        logprobs=OLD,
        ref_logprobs=REF,
        non_score_reward=rewards()[1],
        train_stats=train,
        masks=MASK,
        queries=[[0] * 4, [0] * 7],
        responses=[[0] * 3, [0] * 3],
    )
    expected = {
        "objective/kl": -0.2,
        "objective/entropy": 2.15,
        "objective/kl_coef": 0.2,
        "ppo/mean_non_score_reward": 0.0133333,
        "ppo/mean_scores": 0.25,
        "ppo/std_scores": 1.0606601,
        "ppo/val/var_explained": 0.6,
        "tokens/queries_len_mean": 5.5,
        "tokens/queries_len_std": 2.1213203,
    }
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, abs=1e-5), name
    np.testing.assert_allclose(found["objective/kl_dist"], [-0.6, 0.2], **CLOSE)


def test_a_very_negative_kl_is_warned_of():
    with pytest.warns(UserWarning, match="sampling and scoring differ"):
        step_stats(
            0.2,
            scores=SCORES,
            logprobs=OLD - 3,
            ref_logprobs=REF,
            non_score_reward=jnp.zeros((2, 5)),
            train_stats={},
            masks=MASK,
            queries=[[0]] * 2,
            responses=[[0]] * 2,
        )
