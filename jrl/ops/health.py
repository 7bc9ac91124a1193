# SPDX-License-Identifier: Apache-2.0
"""How far the policy that learns is from the one that sampled."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import check_batch
from jrl.ops.kl import kl_k3
from jrl.ops.masking import zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.policy_gradient import importance_ratio
from jrl.typing import Metrics


def sampler_health(
    logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Metrics:
    """Agreement of sampler and learner over the sampled actions.

    With d = log π_learner − log π_sampler, which is rounding alone unless top-k or top-p filtered:

    - `health/sampler_abs_ratio_mean`: mean e^|d|; look into it above 1.02.
    - `health/sampler_kl`: k3 of the sampler against the learner, in nats per token; healthy below 1e-3.
    - `health/sampler_difference_max`: largest |d|, in nats.
    - `health/sampler_ratio_mean`: mean e^d. Its expectation is 1 for *any* learner if the record is that of
      the distribution sampled from: it tells whether the record is honest, not whether the two agree. Under
      top-k or top-p it is the mass that the filter kept.

    Args:
      logprobs: Of the learner before its first step, from scoring: unfiltered logits.
      sampler_logprobs: Recorded by the sampler: processed logits.
      mask: True on actions; nothing is read elsewhere.
    Returns:
      The four metrics. In exponentials d is clamped to ±20.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If the mask is not boolean.
    Example:
      >>> metrics = sampler_health(jnp.array([[-1.0, 9.0]]), jnp.array([[-1.5, 0.0]]), jnp.array([[True, False]]))
      >>> float(metrics["health/sampler_difference_max"].value)
      0.5
    """
    check_batch(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    learner, sampler = zero_masked(logprobs, mask), zero_masked(sampler_logprobs, mask)
    difference = jnp.abs(learner - sampler)
    return {
        "health/sampler_abs_ratio_mean": mean_metric(
            importance_ratio(difference, jnp.zeros_like(difference)), mask
        ),
        "health/sampler_kl": mean_metric(kl_k3(sampler, learner), mask),
        "health/sampler_difference_max": max_metric(difference, mask),
        "health/sampler_ratio_mean": mean_metric(importance_ratio(learner, sampler), mask),
    }
