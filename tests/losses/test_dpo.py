# SPDX-License-Identifier: Apache-2.0
"""DPO's losses: goldens by hand and of TRL, identities, masks, gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses.dpo import (
    DIVERGENCES,
    LOSSES,
    Completion,
    completion_logprobs,
    make_pairs,
    pairs_from_logprobs,
)
from jrl.ops import finalize
from tests.losses.dpo_cases import completions, every_loss, loss_of, sums

BOTH = np.ones(2, bool)


def mean(out) -> float:
    return float(out.loss_sum / out.weight)


def per_pair(name: str, sides, beta: float = 0.1, label_smoothing: float = 0.0, **options) -> np.ndarray:
    settings = {"beta": beta, "label_smoothing": label_smoothing, "discopop_tau": 0.05}
    choices = {
        "divergence": DIVERGENCES["reverse_kl"],
        "alpha": 0.5,
        "ld_alpha": None,
    }
    valid = jnp.ones(sides[0].mask.shape[0], bool)
    pairs = make_pairs(*sides, valid, pairs_per_token=jnp.ones(()), **(choices | options))
    return np.asarray(LOSSES[name](pairs, settings))


class TestClassicGolden:
    """TRL 0.7.11 on sums of log-probabilities."""

    SIDES = sums([-10, -20], [-12, -18], [-11, -19], [-11.5, -18.5])

    @pytest.mark.parametrize(
        ("name", "options", "expected"),
        [
            # z = 2 − 0.5 = 1.5: −log σ(0.15) = 0.620957;  z = −2 + 0.5 = −1.5: −log σ(−0.15) = 0.770957
            ("sigmoid", {}, [0.620957, 0.770957]),
            ("sigmoid", {"label_smoothing": 0.1}, [0.635957, 0.755957]),
            ("hinge", {}, [0.85, 1.15]),
            ("ipo", {}, [12.25, 42.25]),
            # each pair has two values there, of which ours is the mean
            ("kto_pair", {}, [(0.475021 + 0.487503) / 2, (0.524979 + 0.512497) / 2]),
        ],
    )
    def test_values(self, name, options, expected):
        np.testing.assert_allclose(per_pair(name, self.SIDES, **options), expected, atol=1e-5)

    def test_pairs_from_sums_are_those_of_one_token(self):
        of_sums = pairs_from_logprobs(
            *jnp.array([[-10.0, -20.0], [-12.0, -18.0], [-11.0, -19.0], [-11.5, -18.5]]),
            divergence=DIVERGENCES["forward_kl"],
        )
        options = {"divergence": DIVERGENCES["forward_kl"], "alpha": 1.0, "ld_alpha": None}
        of_tokens = make_pairs(*self.SIDES, jnp.ones(2, bool), **options, pairs_per_token=jnp.ones(()))
        for found, expected in zip(of_sums, of_tokens, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_without_a_reference(self):
        got = loss_of(self.SIDES, reference_free=True).loss_sum
        assert float(got) == pytest.approx(0.598139 + 0.798139, abs=1e-5)

    def test_implicit_rewards(self):
        got = finalize(loss_of(self.SIDES, reference_free=True).metrics)
        assert got["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)  # 0.1 and −0.1
        assert got["rewards/rejected"] == pytest.approx(0.0, abs=1e-6)  # −0.05 and 0.05
        assert got["rewards/accuracies"] == 0.5
        first = finalize(loss_of(self.SIDES, valid=[True, False]).metrics)
        assert first["rewards/chosen"] == pytest.approx(0.1, abs=1e-6)
        assert first["rewards/rejected"] == pytest.approx(-0.05, abs=1e-6)


IDS = [[0, 1, 2, 3], [0, 2, 4, 1], [0, 1, 4, 4], [0, 2, 1, 0]]
COMPLETION = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]
INDEX = np.arange(80, dtype=np.float64).reshape(4, 4, 5)
LOGITS = (2 * np.sin(0.37 * INDEX)).astype(np.float32)
REF_LOGITS = (1.5 * np.cos(0.53 * INDEX)).astype(np.float32)


@pytest.fixture(scope="module")
def modern():
    return completions(LOGITS, REF_LOGITS, IDS, np.array(COMPLETION) != 0)


class TestModernGolden:
    """TRL's modern trainer on two pairs of ragged completions over five tokens."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("sigmoid", 0.729934),
            ("hinge", 1.066324),
            ("ipo", 29.646221),
            ("exo_pair", 2.878620),
            ("nca_pair", 1.404891),
            ("robust", 0.738224),
            ("bco_pair", 1.422705),
            ("sppo_hard", 59.235626),
            ("aot", 0.729934),
            ("aot_unpaired", 0.727450),
            ("apo_zero", 1.016485),
            ("apo_down", 1.025080),
            ("discopop", 0.846124),
            ("sft", 2.127875),
            ("sigmoid_norm", 0.713845),
        ],
    )
    def test_losses(self, modern, name, expected):
        assert float(every_loss(modern, BOTH)[name]) == pytest.approx(expected, rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"ld_alpha": 0.5}, 0.733223),
            ({"divergence": DIVERGENCES["forward_kl"]}, 0.701793),
            ({"divergence": DIVERGENCES["js_divergence"]}, 0.699762),
            ({"divergence": DIVERGENCES["alpha_divergence"]}, 0.710696),
            ({"use_weighting": True}, 0.367280),
        ],
    )
    def test_options(self, modern, options, expected):
        assert mean(loss_of(modern, **options)) == pytest.approx(expected, abs=1e-5)

    def test_metrics(self, modern):
        got = finalize(loss_of(modern).metrics)
        expected = {
            "logps/chosen": -5.31969,
            "logps/rejected": -3.39753,
            "rewards/chosen": 0.03445,
            "rewards/rejected": 0.10077,
            "rewards/accuracies": 0.5,
            "rewards/margins": -0.06632,
            "logits/chosen": -0.236,
            "logits/rejected": -0.765,
            "dpo/entropy": 1.40756,
        }
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-3)

    def test_several_losses_are_added_up(self, modern):
        terms = [("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0)]
        out = loss_of(modern, terms=terms)
        assert mean(out) == pytest.approx(0.8 * 0.729934 + 0.2 * 1.422705 + 2.127875, abs=1e-5)
        got = finalize(out.metrics)
        assert got["dpo/bco_pair_loss"] == pytest.approx(1.422705, abs=1e-5)


class TestIdentities:
    def test_lore_8_1_at_the_reference_the_loss_is_log_two_and_both_rewards_are_zero(self):
        sides = completions(LOGITS, LOGITS, IDS, np.array(COMPLETION) != 0)
        out = loss_of(sides)
        assert mean(out) == pytest.approx(0.693147, abs=1e-6)
        got = finalize(out.metrics)
        assert got["rewards/chosen"] == got["rewards/rejected"] == got["rewards/accuracies"] == 0

    def test_lore_8_1_log_probabilities_are_summed_over_the_completion_alone(self, modern):
        chosen, rejected = modern
        got = finalize(loss_of(modern).metrics)
        total = np.sum(np.asarray(chosen.logprobs) * np.array([[0, 1, 1], [1, 1, 1]]))
        assert got["logps/chosen"] == pytest.approx(total / 2, abs=1e-5)
        # What the prompt's tokens are worth does not matter.
        noise = jnp.where(chosen.mask, 0.0, 7.0)
        moved = chosen._replace(logprobs=chosen.logprobs + noise, ref_logprobs=chosen.ref_logprobs - noise)
        assert mean(loss_of((moved, rejected))) == mean(loss_of(modern))

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_lore_8_1_padding_on_either_side_changes_nothing(self, modern, side):
        width = (2, 0) if side == "left" else (0, 2)

        def pad(x):
            return jnp.pad(x, ((0, 0), width), constant_values=False if x.dtype == bool else jnp.nan)

        padded = tuple(Completion(*map(pad, x)) for x in modern)
        narrow, wide = (every_loss(x, BOTH, ld_alpha=0.5) for x in (modern, padded))
        for name in LOSSES:
            assert float(wide[name]) == pytest.approx(float(narrow[name]), rel=1e-6), name

    def test_swapping_a_pair_negates_its_margin(self):
        sides = sums([-10.0], [-12.0], [-11.0], [-11.5])
        there, back = (finalize(loss_of(x).metrics)["rewards/margins"] for x in (sides, sides[::-1]))
        assert there == pytest.approx(-back) and there == pytest.approx(0.15)

    def test_a_tie_is_no_success(self):
        got = finalize(loss_of(sums([-1.0], [-1.0], [-1.0], [-1.0])).metrics)
        assert got["rewards/accuracies"] == 0

    def test_no_loss_knows_the_order_of_the_pairs_nor_copies_that_fill_the_batch_up(self):
        numbers = np.random.default_rng(0).normal(size=(4, 5)) * 3
        copied = np.concatenate([numbers[:, :2], numbers[:, :1] + 50, numbers[:, 2:]], axis=1)
        valid = np.array([True, True, False, True, True, True])
        wanted, turned = (every_loss(sums(*x), np.ones(5, bool)) for x in (numbers, numbers[:, ::-1]))
        filled = every_loss(sums(*copied), valid)
        for name in LOSSES:
            expected = pytest.approx(float(wanted[name]), rel=1e-5)
            assert float(turned[name]) == expected and float(filled[name]) == expected, name

    @pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
    def test_a_divergence_is_zero_at_the_reference_and_rises_at_rate_one(self, divergence):
        f = DIVERGENCES[divergence]
        value, slope = jax.value_and_grad(lambda x: f(x, alpha=0.5)[0])(jnp.zeros(1))
        assert float(value) == pytest.approx(0, abs=1e-7)
        assert float(slope[0]) == pytest.approx(0.5 if divergence == "js_divergence" else 1.0)

    def test_alpha_zero_is_the_forward_kl(self):
        x = jnp.linspace(-2.0, 2.0, 5)
        got = DIVERGENCES["alpha_divergence"](x, alpha=0.0)
        np.testing.assert_allclose(got, DIVERGENCES["forward_kl"](x, alpha=0.5), rtol=1e-6)

    def test_tails_beyond_the_shorter_completion_weigh_alpha(self):
        logprobs = jnp.array([[-1.0, -2.0, -4.0, -8.0]])
        mask = jnp.array([[False, True, True, True]])
        got = completion_logprobs(logprobs, mask, shared_lengths=jnp.array([2]), ld_alpha=0.25)
        assert float(got[0]) == -2 - 4 - 0.25 * 8

    def test_rows_that_are_as_likely_as_samples_have_weight_one(self, modern):
        # log π = log Σ π²: of a uniform distribution, every token.
        logits = np.zeros((4, 4, 5), np.float32)
        sides = completions(logits, REF_LOGITS, IDS, np.array(COMPLETION) != 0)
        assert mean(loss_of(sides, use_weighting=True)) == pytest.approx(mean(loss_of(sides)), rel=1e-6)

    def test_lore_8_3_displaced_pairs_are_counted(self):
        # rewards 0.1·(+1, −2), (−1, −2), (−1, +1): only the second rose above its rival by falling less
        sides = sums([-9.0, -11.0, -11.0], [-12.0, -12.0, -9.0], [-10.0] * 3, [-10.0] * 3)
        got = finalize(loss_of(sides).metrics)
        assert got["rewards/displaced"] == pytest.approx(1 / 3)
        assert got["logps/chosen"] == pytest.approx(-31 / 3, rel=1e-6)


class TestGradients:
    def test_finite_for_extreme_margins(self):
        zeros = jnp.zeros(3)

        @jax.jit
        def everything(x):
            means = jax.jacrev(
                lambda x: every_loss(sums(x[0], x[1], zeros, zeros), jnp.ones(3, bool), beta=1.0)
            )
            return every_loss(sums(x[0], x[1], zeros, zeros), jnp.ones(3, bool), beta=1.0), means(x)

        values, gradients = everything(jnp.array([[-900.0, 0.0, -1e-3], [0.0, -900.0, -1e-3]]))
        for name in LOSSES:
            assert np.isfinite(values[name]) and np.isfinite(gradients[name]).all(), name
            assert np.any(gradients[name] != 0), name

    def test_none_reaches_reference_weights_or_metrics(self, modern):
        chosen, rejected = modern

        def total(fixed):
            moved = chosen._replace(
                ref_logprobs=chosen.ref_logprobs + fixed, collision=chosen.collision + fixed
            )
            return loss_of((moved, rejected), use_weighting=True).loss_sum

        assert float(jax.grad(total)(jnp.zeros(()))) == 0

    def test_dpo_by_hand(self):
        # d/dπ⁺ of −log σ(βz) is −β·σ(−βz); z = 1.5, β = 0.1
        def total(x):
            return loss_of(sums([x], [-12.0], [-11.0], [-11.5])).loss_sum

        assert float(jax.grad(total)(-10.0)) == pytest.approx(-0.1 / (1 + math.exp(0.15)), rel=1e-5)


def test_a_batch_of_copies_weighs_nothing(modern):
    out = loss_of(modern, valid=[False, False])
    assert float(out.loss_sum) == float(out.weight) == 0
    assert finalize(out.metrics) == {}


def test_sides_of_different_width_are_refused(modern):
    chosen, rejected = modern
    with pytest.raises(ValueError, match=r"`rejected.mask` must have shape \(2, 3\) like `chosen.mask`"):
        loss_of((chosen, jax.tree.map(lambda x: x[:, :2], rejected)))


class TestBadInput:
    def test_a_term_of_no_known_name_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(ValueError, match=r"`terms` must name losses of \['aot', .*\], got \['sigmoyd'\]"):
            loss_of(TestClassicGolden.SIDES, terms=[("sigmoid", 1.0), ("sigmoyd", 1.0)])

    def test_the_closest_name_is_shown(self) -> None:
        with pytest.raises(ValueError, match=r"got \['apo_zro'\]\. Did you mean `apo_zero`\?"):
            loss_of(TestClassicGolden.SIDES, terms=[("apo_zro", 1.0)])

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("beta", 0.0, "must be > 0, got 0.0"),
            ("beta", -0.1, "must be > 0, got -0.1"),
            ("discopop_tau", 0.0, "must be > 0, got 0.0"),
            ("label_smoothing", 1.5, r"must be in \[0, 1\], got 1.5"),
            ("label_smoothing", -0.1, r"must be in \[0, 1\], got -0.1"),
            ("ld_alpha", 2.0, r"must be in \[0, 1\], got 2.0"),
        ],
    )
    def test_numbers_outside_their_range_are_refused(self, field, value, expected) -> None:
        with pytest.raises(ValueError, match=f"`{field}` {expected}"):
            loss_of(TestClassicGolden.SIDES, **{field: value})

    def test_an_alpha_that_leaves_no_divergence_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`alpha` must not be 1 beside the α-divergence"):
            loss_of(TestClassicGolden.SIDES, divergence=DIVERGENCES["alpha_divergence"], alpha=1.0)

    @pytest.mark.parametrize(("name", "value", "bound"), [("exo_pair", 1.0, "1.0"), ("robust", 0.5, "0.5")])
    def test_smoothing_that_leaves_no_loss_is_refused(self, name, value, bound) -> None:
        with pytest.raises(ValueError, match=rf"`label_smoothing` must be < {bound}, got {value}"):
            loss_of(TestClassicGolden.SIDES, terms=[(name, 1.0)], label_smoothing=value)

    def test_exo_needs_smoothing(self) -> None:
        with pytest.raises(ValueError, match=r"`label_smoothing` must be > 0, got 0\.0"):
            per_pair("exo_pair", TestClassicGolden.SIDES)
