# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    calibrate_scores,
    clip_scores,
    last_token_scores,
    length_mask,
    missing_eos_penalty,
    overlong_penalty,
    penalize_kl,
    place_scores,
)

# TRL 0.7.1, compute_rewards with kl_penalty = "kl", kl_coef = 0.2
LOGPROBS = jnp.array([[-1.0, -0.5, -2.0, -0.3, -1.2], [-0.7, -1.1, -0.2, -0.9, -0.4]])
REF_LOGPROBS = jnp.array([[-1.2, -0.4, -1.5, -0.3, -1.0], [-0.6, -1.3, -0.5, -0.8, -0.4]])
MASK = jnp.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)


class TestPlaceScores:
    def test_lore_4_1_the_score_lands_on_the_last_action(self):
        lengths = jnp.array([1, 3, 4, 0])
        scores = jnp.array([1.0, 2.0, 3.0, 4.0])
        placed = place_scores(scores, length_mask(lengths, width=4))
        expected = [[1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
        np.testing.assert_array_equal(placed, np.array(expected, np.float32))
        np.testing.assert_array_equal(jnp.sum(placed, axis=1), jnp.where(lengths > 0, scores, 0.0))

    def test_holes_before_the_last_action_do_not_matter(self):
        mask = jnp.array([[True, False, True, False], [False, True, False, False]])
        placed = place_scores(jnp.array([5.0, -1.0]), mask)
        np.testing.assert_array_equal(placed, [[0, 0, 5, 0], [0, -1, 0, 0]])

    def test_the_score_of_an_empty_row_may_be_anything(self):
        assert not place_scores(jnp.array([jnp.nan]), jnp.zeros((1, 3), bool)).any()


class TestPenalizeKL:
    def test_golden_trl(self):
        """TRL leaves a penalty on prompt columns until it multiplies by the mask; here it is never there."""
        scores = place_scores(jnp.array([1.0, -0.5]), MASK)
        rewards = penalize_kl(scores, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.2)
        expected = [[0, 0.02, 0.1, 1.0, 0], [0, 0, -0.06, 0.02, -0.5]]
        np.testing.assert_allclose(rewards, expected, atol=1e-6)

    def test_masked_garbage_is_irrelevant(self):
        scores = place_scores(jnp.array([1.0, -0.5]), MASK)
        clean = penalize_kl(scores, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.2)
        dirty = (jnp.where(MASK, x, jnp.nan) for x in (scores, LOGPROBS, REF_LOGPROBS))
        np.testing.assert_array_equal(penalize_kl(*dirty, MASK, kl_coef=0.2), clean)

    def test_the_coefficient_may_be_traced(self):
        zeros = jnp.zeros((2, 5))
        traced = penalize_kl(zeros, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=jnp.float32(0.2))
        np.testing.assert_allclose(
            traced, penalize_kl(zeros, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.2), atol=1e-7
        )


def test_lore_4_15_the_penalty_is_subtracted_after_clipping():
    # the score 7 is clipped to 5; k1 = (0.5, 3.5), β = 2 → (−1, 5 − 7); clipped last it would be (−1, 0)
    mask = jnp.ones((1, 2), bool)
    scores = place_scores(clip_scores(jnp.array([7.0]), clip_range=5.0), mask)
    logprobs, ref_logprobs = jnp.array([[-1.0, -0.5]]), jnp.array([[-1.5, -4.0]])
    rewards = penalize_kl(scores, logprobs, ref_logprobs, mask, kl_coef=2.0)
    np.testing.assert_allclose(rewards, [[-1.0, -2.0]], atol=1e-6)


def test_penalties_beyond_the_clip_range_survive():
    mask = jnp.ones((1, 1), bool)
    rewards = penalize_kl(jnp.array([[1.0]]), jnp.array([[0.0]]), jnp.array([[-9.0]]), mask, kl_coef=1.0)
    assert float(rewards[0, 0]) == -8.0


def test_clip_scores_is_symmetric():
    np.testing.assert_array_equal(clip_scores(jnp.array([-9.0, 0.5, 9.0]), clip_range=2.0), [-2.0, 0.5, 2.0])


def test_lore_4_8_the_penalty_is_the_only_difference_without_eos():
    scores = missing_eos_penalty(jnp.array([0.7, 0.7]), jnp.array([True, False]), penalty=1.5)
    assert float(scores[0]) == float(jnp.float32(0.7))
    assert float(scores[0] - scores[1]) == 1.5


class TestRewardModelScores:
    """What a reward model's per-token scores become before PPO sees them."""

    def test_lore_4_7_padding_does_not_move_the_score(self):
        scores = jnp.array([[0.5, -1.0, 2.0]])
        mask = jnp.ones_like(scores, dtype=bool)
        for left, right in [(0, 0), (0, 5), (7, 0), (3, 4)]:
            pads = ((0, 0), (left, right))
            got = last_token_scores(jnp.pad(scores, pads, constant_values=9.0), jnp.pad(mask, pads))
            assert got.tolist() == [2.0]

    def test_a_row_of_mere_padding_scores_zero(self):
        assert last_token_scores(jnp.full((1, 3), jnp.nan), jnp.zeros((1, 3), bool)).tolist() == [0.0]

    @pytest.mark.parametrize("unit_variance", [False, True])
    def test_lore_4_7_reference_completions_score_zero_on_average(self, unit_variance):
        reference = 40.0 + 3.0 * jax.random.normal(jax.random.key(0), (256,))
        calibrated = calibrate_scores(reference, reference, unit_variance=unit_variance)
        assert abs(float(jnp.mean(calibrated))) < 1e-5
        expected = 1.0 if unit_variance else float(jnp.std(reference, ddof=1))
        assert float(jnp.std(calibrated, ddof=1)) == pytest.approx(expected, rel=1e-5)


class TestOverlongPenalty:
    def test_lore_4_16_it_grows_from_one_knee_to_the_other(self):
        lengths = jnp.array([0, 5, 6, 7, 8, 9, 10, 11, 4000])
        found = overlong_penalty(lengths, max_length=10, buffer_length=4)
        np.testing.assert_array_equal(found, [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1])

    @pytest.mark.parametrize("buffer", [0, 11])
    def test_a_buffer_that_does_not_fit_is_refused(self, buffer):
        with pytest.raises(
            ValueError, match=r"`buffer_length` must be in \[1, max_length\] = \[1, 10\], got"
        ):
            overlong_penalty(jnp.array([3]), max_length=10, buffer_length=buffer)
