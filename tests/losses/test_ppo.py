# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import Targets, ppo_loss
from jrl.ops import entropy_from_logits, finalize, logprobs_from_logits, whiten

loss = partial(ppo_loss, clip_range=0.2, value_clip_range=0.2, value_coef=0.5, entropy_coef=0.0)

# trlX (AcceleratePPO.loss), ε = ε_v = 0.2, vf_coef = 0.5; advantages and returns as in tests/ops/test_returns
TRLX = Targets(
    old_logprobs=jnp.array([[-1.0, -2.0, -0.5, -1.5], [-0.7, -1.2, -2.2, 0.0]]),
    old_values=jnp.array([[0.1, 0.2, 0.3, 0.4], [0.5, -0.1, 0.2, 0.0]]),
    advantages=jnp.array(
        [[0.817895, 0.784056, 0.353372, 1.196795], [-1.676390, -0.525349, 0.082139, -1.032518]]
    ),
    returns=jnp.array([[0.598022, 0.688915, 0.673, 1.0], [0.326708, 0.0365, 0.5, 0.0]]),
    mask=jnp.array([[True, True, True, True], [True, True, True, False]]),
)
TRLX_LOGPROBS = jnp.array([[-0.9, -2.3, -0.5, -1.0], [-0.9, -1.1, -2.0, -3.0]])
TRLX_VALUES = jnp.array([[0.2, 0.1, 0.9, 0.4], [0.1, -0.2, 0.3, 5.0]])


def numbers(out) -> dict[str, float]:
    return finalize(out.metrics) | {"loss": float(out.loss_sum / out.weight)}


def objective(logprobs, values, entropy, targets, **overrides):
    return loss(logprobs, values, entropy, targets, **overrides).loss_sum


class TestGolden:
    def test_trlx(self):
        got = numbers(loss(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX))
        expected = {
            "loss": -0.1648159,
            "ppo/policy_loss": -0.2028195,
            "ppo/value_loss": 0.0760071,
            "ppo/clip_fraction": 0.2857143,
            "ppo/value_clip_fraction": 0.0,
            "ppo/ratio_mean": 1.0914307,
            # trlX divides by all 8 positions, padding included; the mean over the 7 actions is 8/7 of it
            "ppo/approx_kl": 0.0300018 * 8 / 7,
        }
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-5)

    def test_trl(self):
        # TRL 0.7.1, PPOTrainer.loss: the policy moves by (0.05, 0.5, −0.3), (−0.3, 0.2, 0.05) at the actions
        targets = Targets(
            old_logprobs=jnp.array([[-1.0, -0.5, -2.0, -0.3, -1.2], [-0.7, -1.1, -0.2, -0.9, -0.4]]),
            old_values=jnp.array([[0.0, 0.1, 0.2, 0.4, 0.0], [0.0, 0.0, -0.1, 0.3, 0.6]]),
            advantages=jnp.array(
                [
                    [1.091116, 1.031166, 0.944102, 0.636814, -0.046046],
                    [-0.512379, -0.536922, -0.442958, -0.871168, -1.297956],
                ]
            ),
            returns=jnp.array(
                [[0.999175, 1.0465, 1.07, 1.0, 0.0], [-0.409747, -0.431312, -0.44875, -0.425, -0.5]]
            ),
            mask=jnp.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool),
        )
        logprobs = jnp.array([[-0.9, -0.45, -1.5, -0.6, -1.2], [-0.7, -1.1, -0.5, -0.7, -0.35]])
        values = jnp.array([[0.2, 0.4, 0.15, 0.5, 0.9], [0.4, 0.3, 0.3, 0.25, 0.2]])
        rows, columns = jnp.meshgrid(jnp.arange(2.0), jnp.arange(5.0), indexing="ij")
        logits = jnp.stack([0.1 * rows, 0.2 * columns, jnp.full((2, 5), -0.3)], axis=-1)
        got = numbers(loss(logprobs, values, entropy_from_logits(logits), targets, value_coef=0.1))
        expected = {
            "loss": 0.0446987,
            "ppo/policy_loss": 0.0156994,
            "ppo/value_loss": 0.2899928,
            "ppo/entropy": 1.0413905,
            "ppo/clip_fraction": 1 / 3,
            "ppo/value_clip_fraction": 1 / 3,
        }
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-5)

    def test_lore_5_13_clip_metrics_are_split_by_side_and_sign(self):
        # clipped: 1.5 with A > 0 (high); 0.5 and 0.7 with A < 0 (low). Not: 1.5 with A < 0, 0.5 with A > 0
        ratios = jnp.array([[1.5, 1.5, 0.5, 0.5, 0.7]])
        zeros = jnp.zeros((1, 5))
        targets = Targets(zeros, zeros, jnp.array([[1.0, -1.0, -1.0, 1.0, -1.0]]), zeros, zeros == 0)
        got = numbers(loss(jnp.log(ratios), zeros, None, targets))
        k3 = ratios - 1 - jnp.log(ratios)
        expected = {
            "ppo/clip_fraction": 0.6,
            "ppo/clip_fraction_high_positive": 0.2,
            "ppo/clip_fraction_low_negative": 0.4,
            "ppo/ratio_mean": 0.94,
            "ppo/ratio_max": 1.5,
            "ppo/log_ratio_abs_max": float(jnp.log(2.0)),
            "ppo/approx_kl": float(jnp.mean(k3)),
        }
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-6)


class TestIdentities:
    def test_lore_5_5_on_policy_the_loss_is_zero_and_the_gradient_is_not(self):
        targets = TRLX._replace(old_logprobs=TRLX_LOGPROBS, advantages=whiten(TRLX.advantages, TRLX.mask))
        value, gradient = jax.value_and_grad(objective)(
            TRLX_LOGPROBS, TRLX_VALUES, None, targets, value_coef=0.0
        )
        assert float(value) == pytest.approx(0.0, abs=1e-6)
        np.testing.assert_allclose(gradient, -targets.advantages, atol=1e-6)
        assert float(jnp.linalg.norm(gradient)) > 1.0

    def test_first_step_has_ratio_one_and_no_kl(self):
        got = numbers(loss(TRLX.old_logprobs, TRLX_VALUES, None, TRLX))
        assert (got["ppo/ratio_mean"], got["ppo/ratio_max"], got["ppo/approx_kl"]) == (1.0, 1.0, 0.0)

    def test_microbatches_add_up(self):
        whole = loss(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX)
        parts = [
            loss(
                TRLX_LOGPROBS[i : i + 1],
                TRLX_VALUES[i : i + 1],
                None,
                jax.tree.map(lambda x, i=i: x[i : i + 1], TRLX),
            )
            for i in range(2)
        ]
        assert float(whole.weight) == sum(float(part.weight) for part in parts) == 7.0
        assert float(whole.loss_sum) == pytest.approx(sum(float(part.loss_sum) for part in parts), abs=1e-5)

    def test_jit_equals_eager_with_traced_hyperparameters(self):
        traced = jax.jit(
            lambda clip_range: objective(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX, clip_range=clip_range)
        )
        eager = objective(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX)
        assert float(traced(jnp.float32(0.2))) == pytest.approx(float(eager), abs=1e-6)


class TestGradients:
    def test_lore_5_6_no_gradient_reaches_the_targets(self):
        inexact = {name: x for name, x in TRLX._asdict().items() if x is not None}
        mask = inexact.pop("mask")

        def leak(fixed):
            entropy = jnp.ones_like(TRLX_VALUES)
            return objective(
                TRLX_LOGPROBS, TRLX_VALUES, entropy, Targets(**fixed, mask=mask), entropy_coef=0.1
            )

        for name, gradient in jax.grad(leak)(inexact).items():
            assert not gradient.any(), name

    def test_lore_1_7_context_tokens_have_no_influence(self):
        mask = TRLX.mask.at[0, 1].set(False)  # a tool turn inside the row
        entropy = jnp.full((2, 4), 0.5)
        live = (TRLX_LOGPROBS, TRLX_VALUES, entropy)
        run = jax.value_and_grad(partial(objective, entropy_coef=0.1), argnums=(0, 1, 2))
        clean_value, clean_gradients = run(*live, TRLX._replace(mask=mask))
        for garbage in (jnp.nan, jnp.inf, 123.0):

            def spoil(x, garbage=garbage):
                return jnp.where(mask, x, garbage)

            targets = Targets(*map(spoil, TRLX[:4]), mask)
            value, gradients = run(*map(spoil, live), targets)
            assert value == clean_value
            for gradient, clean in zip(gradients, clean_gradients, strict=True):
                np.testing.assert_array_equal(gradient, clean)
                assert not gradient[~mask].any()

    def test_lore_1_12_rows_without_actions_add_nothing(self):
        mask = TRLX.mask.at[1].set(False)
        run = jax.value_and_grad(lambda x, v, t: objective(x, v, None, t), argnums=(0, 1))
        value, gradients = run(TRLX_LOGPROBS, TRLX_VALUES, TRLX._replace(mask=mask))
        alone = jax.tree.map(lambda x: x[:1], TRLX._replace(mask=mask))
        alone_value, alone_gradients = run(TRLX_LOGPROBS[:1], TRLX_VALUES[:1], alone)
        assert value == alone_value
        for gradient, alone_gradient in zip(gradients, alone_gradients, strict=True):
            np.testing.assert_array_equal(gradient, jnp.pad(alone_gradient, ((0, 1), (0, 0))))

    def test_a_batch_without_actions_is_zero_and_not_nan(self):
        out = loss(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX._replace(mask=jnp.zeros_like(TRLX.mask)))
        assert (float(out.loss_sum), float(out.weight), finalize(out.metrics)) == (0.0, 0.0, {})

    def test_lore_2_11_extreme_log_ratios_are_finite_and_reported(self):
        logprobs = TRLX.old_logprobs + jnp.array([[200.0, -200.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        value, gradient = jax.value_and_grad(objective)(logprobs, TRLX_VALUES, None, TRLX)
        assert jnp.isfinite(value)
        assert jnp.isfinite(gradient).all()
        got = numbers(loss(logprobs, TRLX_VALUES, None, TRLX))
        assert got["ppo/log_ratio_abs_max"] == pytest.approx(200.0)
        assert np.isfinite(list(got.values())).all()


class TestEntropyBonus:
    def test_lore_5_10_the_bonus_raises_entropy_on_a_bandit(self):
        """No reward at all: with the bonus, gradient descent must flatten the policy."""
        actions = jnp.array([[0, 1, 2]])
        zeros = jnp.zeros((1, 3))

        def bandit(logits):
            rows = jnp.broadcast_to(logits, (1, 3, 3))
            logprobs = logprobs_from_logits(rows, actions)
            targets = Targets(logprobs, zeros, zeros, zeros, zeros == 0)
            return objective(logprobs, zeros, entropy_from_logits(rows), targets, entropy_coef=0.1)

        step = jax.jit(lambda logits: logits - jax.grad(bandit)(logits))
        logits = jnp.array([2.0, 0.0, -1.0])
        entropies = [float(entropy_from_logits(logits))]
        for _ in range(5):
            logits = step(logits)
            entropies.append(float(entropy_from_logits(logits)))
        assert all(later > earlier + 1e-3 for earlier, later in itertools.pairwise(entropies))

    def test_without_entropy_there_is_no_metric(self):
        assert "ppo/entropy" not in loss(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX).metrics

    def test_a_bonus_needs_the_entropy(self):
        with pytest.raises(ValueError, match="`entropy` must be given where `entropy_coef` is not 0"):
            loss(TRLX_LOGPROBS, TRLX_VALUES, None, TRLX, entropy_coef=0.01)
