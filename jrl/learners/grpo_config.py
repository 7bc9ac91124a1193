# SPDX-License-Identifier: Apache-2.0
"""GRPO's section of a configuration: its switches, the functions that they name, and which of them go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from jrl.learners.config import OnlineConfig, check_fields, positive_or_none
from jrl.learners.credit import Estimate, returns_to_go
from jrl.learners.groups import ScoreAdvantages, group_credit, whitened_credit
from jrl.learners.recipe import Weigh
from jrl.losses.policy_gradient import Ratio, Reduction, Surrogate, clipped, reinforce
from jrl.losses.surrogates import cispo, dppo_kl, dppo_tv, plain_ratio, sapo, vespo
from jrl.ops.advantages import (
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_scaled_advantages,
)
from jrl.ops.kl import kl_k1, kl_k2, kl_k3
from jrl.ops.ratios import (
    geometric_clipped_ratio,
    product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from jrl.ops.reductions import constant_mean, sequence_mean, sequence_sum_mean, token_mean
from jrl.ops.sampler_correction import (
    drop_weights,
    geometric_weights,
    sequence_weights,
    token_weights,
    truncate_weights,
)
from jrl.suggestions import did_you_mean

Conflicts = Iterator[tuple[str, str]]
"""(field, what it must be) of each switch that contradicts another."""


@dataclass(kw_only=True)
class GRPOConfig(OnlineConfig):
    """A policy gradient without a critic. Fields that TRL 1.16 has bear its names.

    Attributes:
      num_generations: Samples of each prompt. Rows of one prompt are a group.
      num_iterations: Passes over each set of rollouts.
      estimator: "group_relative": r − mean of the group, scaled as `scale_rewards` says. "leave_one_out" (RLOO).
        "mean_scaled" (MaxRL; scores of 0 and 1). "length_weighted" (OPO). "group_then_batch": r − mean, whitened over
        all actions (REINFORCE++-baseline). "returns_to_go": whitened returns, without groups (REINFORCE++). "greedy":
        returns minus the score of the greedy completion (ReMax).
      scale_rewards: Of "group_relative": divides by the deviation (ddof 0) of the "group" or the "batch", or by "none".
      importance_sampling_level: Of the ratio: "token", "sequence" (GSPO), "sequence_token" (GSPO-token), "product" over
        the completion, "geometric" mean of clipped ratios (GMPO).
      surrogate: "clipped", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "plain" (ratio × advantage, for ratios that
        are clipped inside) or "reinforce" (no ratio: one pass alone).
      epsilon: Lower half-width of the clip; of "geometric" in log space.
      epsilon_high: Upper half-width; None: `epsilon`. "cispo" caps the ratio at 1 + this; TRL's is the cap itself.
      delta: Cap of the ratio in the unclipped term; None: there is none.
      dual_clip: Largest loss of a bad action in units of its advantage; None: there is none.
      sapo_temperature_pos: τ of good actions.
      sapo_temperature_neg: τ of the others.
      vespo_k_pos: k of good actions; likewise the three behind it.
      vespo_lambda_pos: λ of good actions.
      vespo_k_neg: k of bad actions.
      vespo_lambda_neg: λ of bad actions.
      dppo_delta: Divergence at which "dppo_tv" (probability) or "dppo_kl" (nats) drops an action.
      reduction: "constant" (by `max_new_tokens`), "token", "sequence", "sequence_sum", "group_token" (mean over the
        tokens of each prompt first).
      beta: Weight of the KL to the reference; 0: there is no reference.
      kl_placement: "loss" or "reward".
      kl_estimator: In the loss "k2", or "k3", whose gradient is that of the other direction unless it is corrected, or
        "k1", if it is corrected; or "full", the KL of the whole distributions at each state: no estimate, at the price
        of a pass through the reference in every step. In the reward "k1" alone.
      use_bias_correction_kl: Multiplies k1 or k3 in the loss by the ratio, which turns its gradient to KL(π ‖ π_ref).
      entropy_coef: Weight of the entropy bonus; 0 only reports the entropy.
      importance_sampling_mode: Correction for a sampler that is another policy: "none", "token_truncate" (TIS),
        "token_mask" (IcePop), "sequence_truncate", "sequence_mask" (MIS), "geometric_mask".
      importance_sampling_clip_max: Largest weight.
      importance_sampling_clip_min: Smallest weight that a mask leaves.
      old_logprobs_from_sampler: Takes the sampler's log-probabilities as the old ones, in the place of a correction.
        Without a KL this saves the scoring pass; how far sampler and learner are apart then shows in
        `grpo/ratio_max_dev_first_minibatch` alone.
      off_policy_mask_threshold: Drops bad rows that the policy finds less likely than the sampler by more than this, in
        nats a token; None: none is.
      reward_clip_range: Scores are clipped to ± this; None: they are not.
      drop_uniform_groups: Leaves out groups whose raw scores are all equal; what is left makes the denominators.
      max_sampling_rounds: Rounds in which an iteration samples further prompts in the place of groups that are left out
        (DAPO's dynamic sampling), until it has `num_rollouts`; 1: it samples none. What is missing at the end stays
        empty.
      prompts_per_round: Prompts of a round, if not as many as an iteration learns from; None: as many. The first mixed
        groups are learned from, and prompts behind them come again in the next iteration.
      mask_truncated_completions: Leaves out completions that `max_new_tokens` cut, of their groups' statistics, too.
      overlong_buffer_len: Tokens below `max_new_tokens` over which a penalty for length grows; None: there is none.
      overlong_penalty: Its size at `max_new_tokens`, in units of the score. It is part of the score, before clipping.
      reward_weights: Of several reward functions, one each; None: 1 each.
      multi_objective_aggregation: Of several reward functions: "sum_then_normalize": the advantage is that of their
        weighted sum. "normalize_then_sum" (GDPO): each is normalised within its group, and the weighted sum over all
        rows, in the place of `estimator` and `scale_rewards`.
      num_kept: Rows kept of each group (GFPO); None: all.
      keep_by: "length": the shortest. "reward_per_token": those with most of it.
      max_policy_kl: The passes of an iteration end after one that moved the policy by more, in nats a token; None: all
        are made.
    """

    name: str = "GRPOConfig"
    num_generations: int = 8
    num_iterations: int = 1
    estimator: str = "group_relative"
    scale_rewards: str = "none"
    importance_sampling_level: str = "token"
    surrogate: str = "clipped"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.28
    delta: float | None = None
    dual_clip: float | None = 3.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    dppo_delta: float = 0.15
    reduction: str = "constant"
    beta: float = 0.0
    kl_placement: str = "loss"
    kl_estimator: str = "k2"
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    importance_sampling_mode: str = "none"
    importance_sampling_clip_max: float = 2.0
    importance_sampling_clip_min: float = 0.0
    old_logprobs_from_sampler: bool = False
    off_policy_mask_threshold: float | None = None
    reward_clip_range: float | None = None
    drop_uniform_groups: bool = False
    max_sampling_rounds: int = 1
    prompts_per_round: int | None = None
    mask_truncated_completions: bool = False
    overlong_buffer_len: int | None = None
    overlong_penalty: float = 1.0
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    num_kept: int | None = None
    keep_by: str = "length"
    max_policy_kl: float | None = None

    @property
    def kl_in_reward(self) -> bool:
        """True where a KL to the reference is subtracted from the rewards."""
        return self.beta > 0 and self.kl_placement == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """True where a KL to the reference is a term of the loss."""
        return self.beta > 0 and self.kl_placement == "loss"

    def validate(self) -> None:
        """Refuses unknown switches, values outside their range, and switches that contradict each other."""
        super().validate()
        self._check_switches()
        self._check_ranges()
        conflicts = chain(
            self._ratio_conflicts(),
            self._kl_conflicts(),
            self._sampler_conflicts(),
            self._score_conflicts(),
            self._group_conflicts(),
            self._several_reward_conflicts(),
        )
        check_fields(self, *((field, False, expected) for field, expected in conflicts))

    def _check_switches(self) -> None:
        for field, value, known in (
            ("estimator", self.estimator, ESTIMATORS),
            ("scale_rewards", self.scale_rewards, ("group", "batch", "none")),
            ("importance_sampling_level", self.importance_sampling_level, RATIOS),
            ("surrogate", self.surrogate, SURROGATES),
            ("reduction", self.reduction, REDUCTIONS),
            ("kl_placement", self.kl_placement, ("loss", "reward")),
            ("kl_estimator", self.kl_estimator, KL_ESTIMATORS),
            ("importance_sampling_mode", self.importance_sampling_mode, CORRECTIONS),
            (
                "multi_objective_aggregation",
                self.multi_objective_aggregation,
                ("sum_then_normalize", "normalize_then_sum"),
            ),
            ("keep_by", self.keep_by, ("length", "reward_per_token")),
        ):
            check_switch(f"method.{field}", value, tuple(known))

    def _check_ranges(self) -> None:
        size = self.num_generations
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        longest, buffer, per_round = longest_rollout(self), self.overlong_buffer_len, self.prompts_per_round
        check_fields(
            self,
            ("num_iterations", self.num_iterations >= 1, "at least 1"),
            (
                "num_generations",
                size >= 2 or not ESTIMATORS[self.estimator].grouped,
                f"at least 2: `estimator: {self.estimator}` compares the samples of a prompt",
            ),
            ("epsilon", self.epsilon > 0, "positive"),
            ("entropy_coef", self.entropy_coef >= 0, "at least 0"),
            (
                "off_policy_mask_threshold",
                positive_or_none(self.off_policy_mask_threshold),
                "positive, or None",
            ),
            ("vespo_k_pos", self.vespo_k_pos > 0, "positive"),
            ("vespo_lambda_pos", self.vespo_lambda_pos > 0, "positive"),
            ("vespo_k_neg", self.vespo_k_neg > 0, "positive"),
            ("vespo_lambda_neg", self.vespo_lambda_neg > 0, "positive"),
            ("epsilon_high", positive_or_none(self.epsilon_high), "positive, or None"),
            ("delta", self.delta is None or self.delta > 1 + high, f"above 1 + ε_high = {1 + high}, or None"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "above 1, or None"),
            ("sapo_temperature_pos", self.sapo_temperature_pos > 0, "positive"),
            ("sapo_temperature_neg", self.sapo_temperature_neg > 0, "positive"),
            ("dppo_delta", self.dppo_delta > 0, "positive"),
            ("beta", self.beta >= 0, "at least 0"),
            ("importance_sampling_clip_max", self.importance_sampling_clip_max >= 1, "at least 1"),
            ("importance_sampling_clip_min", 0 <= self.importance_sampling_clip_min <= 1, "in [0, 1]"),
            ("reward_clip_range", positive_or_none(self.reward_clip_range), "positive, or None"),
            ("num_kept", self.num_kept is None or 2 <= self.num_kept <= size, f"in [2, {size}], or None"),
            ("max_policy_kl", positive_or_none(self.max_policy_kl), "positive nats, or None"),
            ("max_sampling_rounds", self.max_sampling_rounds >= 1, "at least 1 (one round refills nothing)"),
            ("prompts_per_round", per_round is None or per_round >= 1, "at least 1, or None"),
            (
                "overlong_buffer_len",
                buffer is None or 1 <= buffer <= longest,
                f"in [1, max_new_tokens] = [1, {longest}], or None",
            ),
            ("overlong_penalty", self.overlong_penalty > 0, "positive: it is subtracted"),
        )

    def _ratio_conflicts(self) -> Conflicts:
        level, surrogate = self.importance_sampling_level, self.surrogate
        if level in ("sequence", "sequence_token") and self.reduction in ("token", "group_token"):
            yield (
                "reduction",
                f'"sequence", "sequence_sum" or "constant" beside `importance_sampling_level: {level}`: a mean over '
                "tokens would weigh rows by their lengths again",
            )
        if level != "token" and surrogate in ("dppo_tv", "dppo_kl"):
            yield "importance_sampling_level", f'"token" beside `surrogate: {surrogate}`'
        if (level == "geometric") != (surrogate == "plain"):
            yield "importance_sampling_level", '"geometric" beside `surrogate: plain`, and there alone'
        if level != "product" and surrogate == "vespo":
            yield "importance_sampling_level", '"product" beside `surrogate: vespo`'
        if level in ("sequence", "geometric") and not ESTIMATORS[self.estimator].grouped:
            yield (
                "importance_sampling_level",
                f'"token" or "sequence_token" beside `estimator: {self.estimator}`, whose advantages differ in a row',
            )
        if surrogate == "reinforce" and self.num_iterations > 1:
            yield "num_iterations", "1 beside `surrogate: reinforce`, which corrects no staleness"

    def _kl_conflicts(self) -> Conflicts:
        estimator = self.kl_estimator
        if self.kl_in_reward and estimator != "k1":
            why = (
                "the KL of a state does not depend on the action drawn there, which would learn nothing from it"
                if estimator == "full"
                else "the gradient of another one is not that of the KL"
            )
            yield "kl_estimator", f'"k1" in the reward: {why}'
        if self.kl_in_loss and estimator == "k1" and not self.use_bias_correction_kl:
            yield (
                "kl_estimator",
                '"k2" or "k3" in the loss: the gradient of k1 is noise there, unless `use_bias_correction_kl`',
            )
        if self.use_bias_correction_kl and not (self.kl_placement == "loss" and estimator in ("k1", "k3")):
            yield "use_bias_correction_kl", "False unless `kl_estimator` is k1 or k3 in the loss"
        if self.kl_in_reward and self.scale_rewards == "group":
            yield (
                "scale_rewards",
                'not "group" where the KL is in the reward: of equal scores it would scale the KL to size 1',
            )

    def _sampler_conflicts(self) -> Conflicts:
        corrected, masked = (
            CORRECTIONS[self.importance_sampling_mode] is not None,
            self.off_policy_mask_threshold is not None,
        )
        if self.old_logprobs_from_sampler and corrected:
            yield (
                "old_logprobs_from_sampler",
                "False beside `importance_sampling_mode`: the ratio to the sampler would be counted twice",
            )
        if _filters(_rollout_kwargs(self)):
            for name, used, off in (
                ("importance_sampling_mode", corrected, '"none"'),
                ("old_logprobs_from_sampler", self.old_logprobs_from_sampler, "False"),
                ("off_policy_mask_threshold", masked, "None"),
            ):
                if used:
                    yield (
                        name,
                        f"{off} where rollouts are sampled with `top_p`, `top_k`, `repetition_penalty`, "
                        "`min_new_tokens` or `suppress_tokens`: the sampler's log-probabilities are of what they leave",
                    )
        if corrected and self.surrogate == "vespo":
            yield "importance_sampling_mode", '"none" beside `surrogate: vespo`'
        if masked and not ESTIMATORS[self.estimator].grouped:
            yield (
                "off_policy_mask_threshold",
                f"None beside `estimator: {self.estimator}`, whose advantages differ within a row",
            )

    def _score_conflicts(self) -> Conflicts:
        beside, estimator = f"beside `estimator: {self.estimator}`", ESTIMATORS[self.estimator]
        if self.reward_clip_range is not None and estimator.with_greedy:
            yield "reward_clip_range", f"None {beside}"
        if self.missing_eos_penalty and estimator.divides_by_mean:
            yield "missing_eos_penalty", f"None {beside}: scores may not fall below 0"
        if self.kl_in_reward and estimator.divides_by_mean:
            yield "kl_placement", f'"loss" {beside}: a penalty would be divided by the mean'
        if self.overlong_buffer_len is not None and (estimator.with_greedy or estimator.divides_by_mean):
            yield "overlong_buffer_len", f"None {beside}, which compares scores as they are"
        if self.mask_truncated_completions and self.missing_eos_penalty is not None:
            yield (
                "mask_truncated_completions",
                "False beside `missing_eos_penalty`, whose rows it would leave out",
            )

    def _group_conflicts(self) -> Conflicts:
        prompts, per_round = self.num_rollouts // self.num_generations, self.prompts_per_round
        if self.reduction == "group_token" and self.num_generations < 2:
            yield "reduction", 'another one than "group_token" where each prompt has one sample'
        if self.drop_uniform_groups and not ESTIMATORS[self.estimator].grouped:
            yield "drop_uniform_groups", f"False beside `estimator: {self.estimator}`, which has no groups"
        unless = "unless `drop_uniform_groups`: nothing is left out that others could replace"
        if self.max_sampling_rounds > 1 and not self.drop_uniform_groups:
            yield "max_sampling_rounds", f"1 {unless}"
        if per_round is not None and not self.drop_uniform_groups:
            yield "prompts_per_round", f"None {unless}"
        if per_round is not None and self.max_sampling_rounds * per_round < prompts:
            yield (
                "max_sampling_rounds",
                f"at least {-(-prompts // per_round)}: an iteration learns from {prompts} prompts, and a round asks "
                f"for {per_round}",
            )

    def _several_reward_conflicts(self) -> Conflicts:
        weights = self.reward_weights
        if weights is not None and not (
            isinstance(weights, list | tuple) and weights and all(map(_is_finite, weights))
        ):
            yield "reward_weights", "a list of finite numbers, one a reward function, or None"
        if self.multi_objective_aggregation == "sum_then_normalize":
            return
        each = "beside `multi_objective_aggregation: normalize_then_sum`, which normalises each function's scores"
        if self.estimator != "group_relative":
            yield "estimator", f'"group_relative" {each}'
        if self.missing_eos_penalty:
            yield "missing_eos_penalty", f"None {each}: it is of none of them"
        if self.overlong_buffer_len is not None:
            yield "overlong_buffer_len", f"None {each}: it is of none of them"
        if self.reward_clip_range is not None:
            yield "reward_clip_range", f"None {each}"
        if self.kl_in_reward:
            yield "kl_placement", f'"loss" {each}: a penalty would be added to what is normalised'
        if self.drop_uniform_groups:
            yield "drop_uniform_groups", f"False {each}: where sums are equal, scores may differ"
        if self.num_kept is not None and self.keep_by != "length":
            yield "keep_by", f'"length" {each}: a reward a token is that of their sum'


def _group_relative(config: GRPOConfig) -> Estimate:
    scale = config.scale_rewards
    return group_credit(
        lambda scores, lengths, groups, valid: group_relative_advantages(scores, groups, valid, scale=scale)
    )


def _without_lengths(advantages: Callable[..., Any], *, whitened: bool = False) -> Estimate:
    def of_scores(scores: Any, lengths: Any, groups: Any, valid: Any) -> Any:
        del lengths
        return advantages(scores, groups, valid)

    found: ScoreAdvantages = of_scores
    return group_credit(found, whitened=whitened)


class Estimator(NamedTuple):
    """An estimator of advantages, with what it asks of the rest of a configuration.

    Attributes:
      make: Builds it.
      grouped: Whether the samples of one prompt are compared; else advantages may differ within a row.
      divides_by_mean: Whether scores are divided by their mean, so that none may be negative.
      with_greedy: Whether the score of the prompt's greedy completion is subtracted.
    """

    make: Callable[[GRPOConfig], Estimate]
    grouped: bool = True
    divides_by_mean: bool = False
    with_greedy: bool = False


ESTIMATORS: Mapping[str, Estimator] = {
    "group_relative": Estimator(_group_relative),
    "leave_one_out": Estimator(lambda config: _without_lengths(leave_one_out_advantages)),
    "mean_scaled": Estimator(lambda config: _without_lengths(mean_scaled_advantages), divides_by_mean=True),
    "length_weighted": Estimator(lambda config: group_credit(length_weighted_advantages)),
    "group_then_batch": Estimator(lambda config: _without_lengths(group_relative_advantages, whitened=True)),
    "returns_to_go": Estimator(lambda config: whitened_credit(returns_to_go()), grouped=False),
    "greedy": Estimator(lambda config: returns_to_go(), grouped=False, with_greedy=True),
}
RATIOS: Mapping[str, Callable[[GRPOConfig], Ratio]] = {
    "token": lambda config: token_ratio,
    "sequence": lambda config: sequence_ratio,
    "sequence_token": lambda config: sequence_token_ratio,
    "product": lambda config: product_ratio,
    "geometric": lambda config: partial(
        geometric_clipped_ratio, clip_range=config.epsilon, clip_range_high=config.epsilon_high
    ),
}
SURROGATES: Mapping[str, Callable[[GRPOConfig], Surrogate]] = {
    "clipped": lambda config: clipped(
        clip_range=config.epsilon,
        clip_range_high=config.epsilon_high,
        max_ratio=config.delta,
        dual_clip=config.dual_clip,
    ),
    "cispo": lambda config: cispo(
        clip_range_high=config.epsilon if config.epsilon_high is None else config.epsilon_high
    ),
    "sapo": lambda config: sapo(
        temperature_pos=config.sapo_temperature_pos, temperature_neg=config.sapo_temperature_neg
    ),
    "vespo": lambda config: vespo(
        k_pos=config.vespo_k_pos,
        lambda_pos=config.vespo_lambda_pos,
        k_neg=config.vespo_k_neg,
        lambda_neg=config.vespo_lambda_neg,
    ),
    "dppo_tv": lambda config: dppo_tv(delta=config.dppo_delta),
    "dppo_kl": lambda config: dppo_kl(delta=config.dppo_delta),
    "plain": lambda config: plain_ratio(),
    "reinforce": lambda config: reinforce(),
}
REDUCTIONS: Mapping[str, Callable[[GRPOConfig], Reduction]] = {
    "constant": lambda config: partial(constant_mean, length=longest_rollout(config)),
    "token": lambda config: token_mean,
    "sequence": lambda config: sequence_mean,
    "sequence_sum": lambda config: sequence_sum_mean,
    "group_token": lambda config: token_mean,
}
KL_ESTIMATORS: Mapping[str, Callable[..., Any] | None] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "full": None,
}


def _truncated(weights: Weigh) -> Callable[[GRPOConfig], Weigh]:
    """Weights that are capped."""

    def bind(config: GRPOConfig) -> Weigh:
        return lambda *given: truncate_weights(weights(*given), cap=config.importance_sampling_clip_max)

    return bind


def _dropped(weights: Weigh) -> Callable[[GRPOConfig], Weigh]:
    """Weights that count nothing outside their band."""

    def bind(config: GRPOConfig) -> Weigh:
        low, high = config.importance_sampling_clip_min, config.importance_sampling_clip_max
        return lambda *given: drop_weights(weights(*given), low=low, high=high)

    return bind


CORRECTIONS: Mapping[str, Callable[[GRPOConfig], Weigh] | None] = {
    "none": None,
    "token_truncate": _truncated(token_weights),
    "token_mask": _dropped(token_weights),
    "sequence_truncate": _truncated(sequence_weights),
    "sequence_mask": _dropped(sequence_weights),
    "geometric_mask": _dropped(geometric_weights),
}


def longest_rollout(config: GRPOConfig) -> int:
    """Most tokens of a completion that is sampled to learn from."""
    return int(_rollout_kwargs(config)["max_new_tokens"])


def _rollout_kwargs(config: GRPOConfig) -> Mapping[str, Any]:
    """How rollouts are sampled: a sweep of evaluations counts with its first value."""
    given = config.gen_kwargs if config.gen_experience_kwargs is None else config.gen_experience_kwargs
    several = {name for name, value in given.items() if isinstance(value, list | tuple)} - {"suppress_tokens"}
    return {name: value[0] if name in several else value for name, value in given.items()}


def _filters(sampling: Mapping[str, Any]) -> bool:
    """True where tokens are drawn of another distribution than the policy's own."""
    changed = any(sampling.get(name, 1.0) != 1 for name in ("top_p", "repetition_penalty"))
    return changed or any(sampling.get(name) for name in ("top_k", "min_new_tokens", "suppress_tokens"))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_switch(field: str, value: str, known: Sequence[str]) -> None:
    """Refuses a name that is not known, and says which one is close to it.

    Args:
      field: What was set to it.
      value: The name.
      known: Those that there are.
    Raises:
      ValueError: If it is none of them.
    """
    if value not in known:
        near = did_you_mean(value, known)
        raise ValueError(f"`{field}` must be one of {known}, got {value!r}.{near}")
