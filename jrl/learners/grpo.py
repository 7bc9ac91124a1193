# SPDX-License-Identifier: Apache-2.0
"""Policy gradients without a critic: GRPO and its relatives, as switches of one configuration.

`GRPOConfig()` has the defaults that jrl recommends; `algorithm("dapo")` is the configuration of a published algorithm,
and `ALGORITHMS` lists them all. No name is asked for anywhere else: `grpo_recipe` binds switches to functions.

Reference: Shao et al. 2024, arXiv:2402.03300 (GRPO); the others stand beside their names in `ALGORITHMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from jrl.learners.config import OnlineConfig, check_fields, positive_or_none
from jrl.learners.credit import Estimate, Scaling, penalize, returns_to_go, unpenalized
from jrl.learners.groups import (
    ScoreAdvantages,
    Selection,
    as_they_are,
    decoupled_scores,
    group_credit,
    whitened_credit,
)
from jrl.learners.recipe import KLControl, PolicyLoss, Recipe, Weigh
from jrl.losses.policy_gradient import KLTerm, Ratio, Reduction, Surrogate, clipped, reinforce
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
from jrl.ops.reductions import (
    constant_mean,
    group_token_shares,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
)
from jrl.ops.sampler_correction import (
    drop_weights,
    geometric_weights,
    sequence_weights,
    token_weights,
    truncate_weights,
)
from jrl.suggestions import did_you_mean
from jrl.typing import SamplingRules

PER_TOKEN = ("returns_to_go", "greedy")
"""Estimators whose advantages may differ within a row."""
UNGROUPED = PER_TOKEN
"""Estimators that compare no samples of one prompt."""
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
        "k1", if it is corrected. In the reward "k1" alone.
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
            ("estimator", self.estimator, _ESTIMATORS),
            ("scale_rewards", self.scale_rewards, ("group", "batch", "none")),
            ("importance_sampling_level", self.importance_sampling_level, _RATIOS),
            ("surrogate", self.surrogate, _SURROGATES),
            ("reduction", self.reduction, _REDUCTIONS),
            ("kl_placement", self.kl_placement, ("loss", "reward")),
            ("kl_estimator", self.kl_estimator, _KL_ESTIMATORS),
            ("importance_sampling_mode", self.importance_sampling_mode, _IMPORTANCE_SAMPLING_MODES),
            (
                "multi_objective_aggregation",
                self.multi_objective_aggregation,
                ("sum_then_normalize", "normalize_then_sum"),
            ),
            ("keep_by", self.keep_by, ("length", "reward_per_token")),
        ):
            _check_switch(f"method.{field}", value, tuple(known))

    def _check_ranges(self) -> None:
        size = self.num_generations
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        longest, buffer, per_round = _longest(self), self.overlong_buffer_len, self.prompts_per_round
        check_fields(
            self,
            ("num_iterations", self.num_iterations >= 1, "at least 1"),
            (
                "num_generations",
                size >= 2 or self.estimator in UNGROUPED,
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
        if level in ("sequence", "geometric") and self.estimator in PER_TOKEN:
            yield (
                "importance_sampling_level",
                f'"token" or "sequence_token" beside `estimator: {self.estimator}`, whose advantages differ in a row',
            )
        if surrogate == "reinforce" and self.num_iterations > 1:
            yield "num_iterations", "1 beside `surrogate: reinforce`, which corrects no staleness"

    def _kl_conflicts(self) -> Conflicts:
        in_loss, estimator = self.kl_placement == "loss", self.kl_estimator
        if self.beta and not in_loss and estimator != "k1":
            yield "kl_estimator", '"k1" in the reward: the gradient of another one is not that of the KL'
        if self.beta and in_loss and estimator == "k1" and not self.use_bias_correction_kl:
            yield (
                "kl_estimator",
                '"k2" or "k3" in the loss: the gradient of k1 is noise there, unless `use_bias_correction_kl`',
            )
        if self.use_bias_correction_kl and not (in_loss and estimator != "k2"):
            yield "use_bias_correction_kl", "False unless `kl_estimator` is k1 or k3 in the loss"
        if self.beta and not in_loss and self.scale_rewards == "group":
            yield (
                "scale_rewards",
                'not "group" where the KL is in the reward: of equal scores it would scale the KL to size 1',
            )

    def _sampler_conflicts(self) -> Conflicts:
        corrected, masked = (
            self.importance_sampling_mode != "none",
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
        if masked and self.estimator in PER_TOKEN:
            yield (
                "off_policy_mask_threshold",
                f"None beside `estimator: {self.estimator}`, whose advantages differ within a row",
            )

    def _score_conflicts(self) -> Conflicts:
        beside = f"beside `estimator: {self.estimator}`"
        if self.reward_clip_range is not None and self.estimator == "greedy":
            yield "reward_clip_range", f"None {beside}"
        if self.missing_eos_penalty and self.estimator == "mean_scaled":
            yield "missing_eos_penalty", f"None {beside}: scores may not fall below 0"
        if self.beta and self.kl_placement == "reward" and self.estimator == "mean_scaled":
            yield "kl_placement", f'"loss" {beside}: a penalty would be divided by the mean'
        if self.overlong_buffer_len is not None and self.estimator in ("greedy", "mean_scaled"):
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
        if self.drop_uniform_groups and self.estimator in UNGROUPED:
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
        if self.beta and self.kl_placement == "reward":
            yield "kl_placement", f'"loss" {each}: a penalty would be added to what is normalised'
        if self.drop_uniform_groups:
            yield "drop_uniform_groups", f"False {each}: where sums are equal, scores may differ"
        if self.num_kept is not None and self.keep_by != "length":
            yield "keep_by", f'"length" {each}: a reward a token is that of their sum'


def grpo_recipe(config: GRPOConfig) -> Recipe:
    """A policy gradient without a critic as its configuration describes it."""
    corrected = config.importance_sampling_mode != "none"
    weights = None if config.reward_weights is None else tuple(config.reward_weights)
    decoupled = config.multi_objective_aggregation == "normalize_then_sum"
    aggregate = decoupled_scores(weights) if decoupled else None
    return Recipe(
        prefix="grpo",
        estimate=_ESTIMATORS[config.estimator](config) if aggregate is None else as_they_are(),
        loss=grpo_policy_loss(config),
        penalize=penalize("kl") if config.beta and config.kl_placement == "reward" else unpenalized,
        kl=KLControl(coef=config.beta) if config.beta else None,
        scaling=Scaling(clip_range=config.reward_clip_range),
        num_epochs=config.num_iterations,
        max_policy_kl=config.max_policy_kl,
        sampling=SamplingRules(
            mixed_only=config.drop_uniform_groups,
            max_rounds=config.max_sampling_rounds,
            prompts_per_round=config.prompts_per_round,
            mask_truncated=config.mask_truncated_completions,
            overlong_buffer=config.overlong_buffer_len,
            overlong_penalty=config.overlong_penalty,
            refuse_negative=config.estimator == "mean_scaled",
        ),
        select=Selection(
            num_kept=config.num_kept,
            by_efficiency=config.keep_by == "reward_per_token",
            needs_sampler=corrected
            or config.old_logprobs_from_sampler
            or config.off_policy_mask_threshold is not None,
        ),
        weigh=_weights(config) if corrected else None,
        shares=group_token_shares if config.reduction == "group_token" else None,
        old_logprobs_from_sampler=config.old_logprobs_from_sampler,
        compares_scores=config.estimator not in UNGROUPED
        and not (config.beta and config.kl_placement == "reward"),
        greedy_baseline=config.estimator == "greedy",
        reward_weights=weights,
        aggregate=aggregate,
    )


def grpo_policy_loss(config: GRPOConfig) -> PolicyLoss:
    """The loss of a minibatch: ratio, surrogate, reduction and KL term as configured."""
    in_loss = config.beta and config.kl_placement == "loss"
    return PolicyLoss(
        prefix="grpo",
        surrogate=_SURROGATES[config.surrogate](config),
        ratio=_RATIOS[config.importance_sampling_level](config),
        reduction=_REDUCTIONS[config.reduction](config),
        kl=KLTerm(config.beta, _KL_ESTIMATORS[config.kl_estimator], config.use_bias_correction_kl)
        if in_loss
        else None,
        entropy_coef=config.entropy_coef,
        off_policy_threshold=config.off_policy_mask_threshold,
    )


_SCALED: Mapping[str, Any] = {"scale_rewards": "group", "dual_clip": None}
_KL_IN_REWARD: Mapping[str, Any] = {"beta": 0.05, "kl_placement": "reward", "kl_estimator": "k1"}
_SYMMETRIC: Mapping[str, Any] = {"epsilon_high": 0.2, "dual_clip": None}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    # Shao et al. 2024, arXiv:2402.03300.
    "grpo": {**_SCALED, **_SYMMETRIC, "reduction": "sequence", "beta": 0.04, "kl_estimator": "k3"},
    # Liu et al. 2025, arXiv:2503.20783.
    "dr_grpo": _SYMMETRIC,
    # Yu et al. 2025, arXiv:2503.14476; mean over all tokens, as its users have it. The paper samples until a batch is
    # full, however often; ten rounds leave it empty only where fewer than a tenth of the prompts teach anything.
    "dapo": {**_SCALED, "reduction": "token", "drop_uniform_groups": True, "max_sampling_rounds": 10},
    # TRL's name for the reduction alone.
    "bnpo": {**_SCALED, **_SYMMETRIC, "reduction": "token"},
    # Zheng et al. 2025, arXiv:2507.18071.
    "gspo": {
        **_SCALED,
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence",
    },
    "gspo_token": {
        **_SCALED,
        "importance_sampling_level": "sequence_token",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence",
    },
    # MiniMax 2025, arXiv:2506.13585.
    "cispo": {**_SCALED, "surrogate": "cispo", "reduction": "token"},
    # Ahmadian et al. 2024, arXiv:2402.14740, with the ratio of the token in the place of the whole completion's.
    "rloo": {
        **_SYMMETRIC,
        **_KL_IN_REWARD,
        "estimator": "leave_one_out",
        "num_generations": 4,
        "reduction": "token",
    },
    # Hu et al. 2025, arXiv:2501.03262.
    "reinforce_pp": {
        **_SYMMETRIC,
        **_KL_IN_REWARD,
        "estimator": "returns_to_go",
        "num_generations": 1,
        "reduction": "token",
    },
    "reinforce_pp_baseline": {
        **_SYMMETRIC,
        "estimator": "group_then_batch",
        "reduction": "token",
        "beta": 0.01,
        "kl_estimator": "k2",
    },
    # Li et al. 2023, arXiv:2310.10505.
    "remax": {
        **_KL_IN_REWARD,
        "estimator": "greedy",
        "num_generations": 1,
        "surrogate": "reinforce",
        "reduction": "sequence_sum",
    },
    # Hao et al. 2025, arXiv:2505.23585.
    "opo": {"estimator": "length_weighted", "surrogate": "reinforce", "reduction": "token"},
    # Qwen 2025, arXiv:2511.20347.
    "sapo": {**_SCALED, "surrogate": "sapo", "reduction": "sequence"},
    # Zhao et al. 2025, arXiv:2507.20673.
    "gmpo": {
        **_SCALED,
        "importance_sampling_level": "geometric",
        "surrogate": "plain",
        "epsilon": 0.4,
        "epsilon_high": 0.4,
        "reduction": "sequence",
    },
    # Tajwar, Zeng et al. 2026, arXiv:2602.02710.
    "maxrl": {**_SYMMETRIC, "estimator": "mean_scaled", "num_generations": 16, "reduction": "token"},
    # arXiv:2602.05261.
    "luspo": {
        **_SCALED,
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence_sum",
    },
    # arXiv:2602.10693.
    "vespo": {
        **_SCALED,
        "importance_sampling_level": "product",
        "surrogate": "vespo",
        "reduction": "token",
    },
    # arXiv:2602.04879.
    "dppo": {**_SCALED, "surrogate": "dppo_tv", "reduction": "token"},
    # Shrivastava et al. 2025, arXiv:2508.09726.
    "gfpo": {**_SCALED, "num_generations": 16, "num_kept": 8, "reduction": "token"},
}
"""Fields of `GRPOConfig` in which a published algorithm differs from the defaults."""


def algorithm(name: str, **fields: Any) -> GRPOConfig:
    """The configuration of a published algorithm.

    Args:
      name: A name of `ALGORITHMS`.
      **fields: Of `GRPOConfig`, in the place of the algorithm's own.
    Raises:
      ValueError: If there is no algorithm of this name, naming the closest; or as the configuration refuses its fields.
    """
    _check_switch("name", name, tuple(ALGORITHMS))
    return GRPOConfig(**{**ALGORITHMS[name], **fields})


def switches(name: str) -> dict[str, Any]:
    """All fields that tell the algorithms apart, as this one has them: what to lay over a recipe of any other.

    `num_generations` is a size and stays the recipe's, unless the algorithm has a number of its own.

    Args:
      name: A name of `ALGORITHMS`.
    Raises:
      ValueError: As `algorithm`.
    """
    chosen = vars(algorithm(name))
    told = {field: None for fields in ALGORITHMS.values() for field in fields if field != "num_generations"}
    return {field: chosen[field] for field in told} | dict(ALGORITHMS[name])


Part = Callable[[GRPOConfig], Any]


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


_ESTIMATORS: Mapping[str, Callable[[GRPOConfig], Estimate]] = {
    "group_relative": _group_relative,
    "leave_one_out": lambda config: _without_lengths(leave_one_out_advantages),
    "mean_scaled": lambda config: _without_lengths(mean_scaled_advantages),
    "length_weighted": lambda config: group_credit(length_weighted_advantages),
    "group_then_batch": lambda config: _without_lengths(group_relative_advantages, whitened=True),
    "returns_to_go": lambda config: whitened_credit(returns_to_go()),
    "greedy": lambda config: returns_to_go(),
}
_RATIOS: Mapping[str, Callable[[GRPOConfig], Ratio]] = {
    "token": lambda config: token_ratio,
    "sequence": lambda config: sequence_ratio,
    "sequence_token": lambda config: sequence_token_ratio,
    "product": lambda config: product_ratio,
    "geometric": lambda config: partial(
        geometric_clipped_ratio, clip_range=config.epsilon, clip_range_high=config.epsilon_high
    ),
}
_SURROGATES: Mapping[str, Callable[[GRPOConfig], Surrogate]] = {
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
_REDUCTIONS: Mapping[str, Callable[[GRPOConfig], Reduction]] = {
    "constant": lambda config: partial(constant_mean, length=_longest(config)),
    "token": lambda config: token_mean,
    "sequence": lambda config: sequence_mean,
    "sequence_sum": lambda config: sequence_sum_mean,
    "group_token": lambda config: token_mean,
}
_KL_ESTIMATORS: Mapping[str, Callable[..., Any]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
_WEIGHTS: Mapping[str, Weigh] = {
    "token": token_weights,
    "sequence": sequence_weights,
    "geometric": geometric_weights,
}
_IMPORTANCE_SAMPLING_MODES = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
)


def _weights(config: GRPOConfig) -> Weigh:
    level, _, form = config.importance_sampling_mode.partition("_")
    raw, low, high = _WEIGHTS[level], config.importance_sampling_clip_min, config.importance_sampling_clip_max

    def weigh(old_logprobs: Any, sampler_logprobs: Any, mask: Any) -> Any:
        weights = raw(old_logprobs, sampler_logprobs, mask)
        if form == "truncate":
            return truncate_weights(weights, cap=high)
        return drop_weights(weights, low=low, high=high)

    return weigh


def _longest(config: GRPOConfig) -> int:
    """Most tokens of a rollout."""
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


def _check_switch(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = did_you_mean(value, known)
        raise ValueError(f"`{field}` must be one of {known}, got {value!r}.{near}")
