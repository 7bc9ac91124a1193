# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.losses import sft_loss
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
