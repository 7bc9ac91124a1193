# SPDX-License-Identifier: Apache-2.0
"""The supervised objective: negative log-likelihood of the demonstrated tokens.

Rejection fine-tuning has no loss of its own: it is this one on selected samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import check_batch, check_float
from jrl.ops.metrics import mean_metric
from jrl.ops.reductions import LossOut, token_mean

TokenLoss = Callable[[Float[Array, "B T"]], Float[Array, "B T"]]
"""Log-probabilities of the targets, in nats, to one loss a token."""


def nll(logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood, ℓ_t = −log π(a_t | s_t).

    Args:
      logprobs: Log-probabilities of the targets, in nats.
    Returns:
      Loss >= 0 per token, unreduced.
    Reference: none; maximum likelihood.
    Example:
      >>> nll(jnp.array([[-1.0, -2.0]])).tolist()
      [[1.0, 2.0]]
    """
    check_float("logprobs", logprobs)
    return -logprobs


def dft(logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Dynamic fine-tuning, ℓ_t = −sg(π(a_t | s_t)) · log π(a_t | s_t): tokens that seem absurd to the model pull less.

    No gradient flows through the weight. The likelihood's gradient becomes a policy gradient of a constant reward.

    Args:
      logprobs: Log-probabilities of the targets, in nats.
    Returns:
      Loss >= 0 per token, unreduced.
    Reference: Wu et al. 2025, arXiv:2508.05629, eq. 9.
    Example:
      >>> [round(float(x), 4) for x in dft(jnp.log(jnp.array([[0.5, 0.01]])))[0]]
      [0.3466, 0.0461]
    """
    check_float("logprobs", logprobs)
    return -jax.lax.stop_gradient(jnp.exp(logprobs)) * logprobs


LOSSES: Mapping[str, TokenLoss] = {"nll": nll, "dft": dft}
"""By the name in `SFTConfig.loss_type`."""


def sft_loss(
    logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"], *, token_loss: TokenLoss = nll
) -> LossOut:
    """Loss of the demonstrated tokens, summed over them.

        L = Σ_t ℓ_t

    Args:
      logprobs: Log-probabilities of the target tokens, in nats.
      mask: True on tokens to learn: completions, or everything where the sample is one plain text.
      token_loss: ℓ, one of `LOSSES`.
    Returns:
      The sum over tokens (>= 0), their number, and `sft/loss`, per token.
    Raises:
      ValueError: If the two arrays differ in shape.
      TypeError: If `mask` is not boolean.
    Reference: none; maximum likelihood, or the reference of `token_loss`.
    Example:
      >>> loss_sum, weight, _ = sft_loss(jnp.array([[-1.0, -2.0, 0.0]]), jnp.array([[True, True, False]]))
      >>> float(loss_sum / weight)
      1.5
    """
    check_batch(mask, logprobs=logprobs)
    # Before the exponential: what stands at mask 0 may be anything, and 0·∞ is NaN in the gradient.
    losses = token_loss(jnp.where(mask, logprobs, 0.0))
    loss_sum, weight = token_mean(losses, mask)
    return LossOut(loss_sum, weight, {"sft/loss": mean_metric(losses, mask)})
