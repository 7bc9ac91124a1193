# SPDX-License-Identifier: Apache-2.0
"""The surrogates of `jrl.ops.surrogates` as parts of a loss, beside `clipped` and `reinforce`."""

from __future__ import annotations

from functools import partial

from jrl.losses.policy_gradient import Surrogate
from jrl.ops.checks import Scalar
from jrl.ops.surrogates import cispo_loss, dppo_kl_loss, dppo_tv_loss, sapo_loss, vespo_loss


def plain_ratio() -> Surrogate:
    """−ρ·A, without a clip of its own: for ratios that are clipped inside (`geometric_clipped_ratio`).

    Reference: Zhao et al. 2025, arXiv:2507.20673, eq. 4.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> plain_ratio().losses(ratio, logprobs, advantages).tolist()
      [[-3.0]]
    """
    return Surrogate(lambda ratio, logprobs, advantages: -ratio * advantages)


def cispo(*, clip_range_high: Scalar) -> Surrogate:
    """CISPO's: the ratio, at most 1+ε_high, as a constant weight of log π; see `jrl.ops.cispo_loss`.

    Args:
      clip_range_high: ε_high > −1.
    Reference: MiniMax 2025, arXiv:2506.13585, eq. 4.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> cispo(clip_range_high=0.28).losses(ratio, logprobs, advantages).tolist()
      [[3.0]]
    """
    return Surrogate(partial(cispo_loss, clip_range_high=clip_range_high))


def sapo(*, temperature_pos: Scalar, temperature_neg: Scalar) -> Surrogate:
    """SAPO's soft gate; see `jrl.ops.sapo_loss`.

    Args:
      temperature_pos: τ where A > 0.
      temperature_neg: τ elsewhere.
    Reference: Qwen 2025, arXiv:2511.20347, eqs. 5 and 6.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> sapo(temperature_pos=1.0, temperature_neg=1.05).losses(ratio, logprobs, advantages).tolist()
      [[-6.0]]
    """
    return Surrogate(
        lambda ratio, logprobs, advantages: sapo_loss(
            ratio, advantages, temperature_pos=temperature_pos, temperature_neg=temperature_neg
        )
    )


def vespo(*, k_pos: Scalar, lambda_pos: Scalar, k_neg: Scalar, lambda_neg: Scalar) -> Surrogate:
    """VESPO's weight of log π, of a product ratio; see `jrl.ops.vespo_loss`.

    Args:
      k_pos: k > 0 where A ≥ 0.
      lambda_pos: λ > 0 there.
      k_neg: k > 0 elsewhere.
      lambda_neg: λ > 0 elsewhere.
    Reference: arXiv:2602.10693 (VESPO), 2026, as TRL 1.16 computes it.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> vespo(k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0).losses(ratio, logprobs, advantages).tolist()
      [[3.0]]
    """
    return Surrogate(
        partial(vespo_loss, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    )


def dppo_tv(*, delta: Scalar, delta_high: Scalar | None = None) -> Surrogate:
    """DPPO's mask by total variation, of the token ratio; see `jrl.ops.dppo_tv_loss`.

    Args:
      delta: δ > 0 for falling probabilities.
      delta_high: δ > 0 for rising ones; None: the same.
    Reference: arXiv:2602.04879 (DPPO), 2026.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> dppo_tv(delta=0.15).losses(ratio, logprobs, advantages).tolist()
      [[3.0]]
    """
    return Surrogate(partial(dppo_tv_loss, delta=delta, delta_high=delta_high))


def dppo_kl(*, delta: Scalar, delta_high: Scalar | None = None) -> Surrogate:
    """DPPO's mask by KL divergence, of the token ratio; see `jrl.ops.dppo_kl_loss`.

    Args:
      delta: δ > 0 for falling probabilities.
      delta_high: δ > 0 for rising ones; None: the same.
    Reference: arXiv:2602.04879 (DPPO), 2026.
    Example:
      >>> import jax.numpy as jnp
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-1.0]]), jnp.array([[3.0]])
      >>> dppo_kl(delta=0.15).losses(ratio, logprobs, advantages).tolist()
      [[3.0]]
    """
    return Surrogate(partial(dppo_kl_loss, delta=delta, delta_high=delta_high))
