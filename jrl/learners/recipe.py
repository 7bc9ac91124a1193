# SPDX-License-Identifier: Apache-2.0
"""An online algorithm as a value: `Recipe`. The learner (`jrl.learners.online`) knows no other.

A recipe says how rewards are scaled and penalised, how credit is given to actions, which loss is minimised, and how
often the rollouts are passed over. All its functions are traced into one compiled update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.forward import Predictions
from jrl.learners.credit import Estimate, Penalize, Scaling, unpenalized
from jrl.losses.policy_gradient import (
    KLTerm,
    Ratio,
    Reduction,
    Surrogate,
    Targets,
    ValueLoss,
    policy_gradient_loss,
    token_ratio,
)
from jrl.ops.masking import masked_mean
from jrl.ops.metrics import mean_metric
from jrl.ops.policy_gradient import importance_ratio
from jrl.ops.reductions import LossOut, loss_of_mean, token_mean
from jrl.typing import Metrics, Rollouts, Scored

Loss = Callable[[Predictions, Targets], LossOut]
"""(predictions, targets) → (sum, weight, metrics) of a minibatch. A row of padding has no action in the mask."""


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
      prefix: Of the metrics' names.
    """

    surrogate: Surrogate
    ratio: Ratio = token_ratio
    reduction: Reduction = token_mean
    value_loss: ValueLoss | None = None
    kl: KLTerm | None = None
    entropy_coef: float = 0.0
    ratio_threshold: float | None = None
    prefix: str = "policy_gradient"

    def __call__(self, now: Predictions, targets: Targets) -> LossOut:
        """The loss of a minibatch; one that ran away is left out of it, and still watched."""
        if self.ratio_threshold is None:
            return self._whole(now, targets)
        mask = targets.mask
        mean_ratio = masked_mean(importance_ratio(now.logprobs, targets.old_logprobs), mask)
        ran_away = mean_ratio > self.ratio_threshold
        # The losses alone leave it out; how far the policy moved is seen, above all by `max_policy_kl`.
        extra = self.watch(now, targets)
        extra[f"{self.prefix}/minibatches_left_out"] = mean_metric(ran_away, jnp.any(mask))
        # Taken out by the mask, before any arithmetic: a loss that overflowed, times 0, would be NaN.
        out = self._whole(now, targets._replace(mask=mask & ~ran_away))
        return out._replace(metrics=out.metrics | jax.lax.stop_gradient(extra))

    def watch(self, now: Predictions, targets: Targets) -> Metrics:
        """The metrics that describe the policy, without those of the losses; nothing is differentiated."""
        values, entropy = (x if x is None else jax.lax.stop_gradient(x) for x in (now.values, now.entropy))
        fixed = Predictions(jax.lax.stop_gradient(now.logprobs), values, entropy, now.logits)
        found = self._whole(fixed, targets).metrics
        losses = (f"{self.prefix}/policy_loss", f"{self.prefix}/value_loss")
        return {name: value for name, value in found.items() if name not in losses}

    def _whole(self, now: Predictions, targets: Targets) -> LossOut:
        entropy = now.entropy
        if entropy is not None and not self.entropy_coef:
            # Without a bonus the entropy is only reported, and its backward pass would be work for nothing.
            entropy = jax.lax.stop_gradient(entropy)
        return policy_gradient_loss(
            now.logprobs,
            targets,
            surrogate=self.surrogate,
            ratio=self.ratio,
            reduction=self.reduction,
            values=now.values,
            value_loss=self.value_loss,
            kl=self.kl,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
            prefix=self.prefix,
        )


class KLControl(NamedTuple):
    """How far the policy is from its reference: what is watched, and the weight of its penalty in the rewards.

    Attributes:
      penalty: A name of `jrl.learners.credit.KL_PENALTIES`.
      coef: Weight at the start.
      target: KL per sequence, in nats, that the adaptive controller steers to; None keeps the weight fixed.
      horizon: Rollouts over which the controller may move the weight by 20 %.
    """

    penalty: str = "kl"
    coef: float = 0.0
    target: float | None = None
    horizon: int = 10000


_AS_THEY_ARE = Scaling()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An online policy-gradient algorithm.

    Attributes:
      estimate: Credit of each action, once an iteration, over all rollouts.
      loss: Of a minibatch, in every epoch; usually a `PolicyLoss`.
      penalize: Rewards with the KL penalty in them, once an iteration.
      kl: The reference that the policy is held against; None: there is none, and no pass is made through one.
      critic: Whether the model has a value head.
      num_value_layers_unfrozen: Blocks of a separate value branch; 0 reads values from the policy's features.
      scaling: What becomes of the user's rewards first.
      num_epochs: Passes over each set of rollouts.
      max_policy_kl: The passes end after one over whose actions log π_old − log π has a mean above this, in nats; None:
        all are run.
      prefix: Of the metrics' names.
    """

    estimate: Estimate
    loss: Loss
    penalize: Penalize = unpenalized
    kl: KLControl | None = None
    critic: bool = False
    num_value_layers_unfrozen: int = 0
    scaling: Scaling = _AS_THEY_ARE
    num_epochs: int = 1
    max_policy_kl: float | None = None
    prefix: str = "policy_gradient"

    def __post_init__(self) -> None:
        """Refuses parts that do not fit each other, before a model is loaded.

        Raises:
          ValueError: If the loss reads what the recipe does not bring, or names its metrics otherwise.
        """
        loss = self.loss
        if not isinstance(loss, PolicyLoss):
            return
        for holds, field, expected, got in (
            (loss.prefix == self.prefix, "prefix", f"that of its loss, {loss.prefix!r}", self.prefix),
            (loss.value_loss is None or self.critic, "critic", "True beside a `value_loss`", self.critic),
            (
                loss.kl is None or self.kl is not None,
                "kl",
                "a `KLControl` beside a KL term in the loss",
                self.kl,
            ),
        ):
            if not holds:
                raise ValueError(f"`{field}` of a recipe must be {expected}, got {got!r}.")

    def targets(self, rewards: Any, scored: Scored, mask: Any, kl_coef: Any, groups: Any = None) -> Targets:
        """What an iteration learns from.

        Args:
          rewards: The user's, clipped and scaled, on the tokens they belong to (N T).
          scored: Log-probabilities and values of the rollouts' own policy.
          mask: True on actions (N T).
          kl_coef: Weight of the KL penalty.
          groups: As in `Rollouts`.
        """
        penalized = self.penalize(rewards, scored, mask, kl_coef)
        credit = self.estimate(penalized, scored.values, mask, groups)
        return Targets(
            scored.logprobs, scored.values, credit.advantages, credit.returns, mask, scored.ref_logprobs
        )

    def scaled_rewards(self, rollouts: Rollouts, moments: Any) -> tuple[Any, Any]:
        """(rewards as the penalty finds them, moments after them)."""
        return self.scaling(rollouts.rewards, rollouts.sequences.mask, moments)


def mean_loss(
    own: Callable[[Predictions, Targets], tuple[Any, Mapping[str, Any]]], watched: PolicyLoss
) -> Loss:
    """A loss that is a mean over the actions of its minibatch, as one that adds up; see `loss_of_mean`.

    Args:
      own: (predictions, targets) → (mean, numbers to show).
      watched: By whose clip ranges ratio and clipping are watched.
    """

    def loss(now: Predictions, targets: Targets) -> LossOut:
        mask = targets.mask
        # Mere padding is shown as actions, so that a mean over none is no 0/0, whose gradient would be NaN.
        out = loss_of_mean(*own(now, targets._replace(mask=mask | ~jnp.any(mask))), mask)
        return out._replace(metrics=watched.watch(now, targets) | out.metrics)

    return loss
