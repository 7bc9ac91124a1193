# SPDX-License-Identifier: Apache-2.0
"""DDPO's loss of single steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses.ddpo import ddpo_loss
from jrl.ops.metrics import finalize
from jrl.ops.reductions import LossOut

EPSILON = 0.1


def loss(
    log_ratios: list[float] | jax.Array,
    advantages: list[float],
    valid: list[bool] | None = None,
    *,
    kl: jax.Array | None = None,
    beta_kl: float = 0.0,
    clip_range: float = EPSILON,
) -> LossOut:
    moved = jnp.asarray(log_ratios, jnp.float32)
    return ddpo_loss(
        moved - 1.0,
        jnp.full_like(moved, -1.0),
        jnp.asarray(advantages, jnp.float32),
        jnp.ones(moved.shape, bool) if valid is None else jnp.asarray(valid),
        clip_range=clip_range,
        advantage_clip=5.0,
        kl=kl,
        beta_kl=beta_kl,
    )


class TestGolden:
    def test_at_ratio_one_the_loss_is_minus_the_advantage(self) -> None:
        assert float(loss([0.0], [-1.0], clip_range=1e-4).loss_sum) == 1.0

    def test_four_steps(self) -> None:
        # ρ = 2, ½, 2, 1; the clip cuts ρ·A where that helps: −1.1, +0.9·2, and 2·3 stays; A = 9 counts as 5.
        out = loss([np.log(2.0), -np.log(2.0), np.log(2.0), 0.0], [1.0, -2.0, -3.0, 9.0])
        assert float(out.loss_sum) == pytest.approx(-1.1 + 1.8 + 6.0 - 5.0, rel=1e-5)
        numbers = finalize(out.metrics)
        assert float(out.weight) == 4.0
        assert numbers["ddpo/loss"] == pytest.approx(1.7 / 4, rel=1e-5)
        assert numbers["ddpo/clip_fraction"] == 0.75
        assert numbers["ddpo/clip_fraction_high_positive"] == 0.25
        assert numbers["ddpo/clip_fraction_low_negative"] == 0.25
        assert numbers["ddpo/approx_kl"] == pytest.approx(0.5 * 3 / 4 * np.log(2) ** 2, rel=1e-5)
        assert numbers["ddpo/ratio_max_dev"] == pytest.approx(1.0, rel=1e-5)
        assert numbers["ddpo/ratio_mean"] == pytest.approx(5.5 / 4, rel=1e-5)

    def test_the_kl_is_added_with_its_weight(self) -> None:
        out = loss([0.0, 0.0], [0.0, 0.0], kl=jnp.array([0.5, 1.5]), beta_kl=0.1)
        assert float(out.loss_sum) == pytest.approx(0.2)
        numbers = finalize(out.metrics)
        assert numbers["ddpo/kl"] == pytest.approx(1.0) and numbers["ddpo/policy_loss"] == 0.0


class TestGradient:
    @pytest.mark.parametrize(
        ("log_ratio", "advantage", "wanted"),
        [
            (0.0, 2.0, -2.0),
            (0.0, -2.0, 2.0),
            (0.2, 1.0, 0.0),
            (0.2, -1.0, np.exp(0.2)),
            (-0.2, 1.0, -np.exp(-0.2)),
            (-0.2, -1.0, 0.0),
        ],
    )
    def test_lore_5_3_clipping_is_one_sided(self, log_ratio: float, advantage: float, wanted: float) -> None:
        gradient = jax.grad(lambda x: loss(x, [advantage]).loss_sum)(jnp.array([log_ratio], jnp.float32))
        assert float(gradient[0]) == pytest.approx(wanted, rel=1e-5)

    def test_lore_5_6_none_flows_into_old_log_probs_and_advantages(self) -> None:
        one = jnp.ones(1)

        def total(old: jax.Array, advantages: jax.Array) -> jax.Array:
            out = ddpo_loss(one, old, advantages, one > 0, clip_range=0.1, advantage_clip=5.0)
            return out.loss_sum

        assert [float(g[0]) for g in jax.grad(total, (0, 1))(one, one)] == [0.0, 0.0]


class TestPadding:
    def test_what_is_not_valid_does_not_count(self) -> None:
        whole = loss([0.3, -0.3], [1.0, 2.0])
        padded = loss([0.3, -0.3, np.nan], [1.0, 2.0, np.nan], [True, True, False])
        assert float(padded.loss_sum) == float(whole.loss_sum) and float(padded.weight) == 2.0
        assert finalize(padded.metrics) == finalize(whole.metrics)

    def test_nothing_valid_is_nothing(self) -> None:
        out = loss([0.1], [1.0], [False])
        assert float(out.loss_sum) == 0.0 and float(out.weight) == 0.0 and not finalize(out.metrics)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="`clip_range` must be > 0"):
        loss([0.0], [1.0], clip_range=0.0)
    with pytest.raises(ValueError, match="`advantages`"):
        ddpo_loss.__wrapped__(
            jnp.ones(2), jnp.ones(2), jnp.ones(3), jnp.ones(2, bool), clip_range=0.1, advantage_clip=5.0
        )


def test_the_clip_of_advantages_must_be_positive() -> None:
    one = jnp.ones(1)
    with pytest.raises(ValueError, match=r"`advantage_clip` must be > 0, got -5\.0"):
        ddpo_loss(one, one, one, one > 0, clip_range=0.1, advantage_clip=-5.0)
