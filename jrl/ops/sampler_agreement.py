# SPDX-License-Identifier: Apache-2.0
"""Agreement between the policy that learns and the one that sampled."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import check_batch
from jrl.ops.kl import kl_k3
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.policy_gradient import bounded_log_ratio
from jrl.typing import Metrics


def sampler_agreement(
    logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Metrics:
    """Health of the pair sampler and learner, over actions.

    With d = log π_learner − log π_sampler, which is rounding in a healthy run without top-k and top-p:

    - `sampler/abs_ratio`: mean exp|d|; look into it above 1.02.
    - `sampler/kl_k3`: KL(sampler ‖ learner), estimated, in nats; healthy below 1e-3.
    - `sampler/max_difference`: max |d|, in nats.
    - `sampler/ratio`: mean exp d. It is 1 for *any* learner as long as the recorded log-probabilities are
      those of the distribution that was sampled from, so it tells whether the record is honest, and nothing
      else.

    Args:
      logprobs: Of the learner, before its first step.
      sampler_logprobs: Recorded when sampling.
      mask: True on actions.
    Returns:
      Metrics by name, over all actions.
    Reference: Schulman 2020, "Approximating KL divergence", for k3.
    Example:
      >>> found = sampler_agreement(jnp.array([[-1.0]]), jnp.array([[-1.5]]), jnp.array([[True]]))
      >>> round(float(found["sampler/ratio"].total), 4)  # e^0.5
      1.6487
    """
    check_batch(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    difference = jnp.where(mask, logprobs - sampler_logprobs, 0.0)
    bounded = bounded_log_ratio(difference, jnp.zeros_like(difference))
    return {
        "sampler/abs_ratio": mean_metric(jnp.exp(jnp.abs(bounded)), mask),
        "sampler/kl_k3": mean_metric(kl_k3(jnp.zeros_like(difference), difference), mask),
        "sampler/max_difference": max_metric(jnp.abs(difference), mask),
        "sampler/ratio": mean_metric(jnp.exp(bounded), mask),
    }
