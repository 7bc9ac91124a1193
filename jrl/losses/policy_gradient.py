# SPDX-License-Identifier: Apache-2.0
"""Objective of every online policy gradient: ratio × surrogate × reduction, a critic or none, a KL term or none.

    L = Σ_t [ surrogate(ρ, log π, A) + c_v·value loss + β·KL − c_e·H ], summed and weighed by the reduction

PPO, REINFORCE and their relatives are choices of these parts. Nothing here asks which algorithm runs.

Left out: which advantage (`jrl.learners.credit`), and the KL penalty in the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch
from jrl.ops.kl import kl_k1, kl_k2, kl_k3
from jrl.ops.masking import masked_mean, zero_masked
from jrl.ops.metrics import max_metric, mean_metric
from jrl.ops.policy_gradient import (
    clipped_ratio_loss,
    clipped_value_loss,
    importance_ratio,
    ratio_clip_events,
    reinforce_loss,
    value_clip_events,
)
from jrl.ops.ratios import token_ratio
from jrl.ops.reductions import LossOut, shared_mean, token_mean
from jrl.ops.sampler_correction import off_policy_rows
from jrl.typing import Metrics, Predictions

Ratio = Callable[
    [Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]
]
"""(logprobs, old_logprobs, advantages, mask) → ρ of each action; see `jrl.ops.ratios`. All are 0 where masked."""
Reduction = Callable[[Float[Array, "B T"], Bool[Array, "B T"]], tuple[Float[Array, ""], Float[Array, ""]]]
"""(losses, mask) → (sum, weight); see `jrl.ops.reductions`."""


class Targets(NamedTuple):
    """Fixed side of a policy gradient: computed before an update's first minibatch, kept for all its epochs.

    Attributes:
      old_logprobs: log π_old of the actions, in nats.
      old_values: V_old of the state before each action; None without a critic.
      advantages: Of the actions; PPO's are whitened over all rollouts.
      returns: What the critic predicts; None without one.
      mask: True on actions. Elsewhere nothing is read, so NaN may stand there.
      ref_logprobs: log π_ref of the actions; None unless the loss has a KL term that estimates by them.
      sampler_logprobs: log π_s of the actions under the distribution they were drawn from; None: that of π_old.
      weights: Of the surrogate: π_old/π_s in some form; see `jrl.ops.sampler_correction`. None: 1.
      shares: How much each action counts, in the place of the reduction; see `jrl.ops.shared_mean`. None: by the
        reduction.
    """

    old_logprobs: Float[Array, "B T"]
    old_values: Float[Array, "B T"] | None
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"] | None
    mask: Bool[Array, "B T"]
    ref_logprobs: Float[Array, "B T"] | None = None
    sampler_logprobs: Float[Array, "B T"] | None = None
    weights: Float[Array, "B T"] | None = None
    shares: Float[Array, "B T"] | None = None


class Surrogate(NamedTuple):
    """A surrogate for the return of an action.

    Attributes:
      losses: (ratio, logprobs, advantages) → one loss per action, unreduced.
      clip_range: ε: half-width around ρ = 1 beyond which clipping is counted; None: nothing is clipped.
      clip_range_high: The upper half-width where it differs; None: ε.
      reads_ratio: Whether the ratio is read: else the surrogate is right on the policy alone.
    """

    losses: Callable[[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]], Float[Array, "B T"]]
    clip_range: Scalar | None = None
    clip_range_high: Scalar | None = None
    reads_ratio: bool = True


class ValueLoss(NamedTuple):
    """The critic's part of the loss: c_v·½·max((V−R)², (V_clip−R)²).

    Attributes:
      clip_range: ε_v > 0 around the old value.
      coef: c_v >= 0. The ½ of the squared error is not in it.
    """

    clip_range: Scalar
    coef: Scalar


class KLTerm(NamedTuple):
    """A KL penalty in the loss: β·KL(π_θ ‖ π_ref), estimated per action, or that of the whole distributions.

    Attributes:
      coef: β > 0.
      estimator: (logprobs, ref_logprobs) → one value per action, such as `jrl.ops.kl_k2`. The gradient of `kl_k1` as a
        loss is noise. None: nothing is estimated; each state has the KL of its whole distributions, whose gradient is
        exact, whoever sampled the action. As with every estimate the states themselves are held fixed.
      off_policy: Whether each value is multiplied by ρ, the gradient running through both: the gradient
        of k1 and k3 is then that of KL(π_θ ‖ π_ref), on and off the policy.
      ratio: Level of that ρ. TRL takes the surrogate's own, of which a whole row's has no such gradient.
    """

    coef: Scalar
    estimator: Callable[[Float[Array, "B T"], Float[Array, "B T"]], Float[Array, "B T"]] | None = kl_k2
    off_policy: bool = False
    ratio: Ratio = token_ratio

    @property
    def is_full(self) -> bool:
        """True where the whole distributions are compared, and not the log-probabilities of the actions."""
        return self.estimator is None


def clipped(
    *,
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
    max_ratio: Scalar | None = None,
    dual_clip: Scalar | None = None,
) -> Surrogate:
    """PPO's surrogate: −min(ρA, clip(ρ, 1±ε)·A), with the bounds of its relatives; see `clipped_ratio_loss`.

    Args:
      clip_range: ε > 0, half-width around ρ = 1.
      clip_range_high: The upper half-width where it differs; None: ε.
      max_ratio: Largest ratio of the unclipped term; None: there is none.
      dual_clip: Largest loss of a bad action in units of |A|; None: there is none.
    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    Example:
      >>> ratio, advantages = jnp.array([[1.65]]), jnp.array([[2.0]])
      >>> round(float(clipped(clip_range=0.2).losses(ratio, jnp.log(ratio), advantages)[0, 0]), 4)  # −1.2·2
      -2.4
    """
    return Surrogate(
        lambda ratio, logprobs, advantages: clipped_ratio_loss(
            ratio,
            advantages,
            clip_range=clip_range,
            clip_range_high=clip_range_high,
            max_ratio=max_ratio,
            dual_clip=dual_clip,
        ),
        clip_range,
        clip_range_high,
    )


def reinforce() -> Surrogate:
    """REINFORCE's surrogate: −A·log π_θ. It corrects no off-policyness: take one optimizer step an iteration.

    Reference: Williams 1992, "Simple statistical gradient-following algorithms", eq. 4.
    Example:
      >>> ratio, logprobs, advantages = jnp.array([[1.0]]), jnp.array([[-0.5]]), jnp.array([[2.0]])
      >>> reinforce().losses(ratio, logprobs, advantages).tolist()
      [[1.0]]
    """
    return Surrogate(
        lambda ratio, logprobs, advantages: reinforce_loss(logprobs, advantages), reads_ratio=False
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss made of parts: ratio × surrogate × reduction, a critic or none, a KL term or none.

    Attributes:
      surrogate: Of the return.
      ratio: Level at which π_θ/π_old is taken.
      reduction: Who is heard.
      value_loss: The critic's part; None: there is no critic.
      kl: KL term; None: there is none.
      entropy_coef: Weight of the entropy bonus; 0 only reports the entropy.
      ratio_threshold: A minibatch whose mean ratio exceeds this weighs nothing; None: none is left out.
      off_policy_threshold: δ of `jrl.ops.off_policy_rows`, whose surrogates are dropped; None: none is.
      prefix: Of the metrics' names.
    """

    surrogate: Surrogate
    ratio: Ratio = token_ratio
    reduction: Reduction = token_mean
    value_loss: ValueLoss | None = None
    kl: KLTerm | None = None
    entropy_coef: float = 0.0
    ratio_threshold: float | None = None
    off_policy_threshold: float | None = None
    prefix: str = "policy_gradient"

    @property
    def reads_reference(self) -> bool:
        """True where the predictions must hold `full_kl`, so that an update needs the reference's own parameters."""
        return self.kl is not None and self.kl.is_full

    def __call__(self, now: Predictions, targets: Targets) -> LossOut:
        """The loss of a minibatch; one that ran away is left out of it, and still watched.

        Args:
          now: What the policy says of the actions.
          targets: What they are trained towards.
        """
        watched: Metrics = {}
        if self.ratio_threshold is not None:
            mask = targets.mask
            mean_ratio = masked_mean(importance_ratio(now.logprobs, targets.old_logprobs), mask)
            ran_away = mean_ratio > self.ratio_threshold
            # The losses alone leave it out; how far the policy moved is seen, above all by `max_policy_kl`.
            watched = self.watch(now, targets)
            watched[f"{self.prefix}/minibatches_left_out"] = mean_metric(ran_away, jnp.any(mask))
            # Taken out by the mask, before any arithmetic: a loss that overflowed, times 0, would be NaN.
            targets = targets._replace(mask=mask & ~ran_away)
        entropy = now.entropy
        if entropy is not None and not self.entropy_coef:
            # Without a bonus the entropy is only reported, and its backward pass would be work for nothing.
            entropy = jax.lax.stop_gradient(entropy)
        out = policy_gradient_loss(
            now.logprobs,
            targets,
            surrogate=self.surrogate,
            ratio=self.ratio,
            reduction=self.reduction,
            values=now.values,
            value_loss=self.value_loss,
            kl=self.kl,
            full_kl=now.full_kl,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
            off_policy_threshold=self.off_policy_threshold,
            prefix=self.prefix,
        )
        return out._replace(metrics=out.metrics | jax.lax.stop_gradient(watched))

    def watch(self, now: Predictions, targets: Targets) -> Metrics:
        """The metrics that describe the policy, without those of the losses; nothing is differentiated.

        Args:
          now: What the policy says of the actions.
          targets: What they are trained towards.
        """
        values, entropy, full_kl = (
            x if x is None else jax.lax.stop_gradient(x) for x in (now.values, now.entropy, now.full_kl)
        )
        fixed = Predictions(jax.lax.stop_gradient(now.logprobs), values, entropy, now.logits, full_kl)
        found = replace(self, ratio_threshold=None)(fixed, targets).metrics
        losses = (f"{self.prefix}/policy_loss", f"{self.prefix}/value_loss")
        return {name: value for name, value in found.items() if name not in losses}


def policy_gradient_loss(
    logprobs: Float[Array, "B T"],
    targets: Targets,
    *,
    surrogate: Surrogate,
    ratio: Ratio = token_ratio,
    reduction: Reduction = token_mean,
    values: Float[Array, "B T"] | None = None,
    value_loss: ValueLoss | None = None,
    kl: KLTerm | None = None,
    full_kl: Float[Array, "B T"] | None = None,
    entropy: Float[Array, "B T"] | None = None,
    entropy_coef: Scalar = 0.0,
    off_policy_threshold: Scalar | None = None,
    prefix: str = "policy_gradient",
) -> LossOut:
    """A policy gradient's loss, summed over actions. No gradient reaches `targets`, whatever the caller differentiates.

    Args:
      logprobs: log π_θ of the actions, in nats: unfiltered logits divided by the rollout temperature.
      targets: The fixed side.
      surrogate: Surrogate of the return.
      ratio: Level at which π_θ/π_old is taken.
      reduction: Weights of long and short completions: one of `jrl.ops.reductions`.
      values: V_θ of the state before each action; read with `value_loss` alone.
      value_loss: The critic's part; None: there is no critic.
      kl: KL term; None: there is none.
      full_kl: KL(π_θ ‖ π_ref) of the state before each action, for a `kl` that estimates nothing.
      entropy: H of the whole distribution at each action; None leaves out the bonus and its metric.
      entropy_coef: c_e >= 0; the entropy is maximised.
      off_policy_threshold: δ of `jrl.ops.off_policy_rows`, whose surrogates are dropped; None: none is.
      prefix: First part of the metrics' names.
    Returns:
      The sum over actions, their weight, and the metrics; all 0 for a batch without actions.
    Raises:
      ValueError: If shapes differ, a range is not positive, or a part misses what it reads.
      TypeError: If the mask is not boolean.
    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9; the parts: the functions that make them.
    Example:
      >>> logprobs = jnp.array([[-1.0, -0.5]])
      >>> targets = Targets(logprobs, None, jnp.array([[2.0, 9.0]]), None, jnp.array([[True, False]]))
      >>> loss = policy_gradient_loss(logprobs, targets, surrogate=clipped(clip_range=0.2))
      >>> float(loss.loss_sum), float(loss.weight)  # ρ = 1, A = 2
      (-2.0, 1.0)
    """
    _check_parts(targets, values, value_loss, kl, full_kl, entropy, entropy_coef, off_policy_threshold)
    read = {"values": None if value_loss is None else values, "full_kl": full_kl, "entropy": entropy}
    logprobs, old = _checked(logprobs, targets, {name: x for name, x in read.items() if x is not None})
    losses, metrics = _surrogate_part(logprobs, old, surrogate, ratio, off_policy_threshold, prefix)
    if value_loss is not None:
        value_losses, found = _value_part(values, old, value_loss, prefix)
        losses, metrics = losses + value_loss.coef * value_losses, metrics | found
    if kl is not None:
        penalties = _kl_penalties(logprobs, old, kl, full_kl)
        losses = losses + kl.coef * penalties
        metrics[f"{prefix}/kl_term"] = mean_metric(penalties, old.mask)
    if entropy is not None:
        entropy = zero_masked(entropy, old.mask)
        losses = losses - entropy_coef * entropy
        metrics[f"{prefix}/entropy"] = mean_metric(entropy, old.mask)
    reduced = reduction(losses, old.mask) if old.shares is None else shared_mean(losses, old.mask, old.shares)
    return LossOut(*reduced, jax.lax.stop_gradient(metrics))


def _check_parts(
    targets: Targets,
    values: Array | None,
    value_loss: ValueLoss | None,
    kl: KLTerm | None,
    full_kl: Array | None,
    entropy: Array | None,
    entropy_coef: Scalar,
    off_policy_threshold: Scalar | None,
) -> None:
    """Refuses a part that misses what it reads, or has nothing to do."""
    full = kl is not None and kl.is_full
    missing = [
        name
        for name, needed, found in (
            ("values", value_loss is not None, values),
            ("targets.old_values", value_loss is not None, targets.old_values),
            ("targets.returns", value_loss is not None, targets.returns),
            ("targets.ref_logprobs", kl is not None and not full, targets.ref_logprobs),
            ("full_kl", full, full_kl),
            ("targets.sampler_logprobs", off_policy_threshold is not None, targets.sampler_logprobs),
        )
        if needed and found is None
    ]
    if missing:
        why = {
            "targets.ref_logprobs": "kl",
            "full_kl": "kl` without an `estimator",
            "targets.sampler_logprobs": "off_policy_threshold",
        }
        beside = why.get(missing[0], "value_loss")
        raise ValueError(f"`{missing[0]}` must be given beside `{beside}`, got None.")
    if kl is not None and full and kl.off_policy:
        raise ValueError(
            "`off_policy` of a `KLTerm` must be False without an `estimator`, got True: the KL of a state depends on "
            "no action, so there is no sampler to correct for."
        )
    if entropy is None and not (isinstance(entropy_coef, int | float) and entropy_coef == 0):
        raise ValueError(
            f"`entropy` must be given where `entropy_coef` is not 0, got None and {entropy_coef}. "
            "Call `token_logprobs` with `with_entropy=True`."
        )


def _checked(logprobs: Array, targets: Targets, read: Mapping[str, Array]) -> tuple[Array, Targets]:
    """(log-probabilities, targets), 0 where masked; the shapes of all that is read are the mask's."""
    mask = targets.mask
    fixed = {name: x for name, x in targets._asdict().items() if name != "mask" and x is not None}
    check_batch(mask, logprobs=logprobs, **{**read, **fixed})
    held = {name: jax.lax.stop_gradient(zero_masked(x, mask)) for name, x in fixed.items()}
    return zero_masked(logprobs, mask), targets._replace(**held)


def _surrogate_part(
    logprobs: Array,
    old: Targets,
    surrogate: Surrogate,
    ratio: Ratio,
    off_policy_threshold: Scalar | None,
    prefix: str,
) -> tuple[Float[Array, "B T"], Metrics]:
    """The surrogate's losses, corrected for the sampler, and the metrics of the policy's distance from its past."""
    mask, metrics = old.mask, dict[str, Any]()
    ratios = ratio(logprobs, old.old_logprobs, old.advantages, mask)
    losses = surrogate.losses(ratios, logprobs, old.advantages)
    if old.weights is not None:
        losses = losses * old.weights
    if off_policy_threshold is not None:
        assert old.sampler_logprobs is not None, "checked by the caller"
        dropped = off_policy_rows(
            logprobs, old.sampler_logprobs, old.advantages, mask, threshold=off_policy_threshold
        )
        losses = jnp.where(dropped, 0.0, losses)
        metrics[f"{prefix}/off_policy_fraction"] = mean_metric(dropped, mask)
    metrics[f"{prefix}/policy_loss"] = mean_metric(losses, mask)
    metrics |= _ratio_metrics(logprobs, old, prefix) | _clip_metrics(ratios, old, surrogate, prefix)
    return losses, metrics


def _kl_penalties(logprobs: Array, old: Targets, kl: KLTerm, full_kl: Array | None) -> Float[Array, "B T"]:
    """The penalty of each action before its weight."""
    if kl.estimator is None:
        assert full_kl is not None, "checked by the caller"
        return zero_masked(full_kl, old.mask)
    assert old.ref_logprobs is not None, "checked by the caller"
    penalties = kl.estimator(logprobs, old.ref_logprobs)
    if kl.off_policy:
        penalties = penalties * kl.ratio(logprobs, old.old_logprobs, old.advantages, old.mask)
    return penalties


def _value_part(
    values: Array | None, old: Targets, value_loss: ValueLoss, prefix: str
) -> tuple[Float[Array, "B T"], Metrics]:
    """The critic's losses and their metrics."""
    assert values is not None and old.old_values is not None and old.returns is not None, (
        "checked by the caller"
    )
    mask, clip_range = old.mask, value_loss.clip_range
    values = zero_masked(values, mask)
    losses = clipped_value_loss(values, old.old_values, old.returns, clip_range=clip_range)
    clipped_away = value_clip_events(values, old.old_values, old.returns, clip_range=clip_range)
    return losses, {
        f"{prefix}/value_loss": mean_metric(losses, mask),
        f"{prefix}/value_mean": mean_metric(values, mask),
        f"{prefix}/value_error": mean_metric(jnp.square(values - old.returns), mask),
        f"{prefix}/value_clip_fraction": mean_metric(clipped_away, mask),
    }


def _ratio_metrics(logprobs: Array, old: Targets, prefix: str) -> Metrics:
    """Distance of the policy from the one before this update, token by token."""
    mask, old_logprobs = old.mask, old.old_logprobs
    ratio = importance_ratio(logprobs, old_logprobs)
    return {
        f"{prefix}/ratio_mean": mean_metric(ratio, mask),
        f"{prefix}/ratio_max": max_metric(ratio, mask),
        # Unlike the ratio, not clamped: the one number that shows how far outliers really are.
        f"{prefix}/log_ratio_abs_max": max_metric(jnp.abs(logprobs - old_logprobs), mask),
        # The actions come from the old policy, so with r = π_θ/π_old this is k3 of KL(old ‖ new).
        f"{prefix}/approx_kl": mean_metric(kl_k3(old_logprobs, logprobs), mask),
        f"{prefix}/approx_kl_k2": mean_metric(kl_k2(old_logprobs, logprobs), mask),
        f"{prefix}/policy_kl": mean_metric(kl_k1(old_logprobs, logprobs), mask),
    }


def _clip_metrics(ratios: Array, old: Targets, surrogate: Surrogate, prefix: str) -> Metrics:
    """Share of the actions that clipping left without a gradient, at the level of the loss's own ratio."""
    if surrogate.clip_range is None:
        return {}
    events = ratio_clip_events(
        ratios,
        old.advantages,
        clip_range=surrogate.clip_range,
        clip_range_high=surrogate.clip_range_high,
    )
    return {
        f"{prefix}/clip_fraction": mean_metric(events.high_positive | events.low_negative, old.mask),
        f"{prefix}/clip_fraction_high_positive": mean_metric(events.high_positive, old.mask),
        f"{prefix}/clip_fraction_low_negative": mean_metric(events.low_negative, old.mask),
    }
