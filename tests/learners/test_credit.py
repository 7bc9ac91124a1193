# SPDX-License-Identifier: Apache-2.0
"""Scores to advantages: order of the steps, scaling modes, and what a bad score leaves behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.credit import Credit, kl_per_sequence, rollout_metrics
from jrl.ops.metrics import finalize
from jrl.typing import ModelInputs, Rollouts, Scored, Sequences
from tests.learners.ppo_parts import first_moments, scaled, targets_of

MASK = jnp.array([[True, True, False], [True, True, True], [False, False, False]])
SCORES = jnp.array([[0.0, 3.0, 99.0], [0.0, 0.0, -50.0], [jnp.nan, 7.0, 7.0]])  # row 2 is padding


def test_lore_4_15_scores_are_clipped_before_the_penalty_and_whitened_last() -> None:
    """One row: score 30 clipped to 10, β·k1 = 0.5·(1, 2), γ = λ = 1, V = (1, 2).

    rewards −0.5, 10 − 1 = 9 → returns 8.5, 9 → advantages 7.5, 7. Clipped after the penalty, 9 would be 10.
    Whitened: mean 7.25, variance 0.125 → ±0.25/√0.125 = ±0.7071.
    """
    mask = jnp.ones((1, 2), bool)
    scores, _ = scaled(jnp.array([[0.0, 30.0]]), mask, first_moments(None), clip_range=10.0, mode=None)
    scored = Scored(jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -3.0]]), jnp.array([[1.0, 2.0]]))
    targets = targets_of(scores, scored, mask, kl_coef=jnp.float32(0.5), gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(targets.returns, [[8.5, 9.0]], rtol=1e-6)
    np.testing.assert_allclose(targets.advantages, [[0.70711, -0.70711]], rtol=1e-4)


def test_lore_4_3_returns_come_from_raw_advantages() -> None:
    rng = np.random.default_rng(0)
    scored = Scored(*(jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(3)))
    scores = jnp.asarray(100 * rng.normal(size=(3, 3)), jnp.float32)
    targets = targets_of(scores, scored, MASK, kl_coef=jnp.float32(0), gamma=1.0, gae_lambda=1.0)
    # λ = γ = 1: the return is the sum of rewards to come, whatever whitening did to the advantages.
    expected = np.cumsum(np.where(MASK, scores, 0)[:, ::-1], axis=1)[:, ::-1] * MASK
    np.testing.assert_allclose(targets.returns, expected, rtol=1e-5)
    assert float(jnp.std(targets.advantages[MASK])) == pytest.approx(1.0, rel=0.15)


class TestScaleScores:
    def test_running_divides_by_the_deviation_of_all_scores_so_far(self) -> None:
        """Totals 3 and −50 clipped to −10: mean −3.5, variance with ddof 1 2·6.5² = 84.5."""
        scores, moments = scaled(SCORES, MASK, first_moments(None), clip_range=10.0, mode="running")
        assert float(moments.running.mean) == pytest.approx(-3.5)
        np.testing.assert_allclose(scores[0, 1], 3 / np.sqrt(84.5), rtol=1e-6)
        np.testing.assert_allclose(scores[1, 2], -10 / np.sqrt(84.5), rtol=1e-6)
        again, moments = scaled(SCORES, MASK, moments, clip_range=10.0, mode="running")
        np.testing.assert_allclose(again[0, 1], 3 / np.std([3, -10, 3, -10], ddof=1), rtol=1e-6)

    def test_ref_keeps_the_deviation_of_the_first_batch(self) -> None:
        _, moments = scaled(SCORES, MASK, first_moments(None), clip_range=10.0, mode="ref")
        assert float(moments.ref_std) == pytest.approx(np.sqrt(84.5))
        scores, later = scaled(SCORES * 0.1, MASK, moments, clip_range=10.0, mode="ref")
        assert float(later.ref_std) == float(moments.ref_std)
        np.testing.assert_allclose(scores[0, 1], 0.3 / np.sqrt(84.5), rtol=1e-6)

    def test_ref_takes_a_configured_deviation(self) -> None:
        scores, moments = scaled(SCORES, MASK, first_moments(2.0), clip_range=None, mode="ref")
        assert float(scores[1, 2]) == -25.0 and float(moments.ref_std) == 2.0

    @pytest.mark.parametrize("mode", ["ignored", None, False])
    def test_other_modes_leave_the_scores(self, mode: str | bool | None) -> None:
        scores, moments = scaled(SCORES, MASK, first_moments(None), clip_range=False, mode=mode)
        np.testing.assert_array_equal(scores, SCORES)
        assert float(moments.running.mean) == pytest.approx((3 - 50) / 2)  # still counted

    @pytest.mark.parametrize("mode", ["running", "ref"])
    def test_equal_scores_are_not_blown_up(self, mode: str) -> None:
        constant = jnp.full((3, 3), 0.1)
        scores, _ = scaled(
            constant, MASK[1:2].repeat(3, axis=0), first_moments(None), clip_range=None, mode=mode
        )
        np.testing.assert_allclose(scores, constant, rtol=1e-6)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_lore_7_6_a_score_that_is_not_finite_does_not_stay_in_the_moments(self, bad: float) -> None:
        before = first_moments(None)
        _, after = scaled(SCORES.at[0, 0].set(bad), MASK, before, clip_range=None, mode="running")
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_lore_3_9_kl_is_reported_per_token_and_per_sequence() -> None:
    """k1 = (0.5, 0.1) and (1, 1, 1): 3.6 over 5 tokens, over 2 sequences; row 2 is padding."""
    zeros = jnp.zeros((3, 4), jnp.int32)
    sequences = Sequences(ModelInputs(zeros, zeros == 0), jnp.zeros(3, jnp.int32), MASK)
    ref_logprobs = -jnp.array([[0.5, 0.1, 9.0], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]])
    batch = Rollouts(sequences, Scored(jnp.zeros((3, 3)), ref_logprobs, jnp.zeros((3, 3))), SCORES)
    returns = jnp.where(MASK, SCORES, 0.0)
    metrics = finalize(rollout_metrics(batch, Credit(returns, returns), kl_penalty="kl", prefix="ppo"))
    assert metrics["kl/per_token"] == pytest.approx(3.6 / 5)
    assert metrics["kl/per_sequence"] == pytest.approx(3.6 / 2)
    assert float(kl_per_sequence(batch).weight) == 2
    assert metrics["reward/mean"] == pytest.approx(-23.5)
    assert metrics["reward/std"] == pytest.approx(np.std([3, -50], ddof=1))
    assert metrics["completion/length_mean"] == pytest.approx(2.5)
    assert metrics["ppo/explained_variance"] == pytest.approx(0.0)  # values of 0 explain nothing
