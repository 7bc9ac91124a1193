# SPDX-License-Identifier: Apache-2.0
"""Forward mode and products with the Hessian of every loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jrl import losses
from jrl.learners.ddpo_loss_scale import scale_cotangents
from jrl.losses import sft
from jrl.losses.dpo import DIVERGENCES, LOSSES
from tests.losses.dpo_cases import loss_of
from tests.transforms import assert_every_transform, normals_like

ROW, WINDOW = jnp.zeros(4), jnp.zeros((4, 3))
VALID = jnp.array([True, True, False, True])
MASK = jnp.array([[True] * 3, [True, True, False], [False] * 3, [True] * 3])


def ppo(at: Any) -> Any:
    logprobs, values, entropy = at
    fixed = normals_like([WINDOW] * 4, 5)
    ranges = dict(clip_range=0.2, value_clip_range=0.2, value_coef=0.5, entropy_coef=0.1)
    return losses.ppo_loss(logprobs, values, entropy, losses.Targets(*fixed, MASK), **ranges).loss_sum


def ilql(at: Any) -> Any:
    rewards, target_q = normals_like([WINDOW] * 2, 5)
    options = dict(gamma=0.9, expectile=0.7, cql_coef=0.1, awac_coef=1.0, awac_beta=0.5)
    return losses.ilql_loss(losses.ILQLPredictions(*at, target_q), rewards, MASK, **options).loss_sum


def dpo(at: Any) -> Any:
    """Every loss under every divergence that it takes, and the weights of WPO."""
    reads = [
        losses.Completion(logprobs, *normals_like([WINDOW] * 4, seed), MASK, MASK.at[2].set(True))
        for seed, logprobs in enumerate(at)
    ]
    found = {
        name: loss_of(reads, VALID, terms=[(name, 1.0)], label_smoothing=0.1).loss_sum for name in LOSSES
    }
    for name, divergence in DIVERGENCES.items():
        found |= {
            name: loss_of(reads, VALID, divergence=divergence, ld_alpha=0.5, use_weighting=True).loss_sum
        }
    return found


def ddpo(at: Any) -> Any:
    """In a scaled network, as `jrl.learners.ddpo` does it."""
    factor = jnp.float32(2.0**10)
    logprobs, kl = scale_cotangents(at, 1.0 / factor)
    fixed = normals_like([ROW] * 2, 5)
    options = dict(clip_range=0.3, advantage_clip=5.0, kl=jnp.square(kl), beta_kl=0.1)
    return scale_cotangents(losses.ddpo_loss(jnp.sin(logprobs), *fixed, VALID, **options).loss_sum, factor)


def reward_model(at: Any) -> Any:
    return losses.reward_model_loss(*at, normals_like(ROW, 5), VALID, center_coef=0.1).loss_sum


def sft_forms(at: Any) -> Any:
    return [losses.sft_loss(at, MASK, token_loss=form).loss_sum for form in (sft.nll, sft.dft)]


LOSS_CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ppo": (ppo, [WINDOW] * 3),
    "ilql": (ilql, [WINDOW, WINDOW, jnp.zeros((4, 3, 2)), jnp.zeros((4, 3, 2))]),
    "dpo": (dpo, [WINDOW] * 2),
    "ddpo": (ddpo, [ROW] * 2),
    "reward_model": (reward_model, [ROW] * 2),
    "sft": (sft_forms, WINDOW),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "dpo" else ()) for name in LOSS_CASES]
)
def test_losses(name: str) -> None:
    f, shapes = LOSS_CASES[name]
    assert_every_transform(f, normals_like(shapes, 0))


def test_a_scaled_network_has_the_derivatives_of_the_plain_one() -> None:
    """Forwards the factors cancel, as they do backwards."""
    at, along = normals_like([ROW] * 2, 0), normals_like([ROW] * 2, 1)
    factor = jnp.float32(2.0**10)

    def scaled(x: Any) -> Any:
        return scale_cotangents(jnp.sin(scale_cotangents(x, 1.0 / factor)[0]).sum(), factor)

    wanted = jnp.vdot(jnp.cos(at[0]), along[0])
    assert jnp.allclose(jax.jvp(scaled, (at,), (along,))[1], wanted)
    assert jnp.allclose(jax.grad(scaled)(at)[0], jnp.cos(at[0]))
