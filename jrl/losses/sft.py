# SPDX-License-Identifier: Apache-2.0
"""The supervised objective: negative log-likelihood of the demonstrated tokens.

Rejection fine-tuning has no loss of its own: it is this one on selected samples.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from jrl.ops.checks import check_batch
from jrl.ops.metrics import mean_metric
from jrl.ops.reductions import LossOut, token_mean


def sft_loss(logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> LossOut:
    """Negative log-likelihood, summed over demonstrated tokens.

        L = −Σ_t log π(a_t | s_t)

    Args:
      logprobs: Log-probabilities of the target tokens, in nats.
      mask: True on tokens to learn: completions, or everything where the sample is one plain text.
    Returns:
      The sum over tokens (>= 0), their number, and `sft/loss`, nats per token.
    Raises:
      ValueError: If the two arrays differ in shape.
      TypeError: If `mask` is not boolean.
    Example:
      >>> import jax.numpy as jnp
      >>> loss_sum, weight, _ = sft_loss(jnp.array([[-1.0, -2.0, 0.0]]), jnp.array([[True, True, False]]))
      >>> float(loss_sum / weight)
      1.5
    """
    check_batch(mask, logprobs=logprobs)
    loss_sum, weight = token_mean(-logprobs, mask)
    return LossOut(loss_sum, weight, {"sft/loss": mean_metric(-logprobs, mask)})
