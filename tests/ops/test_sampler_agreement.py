# SPDX-License-Identifier: Apache-2.0
"""The four figures of sampler against learner, and the two faults they are there for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.metrics import finalize
from jrl.ops.sampler_agreement import sampler_agreement
from jrl.ops.sampling import draw, keep_top_p

draw_row = jax.jit(draw)
measure = jax.jit(sampler_agreement)
ALARMS = {"sampler/abs_ratio": 1.02, "sampler/kl_k3": 1e-3}


def health(logprobs, sampler_logprobs, mask=None):
    logprobs, sampler_logprobs = jnp.asarray(logprobs), jnp.asarray(sampler_logprobs)
    mask = jnp.ones(logprobs.shape, bool) if mask is None else jnp.asarray(mask)
    return finalize(measure(logprobs, sampler_logprobs, mask))


def sampled(sampler_logits, key):
    """Ids of a sampler with these logits (B V), T = 1, and its record."""
    return draw_row(sampler_logits, jax.random.uniform(key, (sampler_logits.shape[0],)))


@jax.jit
def logprobs_of(logits, tokens):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)


def test_golden():
    # d = 0.5, −0.5: e^|d| = 1.648721; k3 = mean(e^d − 1 − d) = (0.148721 + 0.106531)/2; ratio = cosh 0.5.
    found = health([[-1.0, -2.0, 9.0]], [[-1.5, -1.5, -9.0]], [[True, True, False]])
    assert found == pytest.approx(
        {
            "sampler/abs_ratio": 1.648721,
            "sampler/kl_k3": 0.127626,
            "sampler/max_difference": 0.5,
            "sampler/ratio": 1.127626,
        },
        abs=1e-6,
    )


def test_agreement_is_exact():
    logprobs = [[-0.25, -7.0]]
    values = list(health(logprobs, logprobs).values())
    assert values == [1.0, 0.0, 0.0, 1.0]


def test_masked_positions_are_not_read_and_extremes_stay_finite():
    logprobs, sampler = [[-1.0, np.nan, -250.0]], [[-1.0, -np.inf, -50.0]]
    found = health(logprobs, sampler, [[True, False, False]])
    assert list(found.values()) == [1.0, 0.0, 0.0, 1.0]
    extreme = health(logprobs, sampler, [[True, False, True]])
    assert np.isfinite(list(extreme.values())).all()
    assert extreme["sampler/max_difference"] == 200.0


class TestFaults:
    """A learner over 10 tokens and 20,000 draws: a mean ratio is known to about ± 0.001."""

    logits = np.float32(np.broadcast_to(np.random.default_rng(0).normal(size=10), (20_000, 10)))

    def test_lore_2_10_a_healthy_pair_raises_no_alarm(self, key):
        tokens, record = sampled(self.logits, key)
        found = health(logprobs_of(self.logits, tokens), record[:, None])
        assert all(found[name] < limit for name, limit in ALARMS.items())
        assert found["sampler/max_difference"] < 1e-6
        assert found["sampler/ratio"] == pytest.approx(1.0, abs=1e-6)

    def test_lore_2_10_a_biased_sampler_alarms_but_its_record_is_honest(self, key):
        biased = np.float32(self.logits + np.where(np.arange(10) % 2, 0.05, -0.05)[None])
        tokens, record = sampled(biased, key)
        healthy = health(logprobs_of(biased, tokens), record[:, None])
        found = health(logprobs_of(self.logits, tokens), record[:, None])
        assert found["sampler/abs_ratio"] > ALARMS["sampler/abs_ratio"]
        assert found["sampler/kl_k3"] > ALARMS["sampler/kl_k3"]
        assert found["sampler/max_difference"] > 100 * healthy["sampler/max_difference"]
        assert found["sampler/ratio"] == pytest.approx(1.0, abs=2e-3)

    def test_lore_2_10_a_false_record_moves_the_mean_ratio(self, key):
        """The record is of the raw distribution, the draw of the one with top-p 0.7."""
        processed = jax.jit(keep_top_p)(self.logits, jnp.float32(0.7))
        tokens, honest = sampled(processed, key)
        learner = logprobs_of(processed, tokens)
        assert health(learner, honest[:, None])["sampler/ratio"] == pytest.approx(1.0, abs=1e-5)
        raw = logprobs_of(self.logits, tokens)
        found = health(learner, raw)
        assert found["sampler/ratio"] > 1.02
        weights = np.exp(self.logits[0])
        kept_mass = weights[np.isfinite(processed[0])].sum() / weights.sum()
        assert found["sampler/ratio"] == pytest.approx(1 / kept_mass, rel=1e-4)
