# SPDX-License-Identifier: Apache-2.0
"""The logistic loss, which preference losses and reward models share."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from jrl.ops.checks import check_float


def logistic_loss(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """ℓ = −log σ(x), elementwise: the surprise, in nats, that the answer of logit x is the right one.

    One function of its argument, so that neither the loss nor its gradient overflows.

    Args:
      logits: x, any real number.
    Returns:
      Loss > 0, log 2 at x = 0. Not averaged.
    Raises:
      TypeError: If `logits` is not floating.
    Reference: none; the cross-entropy of a Bernoulli variable with logit x.
    Example:
      >>> import jax.numpy as jnp
      >>> [round(float(loss), 4) for loss in logistic_loss(jnp.array([0.0, 2.0]))]
      [0.6931, 0.1269]
    """
    check_float("logits", logits)
    return -jax.nn.log_sigmoid(logits)


def smoothed_logistic_loss(
    logits: Float[Array, "*shape"], *, label_smoothing: float | Float[Array, ""]
) -> Float[Array, "*shape"]:
    """ℓ = −(1 − ε)·log σ(x) − ε·log σ(−x): cross-entropy of a label that is wrong with probability ε.

    Args:
      logits: x, any real number.
      label_smoothing: ε in [0, 1].
    Returns:
      Loss > 0. Not averaged.
    Reference: none; label smoothing of `logistic_loss`.
    Example:
      >>> import jax.numpy as jnp
      >>> round(float(smoothed_logistic_loss(jnp.array(2.0), label_smoothing=0.25)), 4)  # ¾·0.1269 + ¼·2.1269
      0.6269
    """
    return (1 - label_smoothing) * logistic_loss(logits) + label_smoothing * logistic_loss(-logits)
