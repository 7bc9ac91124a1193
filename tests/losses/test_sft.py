# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.losses import sft_loss
from jrl.losses.sft import LOSSES, dft
from jrl.ops import finalize, logprobs_from_logits

LOGPROBS = jnp.array([[-0.5, -1.5, -9.0], [-2.0, -9.0, -9.0]])
MASK = jnp.array([[True, True, False], [True, False, False]])


class TestSFTLoss:
    def test_golden(self):
        # 0.5 + 1.5 + 2.0 over three tokens
        out = sft_loss(LOGPROBS, MASK)
        assert (float(out.loss_sum), float(out.weight)) == (4.0, 3.0)
        np.testing.assert_allclose(finalize(out.metrics)["sft/loss"], 4 / 3, rtol=1e-6)

    def test_gradient_is_softmax_minus_onehot(self):
        logits, targets = jnp.array([[[0.0, 1.0], [2.0, 0.0]]]), jnp.array([[1, 0]])
        mask = jnp.array([[True, False]])
        gradient = jax.grad(lambda x: sft_loss(logprobs_from_logits(x, targets), mask).loss_sum)(logits)
        np.testing.assert_allclose(gradient, [[[0.268941, -0.268941], [0.0, 0.0]]], atol=1e-6)

    def test_lore_1_7_context_tokens_have_no_influence(self):
        dirty = jnp.where(MASK, LOGPROBS, jnp.nan)
        value, gradient = jax.value_and_grad(lambda x: sft_loss(x, MASK).loss_sum)(dirty)
        assert float(value) == 4.0
        np.testing.assert_array_equal(gradient, -MASK.astype(jnp.float32))

    def test_lore_1_12_an_empty_row_adds_nothing(self):
        mask = MASK.at[1].set(False)
        with_row, without = sft_loss(LOGPROBS, mask), sft_loss(LOGPROBS[:1], mask[:1])
        assert (with_row.loss_sum, with_row.weight) == (without.loss_sum, without.weight)
        nothing = sft_loss(LOGPROBS, jnp.zeros_like(MASK))
        assert (float(nothing.loss_sum), float(nothing.weight), finalize(nothing.metrics)) == (0.0, 0.0, {})


class TestDynamicFineTuning:
    def test_golden(self):
        # Each token's loss times its own probability: e^-0.5·0.5 + e^-1.5·1.5 + e^-2·2 over three tokens.
        out = sft_loss(LOGPROBS, MASK, token_loss=dft)
        expected = sum(np.exp(-x) * x for x in (0.5, 1.5, 2.0))
        np.testing.assert_allclose(out.loss_sum, expected, rtol=1e-6)
        assert float(out.weight) == 3.0

    def test_no_gradient_flows_through_the_weight(self):
        gradient = jax.grad(lambda x: sft_loss(x, MASK, token_loss=dft).loss_sum)(LOGPROBS)
        np.testing.assert_allclose(gradient, jnp.where(MASK, -jnp.exp(LOGPROBS), 0.0), rtol=1e-6)

    def test_of_certain_tokens_it_is_the_likelihood(self):
        small = LOGPROBS * 1e-4
        np.testing.assert_allclose(
            sft_loss(small, MASK, token_loss=dft).loss_sum, sft_loss(small, MASK).loss_sum, rtol=1e-3
        )

    def test_lore_7_7_what_is_masked_may_be_anything(self):
        dirty = jnp.where(MASK, LOGPROBS, jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
        value, gradient = jax.value_and_grad(lambda x: sft_loss(x, MASK, token_loss=dft).loss_sum)(dirty)
        assert np.isfinite(value) and np.isfinite(gradient).all()

    def test_every_name_of_the_configuration_is_a_loss(self):
        assert set(LOSSES) == {"nll", "dft"}
