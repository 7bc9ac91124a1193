# SPDX-License-Identifier: Apache-2.0
"""Options of PPO that are off by default: KL penalties, an early end of the epochs, ratio guard, whitening, scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.forward import window_features, window_kl
from jrl.learners.credit import KL_PENALTIES, Credit, kl_per_sequence, penalize, rollout_metrics
from jrl.learners.online import RATIOS
from jrl.learners.ppo import PPOConfig
from jrl.ops import finalize, kl_from_logits
from jrl.rollout.score import make_score
from jrl.typing import Rollouts, Scored
from tests.learners.batches import CHUNK_BYTES, adam, random_sequences
from tests.learners.ppo_parts import first_moments, ppo_state, ppo_update, scaled, targets_of
from tests.learners.tabular import tabular_batch, tabular_params, tabular_policy
from tests.tiny import tiny_policy

PARAMS, FROZEN = tabular_params(seed=3)
NUM_ROWS, STEPS_PER_EPOCH = 16, 2
BASE = PPOConfig(ppo_epochs=4, init_kl_coef=0.1, scale_reward="ignored", cliprange_reward=None)
OPTIMIZER = adam(0.05)
LOGPROBS = jnp.array([[-1.0, -0.5, -2.0, -0.3, -1.2], [-0.7, -1.1, -0.2, -0.9, -0.4]])
REFERENCE = jnp.array([[-1.2, -0.4, -1.5, -0.3, -1.0], [-0.6, -1.3, -0.5, -0.8, -0.4]])
MASK = jnp.array([[False, True, True, True, False], [False, False, True, True, True]])
SCORES = jnp.array([[0.0, 0, 0, 1.0, 0], [0, 0, 0, 0, -0.5]])


@pytest.fixture(scope="module")
def batch() -> Rollouts:
    return tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=NUM_ROWS)


def run(batch: Rollouts, config: PPOConfig, **options: Any) -> tuple[Any, Any]:
    """State and metrics after one update from `PARAMS`."""
    update = ppo_update(
        tabular_policy(),
        OPTIMIZER,
        config,
        batch_size=NUM_ROWS // STEPS_PER_EPOCH,
        minibatch_size=4,
        temperature=1.0,
        logprob_chunk_bytes=CHUNK_BYTES,
        **options,
    )
    state = ppo_state(PARAMS, OPTIMIZER, config)
    return jax.jit(update)(state, FROZEN, batch, jax.random.key(0))


@pytest.fixture(scope="module")
def plain(batch: Rollouts) -> tuple[Any, Any]:
    return run(batch, BASE)


@pytest.fixture(scope="module")
def kept(batch: Rollouts) -> tuple[Any, Any]:
    return run(batch, BASE, keep_ratios=True)


@pytest.fixture(scope="module")
def stopped(batch: Rollouts) -> tuple[Any, Any]:
    return run(batch, replace(BASE, max_policy_kl=1e-9), keep_ratios=True)


@pytest.fixture(scope="module")
def guarded(batch: Rollouts) -> tuple[Any, Any]:
    return run(batch, replace(BASE, ratio_threshold=0.5))


@pytest.fixture(scope="module")
def whole_score() -> Any:
    """A compiled scoring pass for logits of any size, and what it is given."""
    policy, params, frozen, _ = tiny_policy("gpt2")
    moved = jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), params)
    sequences = random_sequences()
    score = jax.jit(make_score(policy, logprob_chunk_bytes=4 * 128 * 7, with_full_kl=True))
    return moved, sequences, score(moved, frozen, params, sequences, jnp.float32(0.7))


def steps_taken(state: Any) -> int:
    """Adam's own count."""
    return int(optax.tree.get(state.train.opt_state, "count"))


def same(first: Any, second: Any) -> None:
    """Parameters agree to float32 rounding: two programs that compute the same are not fused the same everywhere."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
        first.train.params,
        second.train.params,
    )


class TestKLPenalties:
    # TRL 0.7.1, executed; the score is on the last action.
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("kl", [[0, 0.02, 0.1, 1, 0], [0, 0, -0.06, 0.02, -0.5]]),
            ("abs", [[0, -0.02, -0.1, 1, 0], [0, 0, -0.06, -0.02, -0.5]]),
            ("mse", [[0, -0.001, -0.025, 1, 0], [0, 0, -0.009, -0.001, -0.5]]),
        ],
    )
    def test_rewards(self, kind: str, expected: list[list[float]]) -> None:
        scored = Scored(LOGPROBS, REFERENCE, LOGPROBS)
        found = penalize(kind)(SCORES, scored, MASK, jnp.float32(0.2))
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_the_whole_divergence(self) -> None:
        logits = jnp.log(
            jnp.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.98, 0.01, 0.01], [0.49, 0.02, 0.49]])
        )
        reference = jnp.log(
            jnp.array([[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.01, 0.01, 0.98], [0.01, 0.98, 0.01]])
        )
        found = kl_from_logits(logits, reference)
        np.testing.assert_allclose(found, [0.0851228, 0.3347953, 4.4474, 3.7361], atol=1e-4)
        np.testing.assert_array_equal(kl_from_logits(logits, logits), 0)
        padded = [jnp.pad(x, ((0, 0), (0, 2)), constant_values=-jnp.inf) for x in (logits, reference)]
        np.testing.assert_allclose(kl_from_logits(*padded), found, rtol=1e-6)

    def test_the_scoring_pass_compares_whole_distributions(self, whole_score: Any) -> None:
        policy, params, frozen, _ = tiny_policy("gpt2")
        moved, sequences, found = whole_score

        @jax.jit
        def logits(weights: Any) -> Any:
            trunk = policy.trunk(frozen, sequences.inputs)
            hidden = window_features(policy, weights, frozen, trunk, sequences).policy
            return policy.logits(weights, frozen, hidden) / 0.7

        expected = kl_from_logits(logits(moved), logits(params))
        np.testing.assert_allclose(found.full_kl, expected, rtol=1e-4, atol=1e-6)
        assert float(found.full_kl.min()) > 0

    def test_no_array_is_as_wide_as_the_vocabulary_times_the_window(self) -> None:
        policy, params, frozen, _ = tiny_policy("gpt2")
        hidden = jax.ShapeDtypeStruct((8, 64, 32), jnp.float32)

        def kl(hidden: Any) -> Any:
            return window_kl(
                policy, params, params, frozen, hidden, hidden, temperature=1.0, chunk_bytes=4 * 128 * 2 * 8
            )

        text = str(jax.make_jaxpr(kl)(hidden))
        assert "f32[8,1,128]" in text
        assert "f32[8,64,128]" not in text

    def test_it_must_have_been_scored(self) -> None:
        with pytest.raises(ValueError, match="`with_full_kl`"):
            KL_PENALTIES["full"](Scored(LOGPROBS, REFERENCE, LOGPROBS))

    @pytest.mark.parametrize("kind", ["abs", "mse"])
    def test_the_controller_and_the_metrics_see_the_penalty(self, batch: Rollouts, kind: str) -> None:
        scored = batch.scored._replace(ref_logprobs=batch.scored.ref_logprobs - 0.3)
        moved = batch._replace(scored=scored)
        mask = batch.sequences.mask
        expected = np.where(mask, KL_PENALTIES[kind](scored), 0).sum(axis=1).mean()
        mean = kl_per_sequence(moved, kind)
        assert float(mean.total / mean.weight) == pytest.approx(expected, rel=1e-5)
        targets = targets_of(
            moved.rewards, scored, mask, kl_coef=jnp.float32(0.1), gamma=1.0, gae_lambda=0.9, kl_penalty=kind
        )
        metrics = finalize(
            rollout_metrics(moved, Credit(targets.advantages, targets.returns), kl_penalty=kind, prefix="ppo")
        )
        assert metrics["kl/per_sequence"] == pytest.approx(expected, rel=1e-5)


class TestEarlyEnd:
    def test_a_threshold_that_is_never_met_changes_nothing(self, batch: Rollouts, plain: Any) -> None:
        state, metrics = run(batch, replace(BASE, max_policy_kl=1e9))
        same(state, plain[0])
        assert finalize(metrics) == pytest.approx(finalize(plain[1]), rel=1e-5, nan_ok=True)

    def test_the_epochs_after_the_first_excess_are_left_out(self, batch: Rollouts, stopped: Any) -> None:
        state, metrics = stopped
        taken = steps_taken(state)
        assert taken % STEPS_PER_EPOCH == 0
        assert STEPS_PER_EPOCH <= taken < BASE.ppo_epochs * STEPS_PER_EPOCH
        assert int(state.train.step) == BASE.ppo_epochs * STEPS_PER_EPOCH
        # A schedule that is to end with the run ends with it.
        assert int(state.train.opt_state.inner_state[-1].steps) == BASE.ppo_epochs * STEPS_PER_EPOCH
        actions = float(metrics["ppo/policy_kl"].weight)
        assert actions == pytest.approx(float(batch.sequences.mask.sum()) * taken / STEPS_PER_EPOCH)

    def test_what_ran_is_what_would_have_run(self, stopped: Any, kept: Any) -> None:
        state, metrics = stopped
        ran = steps_taken(state) // STEPS_PER_EPOCH * NUM_ROWS
        np.testing.assert_allclose(
            metrics[f"ppo/{RATIOS}"].rows[:ran], kept[1][f"ppo/{RATIOS}"].rows[:ran], rtol=1e-6
        )
        np.testing.assert_array_equal(metrics[f"ppo/{RATIOS}"].rows[ran:], -1)


class TestRatioGuard:
    def test_a_threshold_that_is_never_met_changes_nothing(self, batch: Rollouts, plain: Any) -> None:
        state, metrics = run(batch, replace(BASE, ratio_threshold=1e6))
        same(state, plain[0])
        assert finalize(metrics)["ppo/minibatches_left_out"] == 0

    def test_minibatches_above_it_take_no_step(self, guarded: Any) -> None:
        state, metrics = guarded
        jax.tree.map(np.testing.assert_array_equal, state.train.params, PARAMS)
        assert steps_taken(state) == 0
        assert finalize(metrics)["ppo/minibatches_left_out"] == 1
        assert finalize(metrics)["optim/skipped_steps"] == 0

    def test_it_takes_the_losses_alone(self, plain: Any, guarded: Any) -> None:
        found = finalize(guarded[1])
        lost = {name for name in finalize(plain[1]).keys() - found.keys() if name.startswith("ppo/")}
        assert lost == {"ppo/policy_loss", "ppo/value_loss"}
        assert found["ppo/ratio_mean"] == pytest.approx(1, abs=1e-5)

    def test_an_early_end_sees_what_is_left_out(self, batch: Rollouts) -> None:
        """Where the policy ran away, its KL is the largest there is."""
        scored = batch.scored._replace(logprobs=batch.scored.logprobs + 1.0)
        config = replace(BASE, ratio_threshold=0.1, max_policy_kl=0.5)
        _, metrics = run(batch._replace(scored=scored), config)
        found = finalize(metrics)
        assert found["ppo/minibatches_left_out"] == 1
        assert found["ppo/policy_kl"] == pytest.approx(1, rel=1e-4)
        assert float(metrics["ppo/policy_kl"].weight) == float(batch.sequences.mask.sum())

    def test_what_ran_away_does_not_reach_the_gradient(self, batch: Rollouts) -> None:
        # Old log-probabilities that make one minibatch's ratio huge, and values that overflow its loss.
        scored = batch.scored._replace(
            logprobs=batch.scored.logprobs.at[:4].add(-30.0), values=batch.scored.values.at[:4].set(1e30)
        )
        state, metrics = run(batch._replace(scored=scored), replace(BASE, ratio_threshold=5.0, ppo_epochs=1))
        assert finalize(metrics)["ppo/minibatches_left_out"] > 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.train.params))


def test_ratios_are_kept_one_an_action_and_epoch(batch: Rollouts, plain: Any, kept: Any) -> None:
    state, metrics = kept
    same(state, plain[0])
    rows = np.asarray(metrics[f"ppo/{RATIOS}"].rows)
    assert (rows >= 0).sum() == BASE.ppo_epochs * int(batch.sequences.mask.sum())
    first = rows[:8][rows[:8] >= 0]
    np.testing.assert_allclose(first, 1, atol=1e-5)
    assert rows[rows >= 0].mean() == pytest.approx(finalize(metrics)["ppo/ratio_mean"], rel=1e-5)
    assert f"ppo/{RATIOS}" not in finalize(metrics)


class TestScores:
    def test_centred_scaled_and_clipped_on_the_last_action(self) -> None:
        mask = jnp.array([[True, True, False], [True, True, True], [False, False, False]])
        scores = jnp.array([[1.0, 2.0, 9.0], [0.0, 0.0, 7.0], [9.0, 9.0, 9.0]])
        found, moments = scaled(
            scores, mask, first_moments(None), clip_range=None, mode="running", center=True
        )
        np.testing.assert_allclose(float(moments.running.mean), 5)
        totals = np.where(mask, found, 0).sum(axis=1)
        np.testing.assert_allclose(totals[:2], np.array([-2, 2]) / np.std([3, 7], ddof=1), rtol=1e-5)
        np.testing.assert_allclose(found[0, 0], 1 / np.std([3, 7], ddof=1), rtol=1e-5)
        clipped, _ = scaled(
            scores,
            mask,
            first_moments(None),
            clip_range=None,
            mode="running",
            center=True,
            scaled_clip_range=0.5,
        )
        np.testing.assert_allclose(clipped, np.clip(found, -0.5, 0.5))

    def test_rewards_are_whitened_before_the_advantages(self) -> None:
        values = jnp.zeros_like(SCORES)
        scored = Scored(LOGPROBS, LOGPROBS, values)
        targets = targets_of(
            SCORES, scored, MASK, kl_coef=jnp.float32(0), gamma=1.0, gae_lambda=1.0, whiten_rewards=True
        )
        real = np.asarray(SCORES)[np.asarray(MASK)]
        whitened = (real - real.mean()) / real.std(ddof=1) + real.mean()
        first = whitened[:3].sum(), whitened[3:].sum()
        np.testing.assert_allclose(targets.returns[0, 1], first[0], rtol=1e-5)
        np.testing.assert_allclose(targets.returns[1, 2], first[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kl_penalty", "k3"),
        ("center_reward", True),
        ("cliprange_scaled_reward", 0.0),
        ("max_policy_kl", -1.0),
        ("ratio_threshold", 0.0),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`method.{field}`"):
        PPOConfig(**{field: value})
