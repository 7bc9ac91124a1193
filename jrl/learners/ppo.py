# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization of a language model: a score for the text, a KL penalty and a value per token.

Reference: Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jrl.learners.accumulate import Loss, Rows, optimizer_step, split_rows, take_rows
from jrl.learners.forward import mask_rows, trunk_of_rows
from jrl.learners.ppo_config import PPOConfig
from jrl.learners.ppo_epochs import run_epochs, shuffled_rows
from jrl.learners.ppo_estimates import (
    ScoreMoments,
    init_score_moments,
    kl_per_sequence,
    learning_targets,
    rollout_metrics,
    scaled_scores,
)
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.ppo import PPOTargets, ppo_loss
from jrl.mesh import hold_split
from jrl.ops.forward import window_features, window_logprobs
from jrl.ops.kl import adaptive_kl_coef
from jrl.ops.masking import masked_mean
from jrl.ops.metrics import max_metric, mean_metric, reduce_metrics
from jrl.ops.moments import moments_std
from jrl.ops.policy_gradient import importance_ratio
from jrl.typing import (
    Frozen,
    Kept,
    Max,
    Mean,
    Metrics,
    Params,
    PolicyFns,
    PPOBatch,
    PRNGKey,
    Sequences,
    Trunk,
    Update,
)

_FIRST = "ppo/ratio_max_dev_first_minibatch"
_LOSSES = ("ppo/policy_loss", "ppo/value_loss")
RATIOS = "ppo/ratios"
"""Rows of π_θ/π_old, one a rollout and epoch, −1 where there is no action; see `make_ppo_update`."""


@struct.dataclass
class PPOState:
    """All that PPO carries from one iteration to the next.

    Attributes:
      train: Parameters and optimizer.
      kl_coef: Weight of the KL penalty in the next iteration's rewards.
      moments: Of the scores.
    """

    train: TrainState
    kl_coef: Float[Array, ""]
    moments: ScoreMoments


class _Rollouts(NamedTuple):
    """Everything of a rollout that an epoch reads, row by row."""

    sequences: Sequences
    trunk: Trunk
    targets: PPOTargets


def init_ppo_state(params: Params, optimizer: optax.GradientTransformation, config: PPOConfig) -> PPOState:
    """State before the first iteration."""
    return PPOState(
        train=init_train_state(params, optimizer),
        kl_coef=jnp.float32(config.init_kl_coef),
        moments=init_score_moments(config.ref_std),
    )


def ppo_objective(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    trunk: Trunk,
    sequences: Sequences,
    targets: PPOTargets,
    *,
    config: PPOConfig,
    temperature: float,
    logprob_chunk_bytes: int,
    keep_ratios: bool = False,
) -> Loss:
    """Clipped surrogate and value loss, to be differentiated with respect to `params`: (sum, weight, metrics).

    Args:
      policy: The model, with a value head.
      params: Its trainable parameters.
      frozen: The rest.
      trunk: Of the sequences.
      sequences: Rollouts.
      targets: What they are trained towards; their mask is not read, but that of the sequences.
      config: Names of trlX; bound here to the standard terms and nowhere else.
      temperature: Of the rollouts; divides the logits as it did in the sampler and in scoring.
      logprob_chunk_bytes: Most bytes of logits held at a time.
      keep_ratios: Whether the metrics hold `RATIOS`.
    """
    features = window_features(policy, params, frozen, trunk, sequences)
    now = window_logprobs(
        policy,
        params,
        frozen,
        features.policy,
        sequences,
        temperature=temperature,
        chunk_bytes=logprob_chunk_bytes,
        with_entropy=True,
    )
    ratio = importance_ratio(now.logprobs, targets.old_logprobs)
    loss = partial(
        ppo_loss,
        clip_range=config.cliprange,
        value_clip_range=config.cliprange_value,
        value_coef=config.vf_coef,
        entropy_coef=config.entropy_coef,
    )
    # Without a bonus the entropy is only reported, and its backward pass would be work for nothing.
    entropy = now.entropy if config.entropy_coef else jax.lax.stop_gradient(now.entropy)
    found = now.logprobs, policy.heads(params, features.value)["values"], entropy
    mask, extra = sequences.mask, {}
    if config.ratio_threshold is not None:
        ran_away = masked_mean(ratio, mask) > config.ratio_threshold
        # The losses alone leave it out; how far the policy moved is seen, above all by `max_policy_kl`.
        watched = loss(*jax.lax.stop_gradient(found), targets._replace(mask=sequences.mask)).metrics
        extra = {name: value for name, value in watched.items() if name not in _LOSSES}
        extra["ppo/minibatches_left_out"] = mean_metric(ran_away, jnp.any(mask))
        # Taken out by the mask, before any arithmetic: a loss that overflowed, times 0, would be NaN.
        mask = mask & ~ran_away
    out = loss(*found, targets._replace(mask=mask))
    extra[_FIRST] = max_metric(jnp.abs(ratio - 1), sequences.mask)
    if keep_ratios:
        extra[RATIOS] = Kept(jnp.where(sequences.mask, ratio, -1.0))
    return out.loss_sum, out.weight, out.metrics | jax.lax.stop_gradient(extra)


def make_ppo_update(
    policy: PolicyFns,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    batch_size: int,
    minibatch_size: int,
    logprob_chunk_bytes: int,
    temperature: float,
    keep_ratios: bool = False,
) -> Update:
    """One PPO iteration over a set of rollouts: all epochs and minibatches in one compiled call.

    Old log-probabilities and values are those of the batch, from before the first step, in every epoch. Each
    epoch visits the rollouts in a fresh order; rows without actions come last and weigh nothing.

    Args:
      policy: The model, with a value head.
      optimizer: From `make_optimizer`.
      config: Names of trlX; bound here to the standard terms and nowhere else.
      batch_size: Rollouts of an optimizer step, over all devices. The last step of an epoch may have fewer.
      minibatch_size: Rollouts in one forward pass; must divide `batch_size`.
      logprob_chunk_bytes: Most bytes of logits held at a time.
      temperature: Of the rollouts; divides the logits as it did in the sampler and in scoring.
      keep_ratios: Whether the metrics hold `RATIOS`, the ratio of every action in every epoch.
    Returns:
      `(PPOState, frozen, PPOBatch, key) -> (PPOState, metrics)`: `ppo_epochs · ceil(N / batch_size)` steps, or fewer
      under `max_policy_kl`.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`, or the temperature is not positive.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    if not temperature > 0:
        raise ValueError(f"`temperature` must be that of the rollouts, positive, got {temperature}.")
    _warn_of_discount(config)

    def objective(frozen: Frozen, rollouts: _Rollouts, params: Params, rows: Rows) -> Loss:
        taken = take_rows(rollouts, rows.ids)
        sequences = mask_rows(taken.sequences, rows.valid)
        return ppo_objective(
            policy,
            params,
            hold_split(frozen, rows),
            taken.trunk,
            sequences,
            taken.targets,
            config=config,
            temperature=temperature,
            logprob_chunk_bytes=logprob_chunk_bytes,
            keep_ratios=keep_ratios,
        )

    def update(state: PPOState, frozen: Frozen, batch: PPOBatch, key: PRNGKey) -> tuple[PPOState, Metrics]:
        sequences, mask = batch.sequences, batch.sequences.mask
        scores, moments = scaled_scores(batch, state.moments, config)
        targets = learning_targets(scores, batch, state.kl_coef, config)
        trunk = trunk_of_rows(policy, frozen, sequences.inputs, minibatch_size=minibatch_size)
        rollouts = _Rollouts(sequences, trunk, targets)

        def step(train: TrainState, rows: Rows) -> tuple[TrainState, Metrics]:
            return optimizer_step(train, optimizer, partial(objective, frozen, rollouts), rows)

        orders = jnp.stack(
            [shuffled_rows(mask, epoch_key) for epoch_key in jax.random.split(key, config.ppo_epochs)]
        )
        train, stacked = run_epochs(
            step,
            state.train,
            orders,
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            max_kl=config.max_policy_kl,
        )
        metrics = _metrics_of_steps(stacked) | rollout_metrics(batch, targets, config.kl_penalty)
        one = jnp.ones(())
        metrics["kl/coef"] = Mean(state.kl_coef, one)
        metrics["reward/running_mean"] = Mean(moments.running.mean, one)
        metrics["reward/running_std"] = Mean(moments_std(moments.running), one)
        kl_coef = _next_kl_coef(state.kl_coef, kl_per_sequence(batch, config.kl_penalty), config)
        return PPOState(train=train, kl_coef=kl_coef, moments=moments), metrics

    return update


def _warn_of_discount(config: PPOConfig) -> None:
    if config.gamma < 1:
        tokens = (config.gen_experience_kwargs or config.gen_kwargs)["max_new_tokens"]
        tokens = tokens[0] if isinstance(tokens, list | tuple) else tokens  # the first value of a sweep
        warnings.warn(
            f"`method.gamma` = {config.gamma} discounts per token: at the first of {tokens} tokens, the score of "
            f"the last counts {config.gamma**tokens:.2g}. For text, 1 is usual.",
            stacklevel=3,
        )


def _metrics_of_steps(stacked: Metrics) -> Metrics:
    """Metrics of all optimizer steps as one; of the ratio's deviation, the first step's alone."""
    first = stacked.pop(_FIRST)
    assert isinstance(first, Max)
    return reduce_metrics(stacked) | {_FIRST: Max(first.value[0])}


def _next_kl_coef(kl_coef: Float[Array, ""], kl: Mean, config: PPOConfig) -> Float[Array, ""]:
    """The controller's answer to the rollouts of this iteration; without a target the weight is fixed."""
    if config.target is None:
        return kl_coef
    return adaptive_kl_coef(
        kl_coef,
        kl.total / jnp.maximum(kl.weight, 1.0),
        target_kl=config.target,
        horizon=config.horizon,
        num_rollouts=kl.weight,
    )
