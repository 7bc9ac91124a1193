# SPDX-License-Identifier: Apache-2.0
"""The PPO objective for language models: clipped surrogate, clipped value loss, entropy bonus.

Left out: a KL term in the loss (the KL to the reference is in the rewards), and the dual clip of Ye et al. 2020.

Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9; for language models Ziegler et al. 2019,
arXiv:1909.08593.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jrl.losses.policy_gradient import Targets, ValueLoss, clipped, policy_gradient_loss
from jrl.ops.checks import Scalar
from jrl.ops.reductions import LossOut


def ppo_loss(
    logprobs: Float[Array, "B T"],
    values: Float[Array, "B T"],
    entropy: Float[Array, "B T"] | None,
    targets: Targets,
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
      targets: The fixed side, with old values and returns.
      clip_range: ε > 0 of the ratio.
      value_clip_range: ε_v > 0 around the old value.
      value_coef: c_v >= 0. The ½ of the squared error is not in it.
      entropy_coef: c_e >= 0; the entropy is maximised.
    Returns:
      The sum over actions, their number, and the `ppo/…` metrics; all 0 for a batch without actions.
    Raises:
      ValueError: If shapes differ, a range is not positive, or there is a bonus to give but no entropy.
      TypeError: If the mask is not boolean.
    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
    Example:
      >>> import jax.numpy as jnp
      >>> zero = jnp.zeros((1, 1))
      >>> targets = Targets(zero - 1, zero, advantages=zero + 2, returns=zero + 1, mask=zero == 0)
      >>> coefs = {"clip_range": 0.2, "value_clip_range": 0.2, "value_coef": 0.5, "entropy_coef": 0.0}
      >>> float(ppo_loss(zero - 1, zero, None, targets, **coefs).loss_sum)  # −2 + 0.5·½·1²
      -1.75
    """
    return policy_gradient_loss(
        logprobs,
        targets,
        surrogate=clipped(clip_range=clip_range),
        values=values,
        value_loss=ValueLoss(value_clip_range, value_coef),
        entropy=entropy,
        entropy_coef=entropy_coef,
        prefix="ppo",
    )
