# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import (
    drop_weights,
    effective_sample_size,
    geometric_weights,
    off_policy_rows,
    sequence_weights,
    token_weights,
    truncate_weights,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "policy_gradient.json").read_text())
BATCH = GOLDEN["batch"]
MASK = jnp.asarray(np.asarray(BATCH["mask"], bool))
OLD, SAMPLER = (
    jnp.where(MASK, jnp.asarray(BATCH[name], jnp.float32), jnp.nan)
    for name in ("old_logprobs", "sampler_logprobs")
)
SCHEMES = {
    "trl_token_truncate": lambda *given: truncate_weights(token_weights(*given), cap=1.5),
    "trl_token_mask": lambda *given: drop_weights(token_weights(*given), low=0.0, high=1.5),
    "trl_sequence_truncate": lambda *given: truncate_weights(sequence_weights(*given), cap=1.6),
    "trl_sequence_mask": lambda *given: drop_weights(sequence_weights(*given), low=0.0, high=1.6),
    "icepop_token": lambda *given: drop_weights(token_weights(*given), low=0.5, high=2.0),
    "geometric_mask": lambda *given: drop_weights(geometric_weights(*given), low=0.9, high=1.1),
}


@pytest.mark.parametrize("name", SCHEMES)
class TestEveryScheme:
    def test_golden_weights_and_sample_size(self, name):
        wanted, found = GOLDEN["sampler_weights"][name], SCHEMES[name](OLD, SAMPLER, MASK)
        weights = np.broadcast_to(np.asarray(wanted["value"]), MASK.shape)
        np.testing.assert_allclose(found[MASK], weights[np.asarray(MASK)], rtol=1e-5)
        assert float(effective_sample_size(found, MASK)) == pytest.approx(wanted["ess"], rel=1e-5)

    def test_where_sampler_and_anchor_agree_it_returns_the_bits_of_none(self, name):
        found = SCHEMES[name](OLD, OLD, MASK)
        losses = jax.random.normal(jax.random.key(0), MASK.shape)
        np.testing.assert_array_equal(found * losses, losses)

    def test_where_they_agree_up_to_rounding_no_threshold_acts(self, name):
        noise = 1e-5 * jax.random.uniform(jax.random.key(1), MASK.shape, minval=-1.0)
        found = SCHEMES[name](OLD, OLD + noise, MASK)
        np.testing.assert_allclose(found[MASK], 1.0, atol=7e-5)

    def test_no_gradient_flows_through(self, name):
        for which in (0, 1):
            clean = [jnp.where(MASK, x, 0.0) for x in (OLD, SAMPLER)]
            gradient = jax.grad(lambda *given: jnp.sum(SCHEMES[name](*given, MASK)), which)(*clean)
            np.testing.assert_array_equal(gradient, np.zeros(MASK.shape))


def test_lore_6_2_what_is_outside_the_band_weighs_nothing():
    weights = jnp.array([[0.499, 0.5, 1.0, 5.0, 5.001]])
    np.testing.assert_array_equal(
        drop_weights(weights, low=0.5, high=5.0), jnp.array([[0.0, 0.5, 1.0, 5.0, 0.0]])
    )
    # The sequence form looks at the geometric mean: long rows are not dropped for their length alone.
    gap = jnp.full((1, 400), 0.008)
    every = jnp.ones((1, 400), bool)
    whole, mean = (
        form(gap, jnp.zeros((1, 400)), every)[0, 0] for form in (sequence_weights, geometric_weights)
    )
    assert float(whole) == pytest.approx(np.exp(3.2), rel=1e-4) and float(mean) == pytest.approx(
        1.008, rel=1e-4
    )


@pytest.mark.parametrize(
    ("weights", "share"),
    [([0.3] * 4, 1.0), ([0.0, 0.0, 2.0, 0.0], 0.25), ([1.0, 1.0, 3.0, 3.0], 64 / (4 * 20)), ([0.0] * 4, 0.0)],
)
def test_lore_6_6_the_effective_sample_size_has_its_closed_forms(weights, share):
    padded = jnp.array([[*weights, jnp.nan]])
    mask = jnp.array([[True] * 4 + [False]])
    assert float(effective_sample_size(padded, mask)) == pytest.approx(share, rel=1e-6)


class TestOffPolicyRows:
    MASK = jnp.array([[True, True, False]] * 3)
    NOW = jnp.array([[-1.0, -3.0, jnp.nan]] * 3)

    def test_bad_rows_that_the_policy_left_are_dropped_whole(self):
        """Gaps of mean 0.5: dropped over 0.4 where A < 0, never where A >= 0."""
        sampler = self.NOW + jnp.array([[1.0, 0.0, 0.0]])
        advantages = jnp.array([[-1.0, -1.0, jnp.nan], [1.0, 1.0, jnp.nan], [0.0, 0.0, jnp.nan]])
        for threshold, wanted in ((0.4, [True, False, False]), (0.6, [False] * 3)):
            found = off_policy_rows(self.NOW, sampler, advantages, self.MASK, threshold=threshold)
            np.testing.assert_array_equal(found, np.repeat(np.array(wanted)[:, None], 3, axis=1))


def test_bounds_with_nothing_between_them_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`low` must be at most `high`, 0\.5, got 2\.0"):
        drop_weights(jnp.ones((1, 2)), low=2.0, high=0.5)
