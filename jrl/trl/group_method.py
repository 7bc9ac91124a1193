# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO and RLOO as sections of a run: its words for a loss, bound to jrl's parts. No formula stands here.

Three things are TRL's own and no default of `jrl.GRPOConfig`: deviations with ddof 1 and ε = 1e-4, row counts that hold
completions without an action, and a CISPO whose `epsilon_high` is the whole cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jrl.learners.config import OnlineConfig, check_fields, positive_or_none
from jrl.learners.credit import Scaling, penalize, unpenalized
from jrl.learners.groups import Selection, as_they_are, decoupled_scores, group_credit
from jrl.learners.recipe import KLControl, PolicyLoss, Recipe
from jrl.losses.policy_gradient import KLTerm, Ratio, Reduction, Surrogate, clipped
from jrl.losses.surrogates import cispo, sapo, vespo
from jrl.ops.advantages import group_relative_advantages, leave_one_out_advantages, standardized
from jrl.ops.kl import kl_k3
from jrl.ops.ratios import product_ratio, sequence_ratio, token_ratio
from jrl.ops.reductions import constant_mean, sequence_mean, sequence_sum_mean, token_mean
from jrl.typing import SamplingRules

DDOF, EPSILON = 1, 1e-4
"""Of every deviation that TRL divides by."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose surrogate is PPO's."""
BY_TOKENS = ("dapo", "bnpo", "cispo", "vespo")
"""Loss types that are a mean over tokens."""
RATIOS: Mapping[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio}
"""By `importance_sampling_level`."""


@dataclass(kw_only=True)
class GroupMethod(OnlineConfig):
    """Section that TRL's GRPO and RLOO share, under its names.

    Attributes:
      num_generations: Samples of each prompt.
      num_iterations: Passes over each set of rollouts.
      epsilon: Lower half-width of the clip.
      epsilon_high: Upper half-width; None: `epsilon`.
      beta: Weight of the KL to the reference; 0: there is none.
      reward_weights: Of the reward functions; None: 1 each.
      mask_truncated_completions: Leaves out completions that `max_new_tokens` cut; row counts hold them.
    """

    num_generations: int = 8
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False

    @property
    def high(self) -> float:
        """Upper half-width of the clip."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampling(self) -> SamplingRules:
        """Rules by which completions become rollouts."""
        return SamplingRules(mask_truncated=self.mask_truncated_completions)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the reward functions."""
        return None if self.reward_weights is None else tuple(self.reward_weights)

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            (
                "num_generations",
                self.num_generations >= 2,
                "at least 2: the samples of a prompt are compared",
            ),
            ("num_iterations", self.num_iterations >= 1, "at least 1"),
            ("epsilon", self.epsilon > 0, "positive"),
            ("epsilon_high", positive_or_none(self.epsilon_high), "positive, or None"),
            ("beta", self.beta >= 0, "at least 0"),
        )


@dataclass(kw_only=True)
class GRPOMethod(GroupMethod):
    """TRL 1.16's GRPO. Fields of `jrl.trl.GRPOConfig` under their names.

    Attributes:
      loss_type: Surrogate and reduction in one word: a name of `LOSS_TYPES`.
      importance_sampling_level: "token" or "sequence".
      delta: Cap of the ratio in the unclipped term; None: there is none.
      use_bias_correction_kl: Multiplies the KL term by the ratio.
      scale_rewards: "group", "batch" or "none".
      multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
      off_policy_mask_threshold: Drops bad rows that the policy finds less likely than the sampler by more than this.
      entropy_coef: Weight of the entropy bonus.
      sapo_temperature_pos: τ of good actions.
      sapo_temperature_neg: τ of the others.
      vespo_k_pos: k of good actions; likewise the three behind it.
      vespo_lambda_pos: λ of good actions.
      vespo_k_neg: k of bad actions.
      vespo_lambda_neg: λ of bad actions.
    """

    name: str = "GRPOMethod"
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    delta: float | None = None
    use_bias_correction_kl: bool = True
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    off_policy_mask_threshold: float | None = None
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def validate(self) -> None:
        """Refuses unknown words, and what a loss type does not read."""
        super().validate()
        known = {
            "loss_type": tuple(LOSS_TYPES),
            "importance_sampling_level": tuple(RATIOS),
            "scale_rewards": ("group", "batch", "none"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }
        check_fields(
            self,
            *((name, vars(self)[name] in words, f"one of {words}") for name, words in known.items()),
            (
                "delta",
                self.delta is None or self.loss_type in CLIPPED,
                f'None beside `loss_type` "{self.loss_type}", which has no clip to reach beyond',
            ),
            (
                "delta",
                self.delta is None or self.delta > 1 + self.high,
                f"above 1 + `epsilon_high` = {1 + self.high}, or None",
            ),
            (
                "importance_sampling_level",
                self.importance_sampling_level == "token" or self.loss_type != "vespo",
                '"token" beside `loss_type` "vespo", whose ratio is of the whole completion in any case',
            ),
            ("entropy_coef", self.entropy_coef >= 0, "at least 0"),
            (
                "entropy_coef",
                not self.entropy_coef or self.loss_type in BY_TOKENS,
                f'0 beside `loss_type` "{self.loss_type}": the bonus is a mean over tokens, and so is the loss of '
                f"{BY_TOKENS} alone",
            ),
        )


@dataclass(kw_only=True)
class RLOOMethod(GroupMethod):
    """TRL 1.16's RLOO. Fields of `jrl.trl.RLOOConfig` under their names.

    Attributes:
      reward_clip: Scores are clipped to ± this; None: they are not.
      normalize_advantages: Whether advantages are divided by their deviation over the batch.
    """

    name: str = "RLOOMethod"
    num_generations: int = 2
    beta: float = 0.05
    reward_clip: float | None = None
    normalize_advantages: bool = False


def _clipped(method: GRPOMethod) -> Surrogate:
    return clipped(clip_range=method.epsilon, clip_range_high=method.high, max_ratio=method.delta)


def _cispo(method: GRPOMethod) -> Surrogate:
    return cispo(clip_range_high=method.high - 1)


def _sapo(method: GRPOMethod) -> Surrogate:
    return sapo(temperature_pos=method.sapo_temperature_pos, temperature_neg=method.sapo_temperature_neg)


def _vespo(method: GRPOMethod) -> Surrogate:
    return vespo(
        k_pos=method.vespo_k_pos,
        lambda_pos=method.vespo_lambda_pos,
        k_neg=method.vespo_k_neg,
        lambda_neg=method.vespo_lambda_neg,
    )


def _constant(method: GRPOMethod) -> Reduction:
    return partial(constant_mean, length=int(method.gen_kwargs["max_new_tokens"]), count_empty=True)


_EVERY_ROW: Reduction = partial(sequence_mean, count_empty=True)
LOSS_TYPES: Mapping[str, tuple[Callable[[GRPOMethod], Surrogate], Callable[[GRPOMethod], Reduction]]] = {
    "grpo": (_clipped, lambda method: _EVERY_ROW),
    "dr_grpo": (_clipped, _constant),
    "dapo": (_clipped, lambda method: token_mean),
    "bnpo": (_clipped, lambda method: token_mean),
    "cispo": (_cispo, lambda method: token_mean),
    "sapo": (_sapo, lambda method: _EVERY_ROW),
    "luspo": (_clipped, lambda method: partial(sequence_sum_mean, count_empty=True)),
    "vespo": (_vespo, lambda method: token_mean),
}
"""TRL's word → surrogate and reduction."""


def grpo_loss(method: GRPOMethod) -> PolicyLoss:
    """The loss of a minibatch as TRL 1.16's GRPO has it."""
    surrogate, reduction = LOSS_TYPES[method.loss_type]
    level = RATIOS[method.importance_sampling_level]
    return PolicyLoss(
        prefix="grpo",
        surrogate=surrogate(method),
        ratio=product_ratio if method.loss_type == "vespo" else level,
        reduction=reduction(method),
        kl=KLTerm(method.beta, kl_k3, method.use_bias_correction_kl, level) if method.beta else None,
        entropy_coef=method.entropy_coef,
        off_policy_threshold=method.off_policy_mask_threshold,
    )


def grpo_advantages(method: GRPOMethod, scores: Any, lengths: Any, groups: Any, valid: Any) -> Any:
    """One advantage a completion as TRL 1.16's GRPO has it.

    Args:
      method: The section.
      scores: One a completion (N).
      lengths: Not read.
      groups: Equal numbers are samples of one prompt.
      valid: False on padding.
    """
    del lengths
    return group_relative_advantages(
        scores, groups, valid, scale=method.scale_rewards, ddof=DDOF, epsilon=EPSILON
    )


def grpo_recipe(method: GRPOMethod) -> Recipe:
    """TRL 1.16's GRPO."""
    decoupled = method.multi_objective_aggregation == "normalize_then_sum"
    return Recipe(
        prefix="grpo",
        estimate=as_they_are() if decoupled else group_credit(partial(grpo_advantages, method)),
        aggregate=decoupled_scores(method.weights, ddof=DDOF, epsilon=EPSILON) if decoupled else None,
        reward_weights=method.weights,
        sampling=method.sampling,
        spread_empty=True,
        compares_scores=True,
        loss=grpo_loss(method),
        kl=KLControl(coef=method.beta) if method.beta else None,
        num_epochs=method.num_iterations,
        select=Selection(needs_sampler=method.off_policy_mask_threshold is not None),
    )


def rloo_loss(method: RLOOMethod) -> PolicyLoss:
    """The loss of a minibatch as TRL 1.16's RLOO has it: a completion is one action."""
    return PolicyLoss(
        prefix="rloo",
        surrogate=clipped(clip_range=method.epsilon, clip_range_high=method.high),
        ratio=product_ratio,
        reduction=_EVERY_ROW,
    )


def rloo_advantages(method: RLOOMethod, scores: Any, lengths: Any, groups: Any, valid: Any) -> Any:
    """One advantage a completion as TRL 1.16's RLOO has it; arguments as of `grpo_advantages`."""
    del lengths
    found = leave_one_out_advantages(scores, groups, valid)
    return standardized(found, valid, ddof=DDOF, epsilon=EPSILON) if method.normalize_advantages else found


def rloo_recipe(method: RLOOMethod) -> Recipe:
    """TRL 1.16's RLOO: the KL, k1 summed over the completion, is a part of the score."""
    return Recipe(
        prefix="rloo",
        estimate=group_credit(partial(rloo_advantages, method)),
        loss=rloo_loss(method),
        scaling=Scaling(clip_range=method.reward_clip),
        num_epochs=method.num_iterations,
        kl=KLControl(coef=method.beta) if method.beta else None,
        penalize=penalize("kl") if method.beta else unpenalized,
        select=Selection(),
        reward_weights=method.weights,
        sampling=method.sampling,
        spread_empty=True,
        compares_scores=not method.beta,
    )
