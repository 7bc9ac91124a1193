# SPDX-License-Identifier: Apache-2.0
"""The objective of denoising diffusion policy optimisation: PPO's clipped surrogate of single denoising steps.

Reference: Black et al. 2023, arXiv:2305.13301, eq. 4 (DDPO-IS); the KL term: Fan et al. 2023 (DPOK), arXiv:2305.16381.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch, check_positive
from jrl.ops.kl import kl_k2
from jrl.ops.masking import masked_sum, zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.policy_gradient import clip_events, clipped_surrogate, importance_ratio
from jrl.ops.reductions import LossOut
from jrl.typing import Metrics


def ddpo_loss(
    logprobs: Float[Array, "B"],
    old_logprobs: Float[Array, "B"],
    advantages: Float[Array, "B"],
    valid: Bool[Array, "B"],
    *,
    clip_range: Scalar,
    advantage_clip: float,
    kl: Float[Array, "B"] | None = None,
    beta_kl: Scalar = 0.0,
) -> LossOut:
    """DDPO's loss, summed over denoising steps.

        L = Σ [ max(−A·ρ, −A·clip(ρ, 1−ε, 1+ε)) + β·KL ],   A = clip(advantage, ±c),   ρ = π_θ/π_old

    Log-probabilities are means over the elements of the latents, which is what makes ε = 1e-4 a sensible size. No
    gradient reaches `old_logprobs` or `advantages`.

    Args:
      logprobs: Mean log-density per latent element of the stored step, in nats.
      old_logprobs: Under the policy that took the step; constant over all inner epochs.
      advantages: Of the sample that the step belongs to, or of the step.
      valid: False on padding and on samples that are left out.
      clip_range: ε > 0.
      advantage_clip: c > 0.
      kl: KL of the step from that of the reference, per latent element; None: no KL term.
      beta_kl: β >= 0.
    Returns:
      The sum over steps, their number, and the `ddpo/…` metrics; all 0 where nothing is valid.
    Raises:
      ValueError: If shapes differ or ε is not positive.
      TypeError: If `valid` is not boolean.
    Reference: Black et al. 2023, arXiv:2305.13301, eq. 4; the KL term: Fan et al. 2023, arXiv:2305.16381.
    Example:
      >>> zero, one = jnp.zeros(1), jnp.ones(1, bool)
      >>> loss = ddpo_loss(zero, zero, jnp.full(1, -1.0), one, clip_range=1e-4, advantage_clip=5.0)
      >>> float(loss.loss_sum)
      1.0
    """
    check_batch(valid, name="valid", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    logprobs = zero_masked(logprobs, valid)
    old_logprobs, advantages = (
        jax.lax.stop_gradient(zero_masked(x, valid)) for x in (old_logprobs, advantages)
    )
    check_positive("advantage_clip", advantage_clip)
    advantages = jnp.clip(advantages, -advantage_clip, advantage_clip)
    losses = clipped_surrogate(logprobs, old_logprobs, advantages, clip_range=clip_range)
    metrics: Metrics = {"ddpo/policy_loss": mean_metric(losses, valid)}
    if kl is not None:
        check_batch(valid, name="valid", kl=kl)
        kl = zero_masked(kl, valid)
        losses = losses + beta_kl * kl
        metrics["ddpo/kl"] = mean_metric(kl, valid)
    metrics["ddpo/loss"] = mean_metric(losses, valid)
    metrics |= _ratio_metrics(logprobs, old_logprobs, advantages, valid, clip_range=clip_range)
    weight = jnp.sum(valid, dtype=jnp.float32)
    return LossOut(masked_sum(losses, valid), weight, jax.lax.stop_gradient(metrics))


def _ratio_metrics(
    logprobs: Array, old_logprobs: Array, advantages: Array, valid: Array, *, clip_range: Scalar
) -> Metrics:
    """Distance of the policy from the one that sampled, and counts of clipping."""
    ratio = importance_ratio(logprobs, old_logprobs)
    clipped = clip_events(logprobs, old_logprobs, advantages, clip_range=clip_range)
    return {
        "ddpo/approx_kl": mean_metric(kl_k2(old_logprobs, logprobs), valid),
        # Of either sign of the advantage: where the ratio left the region, not only where that stopped the gradient.
        "ddpo/clip_fraction": mean_metric(jnp.abs(ratio - 1) > clip_range, valid),
        "ddpo/clip_fraction_high_positive": mean_metric(clipped.high_positive, valid),
        "ddpo/clip_fraction_low_negative": mean_metric(clipped.low_negative, valid),
        "ddpo/ratio_mean": mean_metric(ratio, valid),
        "ddpo/ratio_max_dev": max_metric(jnp.abs(ratio - 1), valid),
    }
