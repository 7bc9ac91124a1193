# SPDX-License-Identifier: Apache-2.0
"""The PPO objective for language models: clipped surrogate, clipped value loss, entropy bonus.

Left out: a KL term in the loss (the KL to the reference is in the rewards), and the dual clip of Ye et al. 2020.

Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9; for language models Ziegler et al. 2019,
arXiv:1909.08593.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch
from jrl.ops.kl import kl_k1, kl_k2, kl_k3
from jrl.ops.masking import zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.policy_gradient import (
    clip_events,
    clipped_surrogate,
    clipped_value_loss,
    importance_ratio,
    value_clip_events,
)
from jrl.ops.reductions import LossOut, token_mean
from jrl.typing import Metrics


class PPOTargets(NamedTuple):
    """What PPO learns from: fixed before the first minibatch of an update and kept for all its epochs.

    Attributes:
      old_logprobs: log π_old of the actions, in nats.
      old_values: V_old of the state before each action.
      advantages: Whitened over all rollouts.
      returns: Raw advantages + old values: what the critic predicts.
      mask: True on actions. Elsewhere nothing is read, so NaN may stand there.
    """

    old_logprobs: Float[Array, "B T"]
    old_values: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"]
    mask: Bool[Array, "B T"]


def ppo_loss(
    logprobs: Float[Array, "B T"],
    values: Float[Array, "B T"],
    entropy: Float[Array, "B T"] | None,
    targets: PPOTargets,
    *,
    clip_range: Scalar,
    value_clip_range: Scalar,
    value_coef: Scalar,
    entropy_coef: Scalar,
) -> LossOut:
    """PPO's loss, summed over actions.

        L = Σ_t [ −min(ρA, clip(ρ, 1±ε)·A) + c_v·½·max((V−R)², (V_clip−R)²) − c_e·H ]

    No gradient reaches `targets`, whatever the caller differentiates.

    Args:
      logprobs: log π_θ of the actions, in nats: unfiltered logits divided by the rollout temperature.
      values: V_θ of the state before each action.
      entropy: H of the whole distribution at each action; None leaves out the bonus and its metric.
      targets: The fixed side.
      clip_range: ε > 0 of the ratio.
      value_clip_range: ε_v > 0 around the old value.
      value_coef: c_v >= 0. The ½ of the squared error is not in it.
      entropy_coef: c_e >= 0; the entropy is maximised.
    Returns:
      The sum over actions, their number, and the `ppo/…` metrics; all 0 for a batch without actions.
    Raises:
      ValueError: If shapes differ, a range is not positive, or there is a bonus to give but no entropy.
      TypeError: If the mask is not boolean.
    """
    fixed = targets._asdict()
    mask = fixed.pop("mask")
    check_batch(mask, logprobs=logprobs, values=values, **fixed)
    if entropy is None and not (isinstance(entropy_coef, int | float) and entropy_coef == 0):
        raise ValueError(
            f"`entropy` must be given where `entropy_coef` is not 0, got None and {entropy_coef}. "
            "Call `token_logprobs` with `with_entropy=True`."
        )
    logprobs, values = zero_masked(logprobs, mask), zero_masked(values, mask)
    old_logprobs, old_values, advantages, returns = (
        jax.lax.stop_gradient(zero_masked(x, mask)) for x in fixed.values()
    )
    policy_losses = clipped_surrogate(logprobs, old_logprobs, advantages, clip_range=clip_range)
    value_losses = clipped_value_loss(values, old_values, returns, clip_range=value_clip_range)
    losses = policy_losses + value_coef * value_losses
    metrics: Metrics = {
        "ppo/policy_loss": mean_metric(policy_losses, mask),
        "ppo/value_loss": mean_metric(value_losses, mask),
        "ppo/value_mean": mean_metric(values, mask),
        "ppo/value_error": mean_metric(jnp.square(values - returns), mask),
        "ppo/value_clip_fraction": mean_metric(
            value_clip_events(values, old_values, returns, clip_range=value_clip_range), mask
        ),
        **_ratio_metrics(logprobs, old_logprobs, advantages, mask, clip_range=clip_range),
    }
    if entropy is not None:
        entropy = zero_masked(entropy, mask)
        losses = losses - entropy_coef * entropy
        metrics["ppo/entropy"] = mean_metric(entropy, mask)
    loss_sum, weight = token_mean(losses, mask)
    return LossOut(loss_sum, weight, jax.lax.stop_gradient(metrics))


def _ratio_metrics(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, clip_range: Scalar
) -> Metrics:
    """How far the policy has moved within this update, and where clipping stopped it."""
    ratio = importance_ratio(logprobs, old_logprobs)
    clipped = clip_events(logprobs, old_logprobs, advantages, clip_range=clip_range)
    return {
        "ppo/clip_fraction": mean_metric(clipped.high_positive | clipped.low_negative, mask),
        "ppo/clip_fraction_high_positive": mean_metric(clipped.high_positive, mask),
        "ppo/clip_fraction_low_negative": mean_metric(clipped.low_negative, mask),
        "ppo/ratio_mean": mean_metric(ratio, mask),
        "ppo/ratio_max": max_metric(ratio, mask),
        # Unlike the ratio, not clamped: the one number that shows how far outliers really are.
        "ppo/log_ratio_abs_max": max_metric(jnp.abs(logprobs - old_logprobs), mask),
        # The actions come from the old policy, so with r = π_θ/π_old this is k3 of KL(old ‖ new).
        "ppo/approx_kl": mean_metric(kl_k3(old_logprobs, logprobs), mask),
        "ppo/approx_kl_k2": mean_metric(kl_k2(old_logprobs, logprobs), mask),
        "ppo/policy_kl": mean_metric(kl_k1(old_logprobs, logprobs), mask),
    }
