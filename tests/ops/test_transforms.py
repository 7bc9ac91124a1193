# SPDX-License-Identifier: Apache-2.0
"""Forward mode and products with the Hessian of every differentiable function of `jrl.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import ops
from tests.transforms import assert_every_transform, dot, normals_like

ROW, WINDOW, LOGITS = jnp.zeros(4), jnp.zeros((4, 3)), jnp.zeros((4, 3, 11))
IMAGE = jnp.zeros((2, 2, 2, 3))
MASK = jnp.array([[True] * 3, [True, True, False], [False] * 3, [True] * 3])
TARGETS = jnp.array([[0, 5, 10], [1, -100, 2], [3, 3, 3], [9, 8, 7]])


def logprobs(logits: Any) -> Any:
    """Of a vocabulary with a column that is left out, and of a large one."""
    hidden = jnp.where(jnp.arange(11)[None, None, :] == 4, -jnp.inf, logits)
    large = jnp.pad(logits, ((0, 0), (0, 0), (0, 2**13)))
    return [
        ops.logprobs_from_logits(hidden, TARGETS),
        ops.entropy_from_logits(hidden),
        ops.kl_from_logits(hidden, jnp.flip(hidden, 0)),
        ops.take_targets(logits, TARGETS),
        ops.logprobs_from_logits(large, TARGETS),
    ]


def chunked_logprobs(hidden: Any) -> Any:
    options = dict(temperature=0.7, chunk_bytes=100, vocab_size=11, with_entropy=True)
    return ops.token_logprobs(lambda x: x * 2.0, hidden, TARGETS, **options)


def kl(at: Any) -> Any:
    return [form(*at) for form in (ops.kl_k1, ops.kl_k2, ops.kl_k3, ops.kl_k3_straight_through)]


def policy_gradient(at: Any) -> Any:
    surrogate = ops.clipped_surrogate(*at, clip_range=0.2)
    return ops.importance_ratio(*at[:2]), surrogate, ops.clipped_value_loss(*at, clip_range=0.2)


def surrogates(at: Any) -> Any:
    """Every ratio of a whole row, and every surrogate beside the clipped one."""
    new, old, advantages = at
    ratios = [
        form(new, old, advantages, MASK)
        for form in (ops.sequence_ratio, ops.sequence_token_ratio, ops.product_ratio, ops.token_ratio)
    ]
    geometric = ops.geometric_clipped_ratio(new, old, advantages, MASK, clip_range=0.4)
    phi = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    return ratios, [
        -geometric * advantages,
        ops.clipped_ratio_loss(ratios[0], advantages, clip_range=0.2, clip_range_high=0.28, dual_clip=3.0),
        ops.sapo_loss(ratios[3], advantages, temperature_pos=1.0, temperature_neg=1.05),
        ops.cispo_loss(ratios[3], new, advantages, clip_range_high=0.28),
        ops.vespo_loss(ratios[2], new, advantages, **phi),
        ops.dppo_tv_loss(ratios[3], new - 5.0, advantages, delta=0.15),
        ops.dppo_kl_loss(ratios[3], new - 5.0, advantages, delta=0.01),
    ]


def advantages(at: Any) -> Any:
    found = ops.gae(*at, MASK, gamma=0.9, gae_lambda=0.8)
    penalized = ops.penalize_kl(at[0], at[1], jnp.sin(at[0]), MASK, kl_coef=0.1)
    return found, ops.whiten(found, MASK), ops.whiten(at[0], MASK, shift_mean=False), penalized


def scores(at: Any) -> Any:
    row, window = at
    moments, mean, std = ops.update_moments(ops.init_moments(), row, MASK[:, 0])
    return [
        ops.clip_scores(row, clip_range=0.5),
        ops.missing_eos_penalty(row, MASK[:, 1], penalty=1.0),
        ops.calibrate_scores(row, jnp.sin(row), unit_variance=True),
        ops.place_scores(row, MASK.at[2].set(True)),
        ops.last_token_scores(window, MASK),
        [moments.mean, mean, std, ops.moments_std(moments)],
    ]


def reductions(x: Any) -> Any:
    return [
        ops.masked_sum(x, MASK),
        ops.masked_mean(x, MASK, axis=1),
        ops.masked_variance(x, MASK),
        ops.zero_masked(x, MASK),
        ops.token_mean(x, MASK),
        ops.sequence_mean(x, MASK),
        ops.constant_mean(x, MASK, length=5),
        ops.sequence_sum_mean(x, MASK),
        ops.shared_mean(x, MASK, ops.group_token_shares(MASK, jnp.array([3, 3, 1, 1]))),
    ]


def windows(states: Any) -> Any:
    columns = ops.window_columns(jnp.array([1, 2, 1, 1]), width=2, length=3)
    chunks = ops.map_positions(jnp.sin, (states,), positions=5)
    return ops.states_at(states, columns), ops.window_states(states, jnp.array([1, 2, 1, 1]), width=2), chunks


def denoising(at: Any) -> Any:
    latents, output, noise, mean = at
    schedule = ops.NoiseSchedule(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    steps = ops.steps_of_rows(ops.denoising_steps(schedule, num_steps=4, eta=1.0), jnp.array([1, 2]))
    step = ops.ddim_step(latents, output, noise, steps, schedule=schedule)
    std = jnp.array([0.5, 2.0])
    guided = ops.guided_output(
        lambda x, _, context: x * context.mean(axis=(1, 2))[:, None, None, None],
        latents,
        jnp.array([1, 2]),
        output.reshape(2, 4, 3),
        noise[:1].reshape(1, 4, 3),
        guidance_scale=3.0,
        guidance_rescale=0.5,
    )
    return [
        step._asdict(),
        guided,
        ops.ddim_mean(latents, output, steps, schedule=schedule),
        ops.ddim_logprob(latents, mean, steps),
        ops.gaussian_logprob(latents, mean, std),
        ops.gaussian_kl(latents, mean, std),
    ]


CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "logprobs": (logprobs, LOGITS),
    "chunked_logprobs": (chunked_logprobs, LOGITS),
    "kl": (kl, [WINDOW] * 2),
    "policy_gradient": (policy_gradient, [WINDOW] * 3),
    "surrogates": (surrogates, [WINDOW] * 3),
    "advantages": (advantages, [WINDOW] * 2),
    "scores": (scores, [ROW, WINDOW]),
    "reductions": (reductions, WINDOW),
    "windows": (windows, LOGITS),
    "denoising": (denoising, [IMAGE] * 4),
}


@pytest.mark.parametrize("name", CASES)
def test_ops(name: str) -> None:
    f, shapes = CASES[name]
    assert_every_transform(f, normals_like(shapes, 0))


@pytest.mark.parametrize("form", [lambda x: ops.logprobs_from_logits(x, TARGETS), ops.entropy_from_logits])
def test_only_the_logits_are_kept_for_the_gradient(form: Callable[[Any], Any]) -> None:
    """Derived derivatives would keep two or three arrays of that width."""
    logits = normals_like(LOGITS, 0)
    _, pullback = jax.vjp(form, logits)
    wide = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim == 3]
    assert len(wide) == 1 and (wide[0] == logits).all()


def test_second_derivatives_of_logprobs_are_those_of_the_softmax() -> None:
    """∂²log π_a/∂z² · v = −π ⊙ (v − ⟨π, v⟩), by hand."""
    logits, v = normals_like(LOGITS, 0), normals_like(LOGITS, 1)
    targets = jnp.abs(TARGETS) % 11
    found = jax.jvp(jax.grad(lambda x: ops.logprobs_from_logits(x, targets).sum()), (logits,), (v,))[1]
    probs = jax.nn.softmax(logits)
    np.testing.assert_allclose(found, -probs * (v - jnp.sum(probs * v, -1, keepdims=True)), atol=1e-6)
    assert float(dot(found, v)) < 0
