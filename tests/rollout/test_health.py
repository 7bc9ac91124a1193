# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.logprobs import logprobs_from_logits
from jrl.ops.metrics import finalize
from jrl.rollout.health import sampler_agreement

LOGITS = 2.0 * jax.random.normal(jax.random.key(0), (10,))
TOKENS = jax.random.categorical(jax.random.key(1), LOGITS, shape=(64, 512))
MASK = jnp.ones(TOKENS.shape, bool)


def logprobs(logits):
    return logprobs_from_logits(jnp.broadcast_to(logits, (*TOKENS.shape, 10)), TOKENS)


def health(learner, sampler, mask=MASK):
    return finalize(sampler_agreement(learner, sampler, mask))


class TestHealth:
    def test_equal_policies_are_healthy(self):
        found = health(logprobs(LOGITS), logprobs(LOGITS))
        assert found["sampler/abs_ratio"] == found["sampler/ratio"] == 1.0
        assert found["sampler/kl_k3"] == found["sampler/max_difference"] == 0.0

    def test_lore_2_10_a_biased_sampler_moves_three_figures_and_not_the_mean_ratio(self):
        found = health(logprobs(1.2 * LOGITS), logprobs(LOGITS))
        assert found["sampler/abs_ratio"] > 1.02
        assert found["sampler/kl_k3"] > 1e-3
        assert found["sampler/max_difference"] > 0.1
        assert abs(found["sampler/ratio"] - 1.0) < 0.01

    def test_lore_2_10_a_false_record_moves_the_mean_ratio(self):
        # The sampler drew at temperature 1 and wrote down the log-probabilities of temperature ½.
        found = health(logprobs(LOGITS), logprobs(2.0 * LOGITS))
        assert abs(found["sampler/ratio"] - 1.0) > 0.1

    def test_masked_positions_do_not_count(self):
        mask = MASK.at[:, 100:].set(False)
        garbage = jnp.where(mask, logprobs(LOGITS), jnp.nan)
        found = health(garbage, logprobs(LOGITS), mask)
        assert all(np.isfinite(value) for value in found.values())
        assert found["sampler/max_difference"] == 0.0
