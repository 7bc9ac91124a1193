# SPDX-License-Identifier: Apache-2.0
"""The objective of a reward model: of two texts, the preferred one scores higher.

A score is a log-odds up to a constant: the model holds P(chosen ≻ rejected) = σ(r⁺ − r⁻) (Bradley and Terry 1952). What
the comparison leaves open, a constant added to all scores, the centering term may settle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch, check_same_floats
from jrl.ops.logistic import logistic_loss
from jrl.ops.masking import masked_sum, zero_masked
from jrl.ops.metrics import max_metric, mean_metric, min_metric
from jrl.ops.reductions import LossOut
from jrl.typing import Metrics


def pairwise_loss(
    chosen_scores: Float[Array, "B"], rejected_scores: Float[Array, "B"], margins: Float[Array, "B"]
) -> Float[Array, "B"]:
    """Bradley-Terry loss, one value per pair.

        ℓ = −log σ(r⁺ − r⁻ − m)

    Computed as one function of its argument, so that neither the loss nor its gradient overflows.

    Args:
      chosen_scores: r⁺ of the preferred text, in nats.
      rejected_scores: r⁻ of the other one.
      margins: m, by how much r⁺ should exceed r⁻; 0 is plain Bradley-Terry.
    Returns:
      Loss ≥ 0 per pair, ln 2 for a tie at m = 0. Not averaged.
    Raises:
      ValueError: If the arrays differ in shape. A row of margins against a column of scores would broadcast.
    Reference: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    Example:
      >>> loss = pairwise_loss(jnp.array([2.0, 1.0]), jnp.array([0.0, 1.0]), jnp.zeros(2))
      >>> [round(float(x), 4) for x in loss]
      [0.1269, 0.6931]
    """
    check_same_floats("rejected_scores", rejected_scores, "chosen_scores", chosen_scores)
    check_same_floats("margins", margins, "chosen_scores", chosen_scores)
    return logistic_loss(chosen_scores - rejected_scores - margins)


def centering_loss(chosen_scores: Float[Array, "B"], rejected_scores: Float[Array, "B"]) -> Float[Array, "B"]:
    """(r⁺ + r⁻)², one value per pair: it pulls the sum of a pair to 0, not each score.

    Args:
      chosen_scores: r⁺ of the preferred text, in nats.
      rejected_scores: r⁻ of the other one.
    Returns:
      Loss >= 0 per pair. Not averaged.
    Reference: Eisenstein et al. 2023, arXiv:2312.09244, section 2.
    Example:
      >>> centering_loss(jnp.array([1.0]), jnp.array([0.5])).tolist()
      [2.25]
    """
    check_same_floats("rejected_scores", rejected_scores, "chosen_scores", chosen_scores)
    return jnp.square(chosen_scores + rejected_scores)


def reward_model_loss(
    chosen_scores: Float[Array, "B"],
    rejected_scores: Float[Array, "B"],
    margins: Float[Array, "B"],
    valid: Bool[Array, "B"],
    *,
    center_coef: Scalar,
) -> LossOut:
    """The reward model's loss, summed over pairs.

        L = Σ [ −log σ(r⁺ − r⁻ − m) + c·(r⁺ + r⁻)² ]

    Args:
      chosen_scores: r⁺ of the preferred texts.
      rejected_scores: r⁻ of the other ones.
      margins: m of each pair; 0 where the data says nothing.
      valid: False on pairs that do not count. Nothing of them is read, so NaN may stand there.
      center_coef: c ≥ 0 of the centering term.
    Returns:
      The sum over pairs, their number, and the `reward_model/…` metrics: loss, accuracy (share of pairs with r⁺ > r⁻,
      a tie being wrong, margins left aside), mean margin r⁺ − r⁻, and least, mean and largest score of both halves.
    Raises:
      ValueError: If the arrays differ in shape.
      TypeError: If `valid` is not boolean.
    Reference: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2;
    centering: Eisenstein et al. 2023, arXiv:2312.09244, section 2.
    Example:
      >>> chosen, rejected, valid = jnp.array([1.0, 0.5]), jnp.array([0.2, 0.7]), jnp.array([True, True])
      >>> out = reward_model_loss(chosen, rejected, jnp.array([0.3, 0.0]), valid, center_coef=0.01)
      >>> round(float(out.loss_sum / out.weight), 5)
      0.65051
    """
    check_batch(
        valid, name="valid", chosen_scores=chosen_scores, rejected_scores=rejected_scores, margins=margins
    )
    chosen, rejected = zero_masked(chosen_scores, valid), zero_masked(rejected_scores, valid)
    losses = pairwise_loss(chosen, rejected, zero_masked(margins, valid))
    losses = losses + center_coef * centering_loss(chosen, rejected)
    scores, both = jnp.concatenate([chosen, rejected]), jnp.concatenate([valid, valid])
    metrics: Metrics = {
        "reward_model/loss": mean_metric(losses, valid),
        "reward_model/accuracy": mean_metric(chosen > rejected, valid),
        "reward_model/margin": mean_metric(chosen - rejected, valid),
        "reward_model/score_min": min_metric(scores, both),
        "reward_model/score_mean": mean_metric(scores, both),
        "reward_model/score_max": max_metric(scores, both),
    }
    weight = jnp.sum(valid, dtype=losses.dtype)
    return LossOut(masked_sum(losses, valid), weight, jax.lax.stop_gradient(metrics))
