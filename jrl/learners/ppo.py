# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization of a language model: a score for the text, a KL penalty and a value per token.

Reference: Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.accumulate import Loss, Rows, layout_rows, optimizer_step, split_rows, take_rows
from jrl.learners.config import MethodConfig, check_fields
from jrl.learners.forward import mask_rows, trunk_of_rows
from jrl.learners.ppo_estimates import (
    ScoreMoments,
    estimate_advantages,
    init_score_moments,
    kl_per_sequence,
    rollout_metrics,
    scale_scores,
)
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.ppo import PPOTargets, ppo_loss
from jrl.ops.forward import window_features, window_logprobs
from jrl.ops.kl import adaptive_kl_coef
from jrl.ops.metrics import max_metric, reduce_metrics
from jrl.ops.moments import moments_std
from jrl.ops.policy_gradient import importance_ratio
from jrl.typing import (
    Frozen,
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

SCALE_REWARD_MODES = ("running", "ref", "ignored", None, False)
_FIRST = "ppo/ratio_max_dev_first_minibatch"


@dataclass(kw_only=True)
class PPOConfig(MethodConfig):
    """Proximal policy optimization of a language model against a reward, with a KL penalty to its reference.

    Attributes:
      ppo_epochs: Passes over each set of rollouts, usually 1 to 4.
      num_rollouts: Rollouts collected for one iteration, over all devices.
      chunk_size: Prompts of one generation call, over all devices; also the batch of an evaluation.
      init_kl_coef: Weight of the KL penalty in the reward at the start.
      target: KL per sequence, in nats, that the adaptive controller steers to; None keeps the weight fixed.
      horizon: Rollouts over which the adaptive controller may move the weight by 20 %.
      gamma: Discount per token; 1 unless argued.
      lam: λ of generalised advantage estimation.
      cliprange: Half-width of the ratio clip.
      cliprange_value: Half-width of the value clip.
      vf_coef: Weight of the value loss.
      entropy_coef: Weight of the entropy bonus; 0 only reports the entropy.
      scale_reward: "running" divides scores by their running standard deviation, "ref" by `ref_std`;
        "ignored", None and False leave them. The mean is never subtracted.
      ref_mean: Mean of the reference scores: goes with `ref_std`, and changes nothing, as no mean is subtracted.
      ref_std: Standard deviation of the reference scores; None takes that of the first iteration's.
      cliprange_reward: Scores are clipped to ±this before anything else; None, False and 0 are off.
      missing_eos_penalty: Part of the score of a completion that `max_new_tokens` cut, with a minus sign, before
        clipping; None: nothing.
      gen_experience_kwargs: Used instead of `gen_kwargs` for rollouts; evaluation keeps `gen_kwargs`.
      num_value_layers_unfrozen: Blocks of a separate value branch; 0 reads values from the policy's features.
    """

    name: str = "PPOConfig"
    ppo_epochs: int = 4
    num_rollouts: int = 128
    chunk_size: int = 128
    init_kl_coef: float = 0.001
    target: float | None = None
    horizon: int = 10000
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1.0
    entropy_coef: float = 0.0
    scale_reward: str | bool | None = "ignored"
    ref_mean: float | None = None
    ref_std: float | None = None
    cliprange_reward: float | bool | None = 10.0
    missing_eos_penalty: float | None = None
    gen_experience_kwargs: dict[str, Any] | None = None
    num_value_layers_unfrozen: int = 0

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        experience, penalty = self.gen_experience_kwargs, self.missing_eos_penalty
        check_fields(
            self,
            ("ppo_epochs", self.ppo_epochs >= 1, "at least 1"),
            ("num_rollouts", self.num_rollouts >= 1, "at least 1"),
            ("chunk_size", self.chunk_size >= 1, "at least 1"),
            ("init_kl_coef", self.init_kl_coef >= 0, "at least 0"),
            ("target", self.target is None or self.target > 0, "positive nats per sequence, or None"),
            ("horizon", self.horizon > 0, "positive"),
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("lam", 0 <= self.lam <= 1, "in [0, 1]"),
            ("cliprange", self.cliprange > 0, "positive"),
            ("cliprange_value", self.cliprange_value > 0, "positive"),
            ("vf_coef", self.vf_coef >= 0, "at least 0"),
            ("scale_reward", self.scale_reward in SCALE_REWARD_MODES, f"one of {SCALE_REWARD_MODES}"),
            ("ref_std", (self.ref_mean is None) == (self.ref_std is None), "given together with `ref_mean`"),
            ("ref_std", self.ref_std is None or self.ref_std > 0, "positive, or None"),
            ("cliprange_reward", not self.cliprange_reward or self.cliprange_reward > 0, "positive, or off"),
            ("missing_eos_penalty", penalty is None or penalty >= 0, "at least 0, or None"),
            (
                "gen_experience_kwargs",
                experience is None or "max_new_tokens" in experience,
                "a mapping that holds `max_new_tokens` (it replaces `gen_kwargs` for rollouts), or None",
            ),
            ("num_value_layers_unfrozen", self.num_value_layers_unfrozen >= 0, "at least 0"),
        )


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


def make_ppo_update(
    policy: PolicyFns,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    batch_size: int,
    minibatch_size: int,
    logprob_chunk_bytes: int,
    temperature: float,
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
    Returns:
      `(PPOState, frozen, PPOBatch, key) -> (PPOState, metrics)`: `ppo_epochs · ceil(N / batch_size)` steps.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`, or the temperature is not positive.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    if not temperature > 0:
        raise ValueError(f"`temperature` must be that of the rollouts, positive, got {temperature}.")
    _warn_of_discount(config)
    rows_of = partial(layout_rows, batch_size=batch_size, minibatch_size=minibatch_size)
    logprobs_of = partial(
        window_logprobs,
        policy,
        temperature=temperature,
        chunk_bytes=logprob_chunk_bytes,
        with_entropy=True,
    )

    def objective(frozen: Frozen, rollouts: _Rollouts, params: Params, rows: Rows) -> Loss:
        taken = take_rows(rollouts, rows.ids)
        sequences = mask_rows(taken.sequences, rows.valid)
        features = window_features(policy, params, frozen, taken.trunk, sequences)
        now = logprobs_of(params, frozen, features.policy, sequences)
        out = ppo_loss(
            now.logprobs,
            policy.heads(params, features.value)["values"],
            # Without a bonus the entropy is only reported, and its backward pass would be work for nothing.
            now.entropy if config.entropy_coef else jax.lax.stop_gradient(now.entropy),
            taken.targets._replace(mask=sequences.mask),
            clip_range=config.cliprange,
            value_clip_range=config.cliprange_value,
            value_coef=config.vf_coef,
            entropy_coef=config.entropy_coef,
        )
        deviation = jnp.abs(importance_ratio(now.logprobs, taken.targets.old_logprobs) - 1)
        return out.loss_sum, out.weight, out.metrics | {_FIRST: max_metric(deviation, sequences.mask)}

    def update(state: PPOState, frozen: Frozen, batch: PPOBatch, key: PRNGKey) -> tuple[PPOState, Metrics]:
        sequences, mask = batch.sequences, batch.sequences.mask
        scores, moments = scale_scores(
            batch.scores, mask, state.moments, clip_range=config.cliprange_reward, mode=config.scale_reward
        )
        targets = estimate_advantages(
            scores, batch.scored, mask, kl_coef=state.kl_coef, gamma=config.gamma, gae_lambda=config.lam
        )
        trunk = trunk_of_rows(policy, frozen, sequences.inputs, minibatch_size=minibatch_size)
        rollouts = _Rollouts(sequences, trunk, targets)

        def step(train: TrainState, rows: Rows) -> tuple[TrainState, Metrics]:
            return optimizer_step(train, optimizer, partial(objective, frozen, rollouts), rows)

        epochs = [
            rows_of(_shuffled(mask, epoch_key)) for epoch_key in jax.random.split(key, config.ppo_epochs)
        ]
        steps = jax.tree.map(lambda *epoch: jnp.concatenate(epoch), *epochs)
        train, stacked = jax.lax.scan(step, state.train, steps)
        metrics = _metrics_of_steps(stacked) | rollout_metrics(batch, targets)
        one = jnp.ones(())
        metrics["kl/coef"] = Mean(state.kl_coef, one)
        metrics["reward/running_mean"] = Mean(moments.running.mean, one)
        metrics["reward/running_std"] = Mean(moments_std(moments.running), one)
        kl_coef = _next_kl_coef(state.kl_coef, kl_per_sequence(batch), config)
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


def _shuffled(mask: Bool[Array, "N T"], key: PRNGKey) -> Int[Array, "N"]:
    """Rows in random order, those without any action last."""
    draws = jax.random.uniform(key, mask.shape[:1])
    return jnp.argsort(jnp.where(jnp.any(mask, axis=1), draws, 2.0)).astype(jnp.int32)


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
