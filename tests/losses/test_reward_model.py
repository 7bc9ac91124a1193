# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import centering_loss, pairwise_loss, reward_model_loss
from jrl.ops import finalize
from tests.golden.newest_trl import PYTHON as NEWEST
from tests.golden.newest_trl import WHY_NOT

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "plain": (False, 0.0),
    "margin": (True, 0.0),
    "centred": (False, 0.01),
    "margin_centred": (True, 0.01),
}
CHOSEN, REJECTED = jnp.array([1.0, 0.5]), jnp.array([0.2, 0.7])
MARGINS, NONE, VALID = jnp.array([0.3, 0.0]), jnp.zeros(2), jnp.ones(2, bool)


def mean_loss(chosen, rejected, margins, valid=None, *, center_coef=0.0):
    valid = jnp.ones(chosen.shape, bool) if valid is None else valid
    out = reward_model_loss(chosen, rejected, margins, valid, center_coef=center_coef)
    return out.loss_sum / out.weight


def metrics_of(chosen, rejected, valid=None, *, margins=None, center_coef=0.0):
    valid = jnp.ones(chosen.shape, bool) if valid is None else valid
    margins = jnp.zeros(chosen.shape) if margins is None else margins
    return finalize(reward_model_loss(chosen, rejected, margins, valid, center_coef=center_coef).metrics)


class TestGolden:
    @pytest.mark.parametrize(
        ("margins", "center_coef", "expected"),
        [
            (NONE, 0.0, 0.5846198),
            (MARGINS, 0.0, 0.6361079),
            (NONE, 0.01, 0.5990198),
            (MARGINS, 0.01, 0.6505079),
        ],
    )
    def test_lore_8_4_two_pairs(self, margins, center_coef, expected):
        # −log σ(.8) = .371101, −log σ(−.2) = .798139; margin .3: −log σ(.5) = .474077; (1.2² + 1.2²)/2 = 1.44
        loss = mean_loss(CHOSEN, REJECTED, margins, center_coef=center_coef)
        np.testing.assert_allclose(loss, expected, atol=1e-6)

    def test_a_margin_belongs_to_its_own_pair(self):
        """All margins against all pairs, as where a row meets a column, would give 0.6543484."""
        np.testing.assert_allclose(pairwise_loss(CHOSEN, REJECTED, MARGINS)[1], 0.798139, atol=1e-6)
        with pytest.raises(
            ValueError, match=r"`margins` must have shape \(2, 1\) like `chosen_scores`, got \(2,\)"
        ):
            jax.eval_shape(pairwise_loss.__wrapped__, CHOSEN[:, None], REJECTED[:, None], MARGINS)

    def test_metrics(self):
        found = metrics_of(jnp.array([1.0, 0.5, 2.0]), jnp.array([0.2, 0.7, 2.0]), margins=jnp.full(3, 9.0))
        assert found["reward_model/accuracy"] == pytest.approx(
            1 / 3
        )  # a tie is wrong, and margins are left aside
        assert found["reward_model/margin"] == pytest.approx(0.2)
        assert found["reward_model/score_min"] == pytest.approx(0.2)
        assert found["reward_model/score_mean"] == pytest.approx(6.4 / 6)
        assert found["reward_model/score_max"] == 2.0


class TestIdentities:
    def test_lore_8_4_a_zero_head_starts_at_ln_two_and_ties_are_no_success(self):
        zero = jnp.zeros(5)
        found = metrics_of(zero, zero)
        assert found["reward_model/loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert found["reward_model/accuracy"] == 0.0

    def test_lore_8_4_swapping_the_pair_negates_the_margin(self):
        """softplus(−Δ) − softplus(Δ) = −Δ, and everything that does not know which is which stays."""
        rng = np.random.default_rng(0)
        chosen, rejected = jnp.asarray(rng.normal(size=(2, 8)) * 3, jnp.float32)
        there = pairwise_loss(chosen, rejected, jnp.zeros(8))
        back = pairwise_loss(rejected, chosen, jnp.zeros(8))
        np.testing.assert_allclose(there - back, rejected - chosen, atol=1e-5)
        ours, swapped = metrics_of(chosen, rejected), metrics_of(rejected, chosen)
        assert swapped["reward_model/margin"] == pytest.approx(-ours["reward_model/margin"], abs=1e-6)
        assert swapped["reward_model/accuracy"] == pytest.approx(1 - ours["reward_model/accuracy"])
        for name in ("score_min", "score_mean", "score_max"):
            assert swapped[f"reward_model/{name}"] == pytest.approx(ours[f"reward_model/{name}"], abs=1e-6)
        np.testing.assert_array_equal(centering_loss(chosen, rejected), centering_loss(rejected, chosen))

    def test_a_margin_is_a_shift_of_the_chosen_score(self):
        shifted = pairwise_loss(CHOSEN - MARGINS, REJECTED, NONE)
        np.testing.assert_allclose(pairwise_loss(CHOSEN, REJECTED, MARGINS), shifted, atol=1e-6)

    def test_the_comparison_does_not_see_a_constant_and_the_centering_term_does(self):
        moved = mean_loss(CHOSEN + 7.0, REJECTED + 7.0, NONE)
        np.testing.assert_allclose(moved, mean_loss(CHOSEN, REJECTED, NONE), atol=1e-5)
        assert float(centering_loss(CHOSEN, -CHOSEN).sum()) == 0.0
        assert float(centering_loss(CHOSEN + 7.0, -CHOSEN + 7.0).sum()) == pytest.approx(2 * 14.0**2)


class TestStability:
    @pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4])
    def test_lore_8_4_extreme_margins_are_finite(self, difference):
        chosen, rejected = jnp.array([difference]), jnp.array([0.0])
        loss, (up, down) = jax.value_and_grad(lambda c, r: mean_loss(c, r, jnp.zeros(1)), argnums=(0, 1))(
            chosen, rejected
        )
        assert float(loss) == pytest.approx(max(0.0, -difference), abs=1e-6)
        # σ(−Δ): nothing left to learn, or the full push.
        np.testing.assert_allclose([up[0], down[0]], [-1.0, 1.0] if difference < 0 else [0.0, 0.0], atol=1e-6)

    def test_pairs_that_only_fill_up_are_never_read(self):
        valid = jnp.array([True, False])
        dirty_chosen, dirty_rejected = CHOSEN.at[1].set(jnp.nan), REJECTED.at[1].set(jnp.inf)
        dirty_margins = MARGINS.at[1].set(jnp.nan)

        def loss(chosen, rejected, margins):
            return mean_loss(chosen, rejected, margins, valid, center_coef=0.01)

        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(dirty_chosen, dirty_rejected, dirty_margins)
        alone = mean_loss(CHOSEN[:1], REJECTED[:1], MARGINS[:1], center_coef=0.01)
        np.testing.assert_allclose(value, alone, atol=1e-6)
        assert float(grads[0][1]) == float(grads[1][1]) == 0.0
        assert metrics_of(dirty_chosen, dirty_rejected, valid)["reward_model/score_max"] == 1.0
        nothing = reward_model_loss(CHOSEN, REJECTED, NONE, jnp.zeros(2, bool), center_coef=0.01)
        assert (float(nothing.loss_sum), float(nothing.weight), finalize(nothing.metrics)) == (0.0, 0.0, {})

    def test_a_mask_of_numbers_is_refused(self):
        with pytest.raises(TypeError, match="`valid` must be bool"):
            jax.eval_shape(
                lambda v: reward_model_loss.__wrapped__(CHOSEN, REJECTED, NONE, v, center_coef=0.0),
                jnp.ones(2),
            )


def check_against(golden, cases, *, atol=2e-6):
    chosen, rejected, margins = (jnp.asarray(golden[name]) for name in ("chosen", "rejected", "margins"))
    for case in cases:
        with_margin, center_coef = CASES[case]
        given = margins if with_margin else jnp.zeros_like(margins)

        def loss(c, r, given=given, center_coef=center_coef):
            return mean_loss(c, r, given, center_coef=center_coef)

        value, (up, down) = jax.value_and_grad(loss, argnums=(0, 1))(chosen, rejected)
        np.testing.assert_allclose(value, golden[f"{case}_loss"], rtol=1e-6, err_msg=case)
        np.testing.assert_allclose(up, golden[f"{case}_chosen_gradient"], atol=atol, err_msg=case)
        np.testing.assert_allclose(down, golden[f"{case}_rejected_gradient"], atol=atol, err_msg=case)


class TestAgainstTRL:
    """Files of `tests/golden/make_trl_reward.py`, whose head says which versions made them."""

    def test_lore_8_4_values_and_gradients_of_trl_1_16(self):
        golden = np.load(GOLDEN / "trl_reward_modern.npz")
        check_against(golden, CASES)
        chosen, rejected = jnp.asarray(golden["chosen"]), jnp.asarray(golden["rejected"])
        found = metrics_of(chosen, rejected, margins=jnp.asarray(golden["margins"]), center_coef=0.01)
        theirs = {"min_reward": "score_min", "mean_reward": "score_mean", "max_reward": "score_max"}
        for name in ("accuracy", "margin", *theirs):
            ours = found[f"reward_model/{theirs.get(name, name)}"]
            assert ours == pytest.approx(float(golden[f"margin_centred_{name}"]), rel=1e-5), name

    def test_lore_8_4_values_and_gradients_of_trl_0_7_1(self):
        check_against(np.load(GOLDEN / "trl_reward_classic.npz"), ["plain"])

    @pytest.mark.parity
    @pytest.mark.skipif(NEWEST is None, reason=WHY_NOT)
    def test_the_newest_trl_still_says_so(self, tmp_path):
        script = GOLDEN / "make_trl_reward.py"
        subprocess.run([str(NEWEST), str(script), str(tmp_path / "now.npz")], check=True)
        check_against(np.load(tmp_path / "now.npz"), CASES)
