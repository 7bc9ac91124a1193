# SPDX-License-Identifier: Apache-2.0
"""An online algorithm as a value: `Recipe`. The learner (`jrl.learners.online`) knows no other.

A recipe says how rewards are scaled and penalised, how credit is given to actions, which loss is minimised, and how
often the rollouts are passed over. All its functions are traced into one compiled update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.credit import Estimate, Penalize, Scaling, unpenalized
from jrl.learners.groups import Selection, sampler_metrics, selection_metrics
from jrl.losses.policy_gradient import PolicyLoss, Targets
from jrl.ops.reductions import LossOut, loss_of_mean
from jrl.ops.rewards import place_scores
from jrl.typing import Metrics, Predictions, Rollouts, SamplingRules, Scored

Loss = Callable[[Predictions, Targets], LossOut]
"""(predictions, targets) → (sum, weight, metrics) of a minibatch. A row of padding has no action in the mask."""
Weigh = Callable[[Float[Array, "N T"], Float[Array, "N T"], Bool[Array, "N T"]], Float[Array, "N T"]]
"""(old_logprobs, sampler_logprobs, mask) → weight of each surrogate; see `jrl.ops.sampler_correction`."""
Aggregate = Callable[[Float[Array, "N F"], Int[Array, "N"], Bool[Array, "N"]], Float[Array, "N"]]
"""(scores of each reward function, groups, valid) → one number a completion, in the place of their weighted sum."""
Shares = Callable[[Bool[Array, "N T"], Int[Array, "N"]], Float[Array, "N T"]]
"""(mask, groups) → share of each action in the loss; see `jrl.ops.group_token_shares`."""


class KLControl(NamedTuple):
    """KL between the policy and its reference: the estimator, and the weight of its penalty in the rewards.

    Attributes:
      penalty: A name of `jrl.learners.credit.KL_PENALTIES`.
      coef: Weight at the start.
      target: KL per sequence, in nats, that the adaptive controller steers to; None keeps the weight fixed.
      horizon: Rollouts over which the controller may move the weight by 20 %; needed with a `target`.
    """

    penalty: str = "kl"
    coef: float = 0.0
    target: float | None = None
    horizon: int | None = None


_AS_THEY_ARE = Scaling()
_ALL = SamplingRules()


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
      sampling: Which completions become rollouts: groups without contrast, refilling, length.
      select: Rollouts that are learned from, once an iteration; None: all are, and no group is watched.
      weigh: Correction for a sampler that is not the policy before the update; None: there is none.
      shares: How much each action counts, in the place of the loss's reduction; None: by the reduction.
      old_logprobs_from_sampler: Whether the ratio's old log-probabilities are the sampler's, and not those of scoring.
      compares_scores: Whether credit comes from comparing the scores of one prompt's samples alone, so that equal ones
        teach nothing. What a reward function says of tokens is then summed up on the host.
      greedy_baseline: Whether the score of the greedy completion of the same prompt is subtracted from each row's.
      reward_weights: Of several reward functions; None: 1 each.
      aggregate: Makes one number a completion of the scores of several reward functions; None: their weighted sum is.
      spread_empty: Whether rows without actions are shuffled among the others, as a loss that counts them needs; else
        they come last.
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
    sampling: SamplingRules = _ALL
    select: Selection | None = None
    weigh: Weigh | None = None
    shares: Shares | None = None
    old_logprobs_from_sampler: bool = False
    compares_scores: bool = False
    greedy_baseline: bool = False
    reward_weights: tuple[float, ...] | None = None
    aggregate: Aggregate | None = None
    spread_empty: bool = False
    prefix: str = "policy_gradient"

    def __post_init__(self) -> None:
        """Refuses parts that do not fit each other, before a model is loaded.

        Raises:
          ValueError: If the loss reads what the recipe does not bring, or names its metrics otherwise.
        """
        if self.weigh is not None and self.old_logprobs_from_sampler:
            raise ValueError(
                "`old_logprobs_from_sampler` of a recipe must be False beside `weigh`, got True: the ratio to the "
                "sampler would be counted twice."
            )
        if self.sampling.refills and not self.sampling.mixed_only:
            raise ValueError(
                "`sampling` of a recipe must have `mixed_only` beside several rounds or `prompts_per_round`, got "
                f"{self.sampling}: what else would a further round be for?"
            )
        if (self.sampling.mixed_only or self.sampling.mask_truncated) and self.select is None:
            raise ValueError(
                "`select` of a recipe must be a `Selection` beside `mixed_only` or `mask_truncated` in its `sampling`, "
                "got None: nothing would leave rows out."
            )
        if self.greedy_baseline and self.scaling != _AS_THEY_ARE:
            raise ValueError(
                f"`scaling` of a recipe must leave rewards as they are beside `greedy_baseline`, got {self.scaling}."
            )
        if self.kl is not None and self.kl.target is not None and self.kl.horizon is None:
            raise ValueError(
                "`horizon` of a `KLControl` must be a number of rollouts beside `target`, got None."
            )
        if self.aggregate is not None and (self.scaling != _AS_THEY_ARE or self.greedy_baseline):
            raise ValueError(
                "`aggregate` of a recipe must be None beside `scaling` or `greedy_baseline`: it reads the scores of "
                "each reward function as they are."
            )
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

    @property
    def reads_reference(self) -> bool:
        """True where the update itself, and not only the scoring pass, needs the reference's own parameters."""
        return isinstance(self.loss, PolicyLoss) and self.loss.reads_reference

    def num_steps(self, num_rollouts: int, batch_size: int) -> int:
        """Optimizer steps of an iteration: passes times optimizer batches, the last of which may be smaller."""
        return self.num_epochs * math.ceil(num_rollouts / batch_size)

    def needs_scoring(self, num_steps: int, *, is_stale: bool = False) -> bool:
        """False where the update reads nothing of a pass over the rollouts.

        The policy before the first of several steps is read by scoring, unless the sampler is believed. Before a single
        step it is the policy that this step differentiates: the update has its log-probabilities.

        Args:
          num_steps: Optimizer steps of an iteration.
          is_stale: Whether an earlier policy sampled, which no step differentiates.
        """
        if self.kl is not None or self.critic or self.weigh is not None or self.penalize is not unpenalized:
            return True
        return (num_steps > 1 or is_stale) and not self.old_logprobs_from_sampler

    def is_its_own_past(self, num_steps: int, *, is_stale: bool = False) -> bool:
        """True where the ratio's old log-probabilities are those of the step itself, and nobody else gives them.

        Args:
          num_steps: Optimizer steps of an iteration.
          is_stale: As for `needs_scoring`.
        """
        return not self.needs_scoring(num_steps, is_stale=is_stale) and not self.old_logprobs_from_sampler

    def check_stale(self) -> None:
        """Refuses to learn from what an earlier policy sampled where nothing would correct for that.

        Raises:
          ValueError: Naming what to choose instead.
        """
        loss = self.loss
        if self.weigh is None and isinstance(loss, PolicyLoss) and not loss.surrogate.reads_ratio:
            raise ValueError(
                "`train.rollouts_ahead` must be 0 for a surrogate that does not read the ratio to the policy that "
                "sampled (REINFORCE): nothing would correct for the updates in between. Choose a clipped surrogate, or "
                "`method.importance_sampling_mode`."
            )
        if self.weigh is not None and self.kl is not None and self.kl.penalty == "full":
            raise ValueError(
                "`train.rollouts_ahead` must be 0 beside a correction of the sampler and a KL of whole distributions "
                "in the rewards: that KL would be of the policy that sampled, and all else of the one that learns. "
                "Take an estimate of the KL (`k1`, `k3`), or the KL in the loss."
            )

    def targets(
        self,
        rewards: Any,
        scored: Scored,
        mask: Any,
        kl_coef: Any,
        groups: Any = None,
        sampler_logprobs: Any = None,
    ) -> Targets:
        """Computes the fixed targets of an iteration.

        Args:
          rewards: The user's, clipped and scaled, on the tokens they belong to (N T).
          scored: Log-probabilities and values of the rollouts' own policy.
          mask: True on actions (N T).
          kl_coef: Weight of the KL penalty.
          groups: As in `Rollouts`.
          sampler_logprobs: As in `Rollouts`.
        Raises:
          ValueError: If the sampler's log-probabilities or the groups are needed and missing.
        """
        if sampler_logprobs is None and (self.weigh is not None or self.old_logprobs_from_sampler):
            raise ValueError("`sampler_logprobs` must be those of the rollouts for this recipe, got None.")
        if groups is None and self.shares is not None:
            raise ValueError(
                "`groups` must be those of the rollouts for the `shares` of this recipe, got None."
            )
        old_logprobs = sampler_logprobs if self.old_logprobs_from_sampler else scored.logprobs
        penalized = self.penalize(rewards, scored, mask, kl_coef)
        credit = self.estimate(penalized, scored.values, mask, groups)
        return Targets(
            old_logprobs,
            scored.values,
            credit.advantages,
            credit.returns,
            mask,
            ref_logprobs=scored.ref_logprobs,
            sampler_logprobs=sampler_logprobs,
            weights=None if self.weigh is None else self.weigh(scored.logprobs, sampler_logprobs, mask),
            shares=None if self.shares is None else self.shares(mask, groups),
        )

    def selected(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts that are learned from; rows that are left out have no action."""
        return rollouts if self.select is None else self.select(rollouts)

    def watch(self, rollouts: Rollouts, kept: Rollouts, targets: Targets) -> Metrics:
        """Metrics of the selection and of the sampler correction, for the record of an iteration.

        Args:
          rollouts: All of the iteration.
          kept: Those that were selected.
          targets: Made of them.
        """
        selected = {} if self.select is None else selection_metrics(rollouts, kept)
        return selected | sampler_metrics(targets)

    def scaled_rewards(self, rollouts: Rollouts, moments: Any) -> tuple[Any, Any]:
        """(rewards as the penalty finds them, moments after them)."""
        mask = rollouts.sequences.mask
        rewards, moments = self.scaling(rollouts.rewards, mask, moments)
        if self.greedy_baseline:
            if rollouts.greedy_scores is None:
                raise ValueError("`greedy_scores` of the rollouts must be there for this recipe, got None.")
            rewards = rewards - place_scores(rollouts.greedy_scores, mask)
        if self.aggregate is not None:
            if rollouts.scores_by_function is None or rollouts.groups is None:
                raise ValueError(
                    "`scores_by_function` and `groups` of the rollouts must be there for the `aggregate` of this "
                    "recipe, got None."
                )
            valid = jnp.any(mask, axis=1)
            scores = self.aggregate(rollouts.scores_by_function, rollouts.groups, valid)
            rewards = place_scores(scores, mask)
        return rewards, moments


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
