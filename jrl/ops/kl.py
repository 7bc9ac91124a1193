# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL(π_θ ‖ π_ref) from sampled actions, and the controller of its coefficient.

With r = π_ref/π_θ on an action sampled from π_θ:

| | value | as a value | its gradient as a loss, on-policy, averages to |
|---|---|---|---|
| `kl_k1` | −log r | unbiased, may be negative | 0: useless as a loss, right as a per-token reward |
| `kl_k2` | ½(log r)² | biased, >= 0 | ∇KL(π_θ‖π_ref) |
| `kl_k3` | r − 1 − log r | unbiased, >= 0 | ∇KL(π_ref‖π_θ), the other direction |

Pass log-probabilities of unfiltered logits on both sides, even where sampling was filtered: an excluded token
has log-probability −inf. All return one value per action, unreduced and in nats; a metric says which
estimator it is.

Reference: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2510.01555.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.ops.checks import Scalar, check_positive, check_same_floats
from jrl.ops.policy_gradient import MAX_LOG_RATIO


def kl_k1(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """−log r = log π_θ − log π_ref: the estimator that enters rewards and drives the controller.

    Args:
      logprobs: log π_θ of sampled actions, in nats.
      ref_logprobs: log π_ref of the same actions, in nats.
    Returns:
      Nats at each position, of any sign; not reduced.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not of a float dtype.
    Reference: Schulman 2020, "Approximating KL divergence", k1.
    Example:
      >>> kl_k1(jnp.array([-1.0]), jnp.array([-1.5])).tolist()
      [0.5]
    """
    check_same_floats("ref_logprobs", ref_logprobs, "logprobs", logprobs)
    return logprobs - ref_logprobs


def kl_k2(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """½(log r)² >= 0: the estimator whose gradient points the right way.

    Args:
      logprobs: log π_θ of sampled actions, in nats.
      ref_logprobs: log π_ref of the same actions, in nats.
    Returns:
      At least 0 at each position, in nats; not reduced.
    Reference: Schulman 2020, "Approximating KL divergence", k2.
    Example:
      >>> kl_k2(jnp.array([-1.0]), jnp.array([-1.5])).tolist()
      [0.125]
    """
    return 0.5 * jnp.square(kl_k1(logprobs, ref_logprobs))


def kl_k3(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """r − 1 − log r >= 0, unbiased with low variance: the estimator to look at.

    Inside the exponential log r is clamped to ±20; the linear term stays exact.

    Args:
      logprobs: log π_θ of sampled actions, in nats.
      ref_logprobs: log π_ref of the same actions, in nats.
    Returns:
      At least 0 at each position, in nats; not reduced.
    Reference: Schulman 2020, "Approximating KL divergence", k3.
    Example:
      >>> round(float(kl_k3(jnp.array([-1.0]), jnp.array([-1.5]))[0]), 4)  # e^−0.5 − 1 + 0.5
      0.1065
    """
    log_r = -kl_k1(logprobs, ref_logprobs)
    # expm1: for policies that nearly agree, r − 1 would round away what is left after subtracting log r.
    return jnp.expm1(jnp.clip(log_r, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_r


def kl_k3_straight_through(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The value of k3 with the gradient of k2: a good metric and the right direction in one loss term.

    Args:
      logprobs: log π_θ of sampled actions, in nats.
      ref_logprobs: log π_ref of the same actions, in nats.
    Returns:
      At least 0 at each position, in nats; not reduced.
    Reference: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2510.01555.
    Example:
      >>> round(float(kl_k3_straight_through(jnp.array([-1.0]), jnp.array([-1.5]))[0]), 4)
      0.1065
    """
    k2, k3 = kl_k2(logprobs, ref_logprobs), kl_k3(logprobs, ref_logprobs)
    # (k2 − sg k2) is exactly 0 in value, so adding it first keeps the value of k3 to the bit.
    return (k2 - jax.lax.stop_gradient(k2)) + jax.lax.stop_gradient(k3)


def adaptive_kl_coef(
    kl_coef: Float[Array, ""], kl: Scalar, *, target_kl: Scalar, horizon: Scalar, num_rollouts: Scalar
) -> Float[Array, ""]:
    """Moves the KL coefficient towards the value that holds the policy at `target_kl`.

        e = clip(KL/target − 1, −0.2, 0.2),   β ← β·(1 + e·n/horizon)

    A fixed coefficient is not calling this.

    Args:
      kl_coef: β > 0.
      kl: Mean over completions of the *sum* of k1 over actions (`kl/per_sequence`), in nats.
      target_kl: Set-point, in the same unit; > 0.
      horizon: Rollouts over which β may change by a fifth; > 0.
      num_rollouts: n, completions since the last call.
    Returns:
      The new β.
    Raises:
      ValueError: If `target_kl` or `horizon` is not positive.
    Reference: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    Example:
      >>> kl_coef = adaptive_kl_coef(jnp.array(0.2), 12.0, target_kl=6.0, horizon=10000, num_rollouts=256)
      >>> round(float(kl_coef), 6)
      0.201024
    """
    check_positive("target_kl", target_kl)
    check_positive("horizon", horizon)
    error = jnp.clip(kl / target_kl - 1.0, -0.2, 0.2)
    return kl_coef * (1.0 + error * num_rollouts / horizon)
