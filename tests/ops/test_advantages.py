# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    decoupled_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_scaled_advantages,
    smallest_of_group,
    standardized,
    whitened_over_batch,
)
from jrl.rollout.reward_columns import combined_rewards

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "policy_gradient.json").read_text())
BATCH = GOLDEN["batch"]
MASK = np.asarray(BATCH["mask"], bool)
LENGTHS = jnp.asarray(MASK.sum(axis=1), jnp.float32)
GROUPS = jnp.asarray(np.repeat([71, -3, 40], 4))
EVERY = jnp.ones(12, bool)
TRL = {"ddof": 1, "epsilon": 1e-4}


def numbers(name):
    return jnp.asarray(np.asarray(BATCH[name], float), jnp.float32)


SCORES, TWO, TWO_FAILED = (
    numbers(name) for name in ("scores", "scores_two_functions", "scores_two_functions_failed")
)
WEIGHTS = jnp.array([1.0, 0.5])


def relative(scores, groups=GROUPS, valid=EVERY, **options):
    return group_relative_advantages(scores, groups, valid, **options)


def summed(scores):
    """As a run sums the scores of several functions."""
    columns = np.asarray(scores).T.tolist()
    return jnp.asarray(combined_rewards(columns, WEIGHTS.tolist()), jnp.float32)


def penalised():
    gap = (np.asarray(BATCH["old_logprobs"]) - np.asarray(BATCH["ref_logprobs"])) * MASK
    return SCORES - jnp.asarray(0.05 * gap.sum(axis=1), jnp.float32)


def shortest_two():
    kept = smallest_of_group(LENGTHS, GROUPS, EVERY, num_kept=2)
    return relative(SCORES, valid=kept, scale="group", **TRL)


ESTIMATORS = {
    "grpo_std1": lambda: relative(SCORES, scale="group", **TRL),
    "centred": lambda: relative(SCORES),
    "batch_std1": lambda: relative(SCORES, scale="batch", **TRL),
    "grpo_std0_eps1e-6": lambda: relative(SCORES, scale="group"),
    "rloo": lambda: leave_one_out_advantages(SCORES, GROUPS, EVERY),
    "rloo_kl0.05": lambda: leave_one_out_advantages(penalised(), GROUPS, EVERY),
    "rloo_normalized": lambda: standardized(
        leave_one_out_advantages(SCORES, GROUPS, EVERY), EVERY, ddof=1, epsilon=1e-4
    ),
    "sum_of_two": lambda: relative(summed(TWO), scale="group", **TRL),
    "gdpo": lambda: decoupled_advantages(TWO, WEIGHTS, GROUPS, EVERY, **TRL),
    "sum_failed": lambda: relative(summed(TWO_FAILED), scale="group", **TRL),
    "gdpo_failed": lambda: decoupled_advantages(TWO_FAILED, WEIGHTS, GROUPS, EVERY, **TRL),
    "maxrl": lambda: mean_scaled_advantages(SCORES, GROUPS, EVERY),
    "opo": lambda: length_weighted_advantages(SCORES, LENGTHS, GROUPS, EVERY),
    "gfpo_shortest2": shortest_two,
    "reinforce_pp_baseline": lambda: whitened_over_batch(
        jnp.where(MASK, relative(SCORES)[:, None], jnp.nan), jnp.asarray(MASK)
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_golden(name):
    wanted = np.asarray(GOLDEN["advantages"][name]["value"])
    np.testing.assert_allclose(ESTIMATORS[name](), wanted, rtol=1e-5, atol=1e-6)


ONE_SCORE = {
    "centred": relative,
    "group": lambda *given: relative(*given, scale="group"),
    "batch": lambda *given: relative(*given, scale="batch"),
    "leave_one_out": leave_one_out_advantages,
    "mean_scaled": mean_scaled_advantages,
    "length_weighted": lambda scores, *rest: length_weighted_advantages(
        scores, 1.0 + jnp.arange(scores.shape[0], dtype=jnp.float32), *rest
    ),
    "decoupled": lambda scores, *rest: decoupled_advantages(
        jnp.stack([scores, -2.0 * scores], axis=1), WEIGHTS, *rest
    ),
}


@pytest.mark.parametrize("name", ONE_SCORE)
class TestEveryEstimator:
    def test_lore_4_9_equal_scores_teach_exactly_nothing(self, name):
        """Eight times 0.1 has a mean that is not 0.1 in float32, and a deviation of rounding."""
        scores = jnp.array([0.1] * 8 + [1.0, 0.0])
        found = ONE_SCORE[name](scores, jnp.array([0] * 8 + [1] * 2), jnp.ones(10, bool))
        np.testing.assert_array_equal(found[:8], np.zeros(8))
        assert found[8] > 0.1

    def test_a_group_of_one_teaches_nothing_unless_it_is_scaled_by_its_mean(self, name):
        scores, groups = jnp.array([0.7, 1.0, 0.0]), jnp.array([5, 2, 2])
        found = ONE_SCORE[name](scores, groups, jnp.ones(3, bool))
        assert float(found[0]) == pytest.approx(0.7 if name == "mean_scaled" else 0.0)

    def test_padding_and_failed_rows_count_for_nothing(self, name):
        """A row of padding holds garbage, a failed reward is NaN: the others are as if neither were there."""
        scores = jnp.array([1.0, jnp.nan, 0.0, 0.5, 7e9, 0.25, jnp.nan])
        groups, valid = jnp.array([0, 0, 0, 1, 1, 1, 2]), jnp.array([1, 1, 1, 1, 0, 1, 1], bool)
        found = np.asarray(ONE_SCORE[name](scores, groups, valid))
        kept = np.array([0, 2, 3, 5])
        np.testing.assert_array_equal(np.delete(found, kept), np.zeros(3))
        if name != "length_weighted":
            alone = ONE_SCORE[name](scores[kept], groups[kept], jnp.ones(4, bool))
            np.testing.assert_allclose(found[kept], alone, atol=1e-6)

    def test_lore_4_13_neither_order_nor_numbers_of_the_groups_matter(self, name):
        order = np.random.default_rng(0).permutation(12)
        if name == "length_weighted":
            plain = length_weighted_advantages(SCORES, LENGTHS, GROUPS, EVERY)
            mixed = length_weighted_advantages(SCORES[order], LENGTHS[order], 1000 - GROUPS[order], EVERY)
        else:
            plain = ONE_SCORE[name](SCORES, GROUPS, EVERY)
            mixed = jax.jit(ONE_SCORE[name])(SCORES[order], 1000 - GROUPS[order], EVERY)
        np.testing.assert_allclose(mixed, np.asarray(plain)[order], atol=2e-6)

    def test_no_gradient_flows_through(self, name):
        weights = jnp.arange(12, dtype=jnp.float32)
        gradient = jax.grad(lambda x: jnp.sum(weights * ONE_SCORE[name](x, GROUPS, EVERY)))(SCORES)
        np.testing.assert_array_equal(gradient, np.zeros(12))

    def test_nothing_valid_is_nothing(self, name):
        found = ONE_SCORE[name](jnp.full(3, jnp.nan), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
        np.testing.assert_array_equal(found, np.zeros(3))


@pytest.mark.parametrize("size", [2, 8])
def test_lore_4_10_the_deviation_has_ddof_0(size):
    """One success of K: σ² = (K−1)/K², so A = √(K−1); with ddof 1 it is smaller by √(1 − 1/K)."""
    scores, groups = jnp.zeros(size).at[0].set(1.0), jnp.zeros(size, jnp.int32)
    every = jnp.ones(size, bool)
    plain = relative(scores, groups, every, scale="group")
    other = relative(scores, groups, every, scale="group", ddof=1)
    assert float(plain[0]) == pytest.approx(np.sqrt(size - 1), rel=1e-5)
    assert float(other[0]) == pytest.approx(np.sqrt(size - 1) * np.sqrt(1 - 1 / size), rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_lore_4_11_dividing_by_the_deviation_favours_the_easy_and_the_hard(scale):
    """Weight of a prompt solved with p = 0.5 and 0.95, over all 2^8 groups: equal without a scale, not with one."""
    groups = np.asarray(list(itertools.product([0, 1], repeat=8)))
    found = relative(
        jnp.asarray(groups.reshape(-1), jnp.float32),
        jnp.repeat(jnp.arange(256), 8),
        jnp.ones(2048, bool),
        scale=scale,
    )
    advantages = np.asarray(found).reshape(256, 8)

    def weight(p):
        probability = p ** groups.sum(axis=1) * (1 - p) ** (8 - groups.sum(axis=1))
        return probability @ (advantages * (groups - p)).sum(axis=1) / (8 * p * (1 - p))

    wanted = {"group": (1.8557, 2.4731), "none": (7 / 8, 7 / 8)}[scale]
    assert (weight(0.5), weight(0.95)) == pytest.approx(wanted, abs=5e-5)


def test_lore_4_12_leave_one_out_is_the_centred_score_times_k_over_k_minus_one():
    found = leave_one_out_advantages(SCORES, GROUPS, EVERY)
    np.testing.assert_allclose(found, relative(SCORES) * 4 / 3, atol=1e-6)
    by_hand = [SCORES[i] - (jnp.sum(SCORES[:4]) - SCORES[i]) / 3 for i in range(4)]
    np.testing.assert_allclose(found[:4], by_hand, atol=1e-6)


class TestSeveralFunctions:
    def test_lore_4_14_normalised_first_one_and_the_other_differ(self):
        """(1, 0) and (0, 1) have one sum; each function normalised by itself, the rarer success counts more."""
        scores = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
        groups, every, weights = jnp.zeros(4, jnp.int32), jnp.ones(4, bool), jnp.ones(2)
        together = relative(jnp.sum(scores, axis=1), groups, every, scale="group")
        apart = decoupled_advantages(scores, weights, groups, every)
        assert float(together[0]) == float(together[1])
        assert float(apart[0]) > float(apart[1]) + 0.3

    def test_lore_4_14_a_reward_that_does_not_apply_is_absent_and_not_zero(self):
        scores = jnp.array([[1.0, jnp.nan], [1.0, 0.0], [0.0, 2.0]])
        groups, every = jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
        found = decoupled_advantages(scores, jnp.array([0.0, 1.0]), groups, every)
        # Of the second function, 0 and 2 alone make mean and deviation: ∓1, and 0 for the row without.
        np.testing.assert_allclose(found, np.array([0.0, -1.0, 1.0]) * np.sqrt(1.5), atol=1e-5)


def test_functions_that_cancel_each_other_teach_exactly_nothing():
    """What rounding leaves of Z₁ + Z₂ would otherwise be divided by its own deviation."""
    scores = jnp.stack([SCORES, 1.0 - SCORES], axis=1)
    found = decoupled_advantages(scores, jnp.ones(2), GROUPS, EVERY)
    np.testing.assert_array_equal(found, np.zeros(12))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_epsilon_equal_scores_are_still_no_nan(scale):
    every = jnp.ones(4, bool)
    found = relative(jnp.full(4, 0.1), jnp.array([0, 0, 1, 1]), every, scale=scale, epsilon=0.0)
    np.testing.assert_array_equal(found, np.zeros(4))


def test_a_mean_that_is_not_positive_scales_nothing():
    scores = jnp.array([-1.0, 0.5, 0.0, 0.0])
    found = mean_scaled_advantages(scores, jnp.array([0, 0, 1, 1]), jnp.ones(4, bool))
    np.testing.assert_array_equal(found, np.zeros(4))


def test_whitening_of_equal_numbers_is_zero():
    x = jnp.full((3, 2), 0.1)
    np.testing.assert_array_equal(whitened_over_batch(x, jnp.ones((3, 2), bool)), np.zeros((3, 2)))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="`scale` must be 'group', 'batch' or 'none', got 'std'"):
        relative(SCORES, scale="std")
