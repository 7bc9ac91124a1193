# SPDX-License-Identifier: Apache-2.0
"""The ILQL objective: Q learning in the support of the data, for a language model with value and Q heads.

Index t speaks of the t-th action of a row, whatever lies between two turns: the actions stand one after another.
Behind the last one the value is 0, or `after` where the episode goes on in another row.

Deviates from the paper: policy, values and Q values share one trunk, which learns from all terms, as in trlX; and the
likelihood may be weighted by the advantage.

Reference: Snell et al. 2022, arXiv:2206.11871, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.alignment import next_values
from jrl.ops.checks import (
    Scalar,
    check_batch,
    check_float,
    check_mask,
    check_same_floats,
    check_same_shape,
    check_share,
)
from jrl.ops.masking import zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.reductions import LossOut, token_mean
from jrl.ops.returns import gae
from jrl.typing import Metrics

MAX_LOG_WEIGHT = 20.0
"""Exponents of AWAC weights are clamped at this: far above any weight that still learns, far inside float32."""


class ILQLPredictions(NamedTuple):
    """A model's predictions for the actions of a batch. N is the number of Q heads.

    Attributes:
      logprobs: log π(a_t | s_t), in nats.
      values: V(s_t).
      q_values: Q_i(s_t, a_t) of every head.
      q_logprobs: log softmax(Q_i(s_t, ·))[a_t]: the Q values of all actions read as logits.
      target_q: min_i of the target heads' Q_i(s_t, a_t).
    """

    logprobs: Float[Array, "B T"]
    values: Float[Array, "B T"]
    q_values: Float[Array, "B T N"]
    q_logprobs: Float[Array, "B T N"]
    target_q: Float[Array, "B T"]


def bellman_targets(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: Scalar,
    after: Float[Array, "B"] | None = None,
) -> Float[Array, "B T"]:
    """Targets of Q: the reward plus the discounted value of the state in which the next action is chosen.

        y_t = r_t + γ·V(s_{t+1}),   V = `after` behind the last action

    Args:
      rewards: Of each action; that of an utterance sits on its last one.
      values: V(s_t).
      mask: True on actions, which come first in their row.
      gamma: Discount γ per action, in [0, 1].
      after: V of the state behind the last action of each row, 0 where that state is terminal; None: all are.
    Returns:
      Targets, 0 where `mask` is False. No gradient flows through.
    Raises:
      ValueError: If the arrays differ in shape, or γ is outside [0, 1].
      TypeError: If `mask` is not boolean.
    Reference: Snell et al. 2022, arXiv:2206.11871, section 4.
    Example:
      >>> rewards, values = jnp.array([[0.0, 1.0, 7.0]]), jnp.array([[0.25, 0.5, 7.0]])
      >>> bellman_targets(rewards, values, jnp.array([[True, True, False]]), gamma=0.5).tolist()
      [[0.25, 1.0, 0.0]]
    """
    check_batch(mask, rewards=rewards, values=values)
    check_share("gamma", gamma)
    earned = _with_what_follows(rewards, mask, after, gamma=gamma)
    following = next_values(zero_masked(values, mask))
    return jax.lax.stop_gradient(zero_masked(earned + gamma * following, mask))


def monte_carlo_targets(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: Scalar,
    after: Float[Array, "B"] | None = None,
) -> Float[Array, "B T"]:
    """Targets of Q: the discounted return from each action on, as the data went on.

        y_t = r_t + γ·y_{t+1},   y = `after` behind the last action

    Args:
      rewards: Of each action; that of an utterance sits on its last one.
      values: Not read; here because every function of `Q_TARGETS` takes the same.
      mask: True on actions, which come first in their row.
      gamma: Discount γ per action, in [0, 1].
      after: Discounted return of the episode behind the last action of each row; None: 0.
    Returns:
      Targets, 0 where `mask` is False. No gradient flows through.
    Raises:
      ValueError: If the arrays differ in shape, or γ is outside [0, 1].
      TypeError: If `mask` is not boolean.
    Reference: Abdulhai et al. 2023, arXiv:2311.18232, section 5 (MC returns).
    Example:
      >>> rewards, mask = jnp.array([[-1.0, -1.0, 7.0]]), jnp.array([[True, True, False]])
      >>> monte_carlo_targets(rewards, 0 * rewards, mask, gamma=0.5, after=jnp.array([-4.0])).tolist()
      [[-2.5, -3.0, 0.0]]
    """
    check_batch(mask, rewards=rewards, values=values)
    earned = _with_what_follows(rewards, mask, after, gamma=gamma)
    # At λ = 1 and V = 0 the advantage is the return.
    return jax.lax.stop_gradient(gae(earned, jnp.zeros_like(values), mask, gamma=gamma, gae_lambda=1.0))


QTargets = Callable[..., Float[Array, "B T"]]
"""`(rewards, values, mask, *, gamma, after) -> targets of Q`."""
Q_TARGETS: Mapping[str, QTargets] = {"td": bellman_targets, "mc": monte_carlo_targets}
"""By the name in `ILQLConfig.target`."""


def q_loss(q_values: Float[Array, "B T N"], targets: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Squared error of every head against the same target, Σ_i (Q_i − y)²: the sum over heads, without a ½.

    Args:
      q_values: Q_i(s_t, a_t) of every head; the only argument to differentiate.
      targets: y_t, from `bellman_targets`.
    Returns:
      Loss >= 0, (B T), unreduced.
    Reference: Snell et al. 2022, arXiv:2206.11871, section 4.
    Example:
      >>> q_loss(jnp.array([[[1.0, 4.0]]]), jnp.array([[2.0]])).tolist()  # 1² + 2²
      [[5.0]]
    """
    check_float("q_values", q_values)
    check_float("targets", targets)
    check_same_shape("targets", targets, "q_values[..., 0]", q_values[..., 0])
    return jnp.sum(jnp.square(q_values - targets[..., None]), axis=-1)


def expectile_loss(
    values: Float[Array, "B T"], target_q: Float[Array, "B T"], *, expectile: Scalar
) -> Float[Array, "B T"]:
    """Asymmetric squared error, by which V tends to the τ-expectile of Q over the actions of the data.

        ℓ = |τ − 1[Q < V]|·(Q − V)²

    Args:
      values: V(s_t): the only argument to differentiate.
      target_q: Of the action that was taken.
      expectile: τ in (0, 1): ½ is half the squared error, whose minimum is the mean; 1 tends to the largest Q.
    Returns:
      Loss >= 0, (B T), unreduced, without a further ½. No gradient reaches `target_q`.
    Raises:
      ValueError: If the arrays differ in shape, or τ is outside [0, 1].
    Reference: Kostrikov et al. 2021, arXiv:2110.06169, eq. 5.
    Example:
      >>> expectile_loss(jnp.zeros((1, 2)), jnp.array([[1.0, -1.0]]), expectile=0.75).tolist()
      [[0.75, 0.25]]
    """
    check_same_floats("target_q", target_q, "values", values)
    check_share("expectile", expectile)
    difference = jax.lax.stop_gradient(target_q) - values
    return jnp.where(difference >= 0, expectile, 1 - expectile) * jnp.square(difference)


def conservative_loss(q_logprobs: Float[Array, "B T N"]) -> Float[Array, "B T"]:
    """Cross-entropy of every head's Q values, read as logits, against the action of the data; summed over heads.

    It lowers Q of the actions that the data never show, which no Bellman target ever corrects.

    Args:
      q_logprobs: log softmax(Q_i(s_t, ·))[a_t] of every head, in nats.
    Returns:
      Loss >= 0, (B T), unreduced.
    Reference: Kumar et al. 2020, arXiv:2006.04779, eq. 4, as in Snell et al. 2022.
    Example:
      >>> conservative_loss(jnp.array([[[-1.0, -2.0]]])).tolist()
      [[3.0]]
    """
    check_float("q_logprobs", q_logprobs)
    return -jnp.sum(q_logprobs, axis=-1)


def awac_weights(
    target_q: Float[Array, "B T"], values: Float[Array, "B T"], *, beta: Scalar
) -> Float[Array, "B T"]:
    """AWAC's weights of the likelihood, exp(β(Q − V)), at most e^20; 1 throughout at β = 0. No gradient.

    Args:
      target_q: Q(s_t, a_t).
      values: V(s_t).
      beta: β >= 0.
    Returns:
      Above 0 at each action; not reduced.
    Reference: Nair et al. 2020, arXiv:2006.09359, eq. 9, with β for 1/λ.
    Example:
      >>> round(float(awac_weights(jnp.array([[1.0]]), jnp.array([[0.5]]), beta=2.0)[0, 0]), 4)
      2.7183
    """
    check_same_floats("target_q", target_q, "values", values)
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(beta * (target_q - values), MAX_LOG_WEIGHT)))


def ilql_loss(
    predictions: ILQLPredictions,
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: Scalar,
    expectile: Scalar,
    cql_coef: Scalar,
    awac_coef: Scalar,
    awac_beta: Scalar,
    targets: QTargets = bellman_targets,
    after: Float[Array, "B"] | None = None,
) -> LossOut:
    """ILQL's loss, summed over actions.

        L = Σ_t [ Σ_i (Q_i − y)² + |τ − 1[Q̄ < V]|·(Q̄ − V)² − c_q·Σ_i log softmax(Q_i)[a] − c_a·exp(β(Q̄ − V))·log π ]

    Q learns from the online V (y = r + γV'), V from the target Q̄; neither target passes a gradient, nor does the
    weight of the likelihood.

    Args:
      predictions: Differentiated, `target_q` excepted.
      rewards: Of each action; where only the end of a row is rewarded, 0 but for its last one.
      mask: True on actions, which come first in their row. Elsewhere nothing is read, so NaN may stand there.
      gamma: γ in [0, 1].
      expectile: τ in (0, 1); above ½, V leans to the better actions.
      cql_coef: c_q >= 0 of the conservative term.
      awac_coef: c_a >= 0 of the likelihood.
      awac_beta: β >= 0; 0 is plain likelihood. Not the β of decoding.
      targets: Makes y, one of `Q_TARGETS`.
      after: What `targets` counts behind the last action of each row; None: 0.
    Returns:
      The sum over actions, their number, and the `ilql/…` metrics; all 0 for a batch without actions.
    Raises:
      ValueError: If shapes differ.
      TypeError: If the mask is not boolean.
    Reference: Snell et al. 2022, arXiv:2206.11871, section 4; the weighted likelihood: Nair et al. 2020,
    arXiv:2006.09359.
    Example:
      >>> one = jnp.ones((1, 1))  # Q = y = 1, V = 0; log-probabilities −1
      >>> predictions = ILQLPredictions(-one, 0 * one, one[..., None], -one[..., None], one)
      >>> coefs = {"cql_coef": 0.5, "awac_coef": 2.0, "awac_beta": 0.0}
      >>> loss = ilql_loss(predictions, one, one > 0, gamma=1.0, expectile=0.75, **coefs)
      >>> float(loss.loss_sum)  # 0 + 0.75 + 0.5·1 + 2·1
      3.25
    """
    check_mask(mask)
    p = _where_acting(predictions, mask)
    weights = awac_weights(p.target_q, p.values, beta=awac_beta)
    q_losses = q_loss(p.q_values, targets(rewards, p.values, mask, gamma=gamma, after=after))
    value_losses = expectile_loss(p.values, p.target_q, expectile=expectile)
    cql_losses, awac_losses = conservative_loss(p.q_logprobs), -weights * p.logprobs
    losses = q_losses + value_losses + cql_coef * cql_losses + awac_coef * awac_losses
    metrics: Metrics = {
        "ilql/loss": mean_metric(losses, mask),
        "ilql/q_loss": mean_metric(q_losses, mask),
        "ilql/value_loss": mean_metric(value_losses, mask),
        "ilql/cql_loss": mean_metric(cql_losses, mask),
        "ilql/awac_loss": mean_metric(awac_losses, mask),
        "ilql/q_mean": mean_metric(jnp.mean(p.q_values, axis=-1), mask),
        "ilql/target_q_mean": mean_metric(p.target_q, mask),
        "ilql/value_mean": mean_metric(p.values, mask),
        "ilql/advantage_mean": mean_metric(p.target_q - p.values, mask),
        "ilql/advantage_max": max_metric(p.target_q - p.values, mask),
        "ilql/awac_weight_mean": mean_metric(weights, mask),
        "ilql/awac_weight_max": max_metric(weights, mask),
    }
    loss_sum, weight = token_mean(losses, mask)
    return LossOut(loss_sum, weight, jax.lax.stop_gradient(metrics))


def _with_what_follows(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], after: Float[Array, "B"] | None, *, gamma: Scalar
) -> Float[Array, "B T"]:
    """The rewards, the last one of each row with γ·`after`: the recursion behind the last action begins there."""
    if after is None:
        return rewards
    check_float("after", after)
    check_same_shape("after", after, "mask[:, 0]", mask[:, 0])
    is_last = mask & ~next_values(mask)
    return jnp.where(is_last, zero_masked(rewards, mask) + gamma * after[:, None], rewards)


def _where_acting(predictions: ILQLPredictions, mask: Bool[Array, "B T"]) -> ILQLPredictions:
    """The predictions with 0 outside the mask, before any arithmetic."""
    p, heads = predictions, jnp.broadcast_to(mask[..., None], (*mask.shape, predictions.q_values.shape[-1]))
    check_batch(mask, logprobs=p.logprobs, values=p.values, target_q=p.target_q)
    check_float("q_values", p.q_values)
    check_same_shape("q_values[..., 0]", p.q_values[..., 0], "mask", mask)
    check_same_floats("q_logprobs", p.q_logprobs, "q_values", p.q_values)
    return ILQLPredictions(
        logprobs=zero_masked(p.logprobs, mask),
        values=zero_masked(p.values, mask),
        q_values=zero_masked(p.q_values, heads),
        q_logprobs=zero_masked(p.q_logprobs, heads),
        target_q=zero_masked(p.target_q, mask),
    )
