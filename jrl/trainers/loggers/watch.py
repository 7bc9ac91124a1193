# SPDX-License-Identifier: Apache-2.0
"""Healthy ranges of a run's metrics, and a watch that reports once each thing that leaves them.

`HEALTHY` holds the ranges of `docs/metrics.md`. A `Rule` says how far and for how long a metric must be outside before
a user is told: runs that learn leave their ranges now and then, so a rule is wider than the range and more patient.
Everything here reads finished records and nothing else: no device, no clock, no configuration. So a resumed run says
what the uninterrupted one would, and `find` can judge any `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jrl.trainers.loggers.evaluated_reward import ERROR, MEAN, EvaluatedReward

Record = Mapping[str, Any]

FOUND = "watch"
"""Key of a finding's name in its record; no other record has it."""
BASELINE = 2
"""First values of a metric of which the mean is its baseline; of an evaluation's, the first alone."""
EVAL = "eval/"
"""Stands before the name of an evaluation's metric, as in trackers."""
_REWARD, _ERROR = f"{EVAL}{MEAN}", f"{EVAL}{ERROR}"


@dataclass(frozen=True)
class Range:
    """Values that are healthy.

    Attributes:
      low: Smallest; None: no bound.
      high: Largest; None: no bound.
    """

    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Range as `docs/metrics.md` writes it."""
        if self.low == self.high:
            return f"{self.low:g}"
        if self.low is None:
            return f"below {self.high:g}"
        return f"above {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


HEALTHY: Mapping[str, Range] = {
    "reward/failed": Range(0, 0),
    "reward/failed_fraction": Range(0, 0),
    "group/truncated_fraction": Range(high=0.1),
    "kl/per_token": Range(high=0.5),
    "kl/per_sequence": Range(high=40),
    "kl/coef": Range(1e-4, 1),
    "ppo/clip_fraction": Range(high=0.3),
    "ppo/value_clip_fraction": Range(high=0.3),
    "ppo/ratio_max": Range(high=30),
    "ppo/log_ratio_abs_max": Range(high=10),
    "ppo/approx_kl": Range(high=0.05),
    "ppo/policy_kl": Range(high=0.05),
    "ppo/minibatches_left_out": Range(0, 0),
    "reward_model/accuracy": Range(low=0.5),
    "rewards/accuracies": Range(low=0.5),
    "ddpo/clip_fraction": Range(high=0.5),
    "ddpo/pre_update_clip_fraction": Range(high=0.05),
    "rft/empty_rounds": Range(0, 0),
    "sampler/abs_ratio": Range(high=1.02),
    "sampler/kl_k3": Range(high=1e-3),
    "optim/learning_rate": Range(high=0.1),
    "optim/skipped_steps": Range(0, 0),
    "optim/skipped_in_a_row": Range(0, 0),
    "completion/distinct_across_prompts": Range(low=0.5),
    "completion/top_token_fraction": Range(high=0.5),
}
"""Healthy ranges, by metric; what the other metrics should do is words in `docs/metrics.md`."""


@dataclass(frozen=True)
class Test:
    """A rule's test of a metric in a record.

    Attributes:
      metric: Its name; "steps" is the optimizer steps since the record before.
      above: The value must be larger; None: not asked.
      below: The value must be smaller; None: not asked.
      of: What is compared: the "value", its "ratio" to the baseline, its "change" from it, the baseline itself, the
        mean of the metric's "first" values; of an evaluation's reward the "fall" below the first one, or the
        "fall_from_best", in standard errors of the difference.
      per: Of a "change": another metric, in whose first values it is measured; None: as it is. Of a fall: the metric
        of the standard error, without which there is none.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    of: Literal["value", "ratio", "change", "first", "fall", "fall_from_best"] = "value"
    per: str | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that a record must have to be tested."""
        return (self.metric,) if self.per is None else (self.metric, self.per)

    def holds(self, value: float, baseline: float, unit: float = 1.0) -> bool:
        """True where a value passes; there is no ratio to a baseline, or a unit, that is not positive.

        Args:
          value: Of the metric.
          baseline: Mean of its first values.
          unit: That of `per`.
        """
        if (self.of == "ratio" and baseline <= 0) or unit <= 0:
            return False
        compared = {
            "value": value,
            "ratio": value / (baseline or 1.0),
            "change": (value - baseline) / unit,
            "first": baseline,
        }[self.of]
        return self.admits(compared)

    def admits(self, compared: float) -> bool:
        """True where a number is between the bounds.

        Args:
          compared: What `of` says.
        """
        return (self.above is None or compared > self.above) and (self.below is None or compared < self.below)

    def __str__(self) -> str:
        """Such as "`ppo/entropy` below 0.5 times its first values"."""
        name = "optimizer steps of an iteration" if self.metric == "steps" else f"`{self.metric}`"
        bounds = [f"above {self.above:g}"] if self.above is not None else []
        bounds += [f"below {self.below:g}"] if self.below is not None else []
        compared = {"value": "", "ratio": " times its first values", "change": " more than its first values"}
        if self.of in ("fall", "fall_from_best"):
            origin = "first" if self.of == "fall" else "best"
            return (
                f"{name} more than {self.above:g} standard errors of the difference below its {origin} value"
            )
        if self.of == "first":
            return f"first values of {name} {' and '.join(bounds)}"
        if self.per is not None:
            return f"change of {name} {' and '.join(bounds)} times the first values of `{self.per}`"
        return f"{name} {' and '.join(bounds)}{compared[self.of]}"


@dataclass(frozen=True)
class Rule:
    """A rule for something that goes wrong.

    Attributes:
      name: Of the finding.
      tests: All must hold in a record; the first one's metric is reported.
      patience: Records in a row, of those that have the metrics, in which they must.
      cause: What it usually comes from.
      remedy: What usually helps.
      unless: Metric of records of which the rule says nothing.
      level: Metric that must not rise over those records (`rises`).
      level_test: Test that the mean of `level` over those records must pass, too.
    """

    name: str
    tests: tuple[Test, ...]
    patience: int
    cause: str
    remedy: str
    unless: str | None = None
    level: str | None = None
    level_test: Test | None = None

    @property
    def of_evaluations(self) -> bool:
        """True where it judges evaluations, beside the last training record, and not training records."""
        return self.tests[0].metric.startswith(EVAL)

    def condition(self) -> str:
        """Condition of the rule in words."""
        aside = f"; no `{self.unless}`" if self.unless else ""
        still = (
            ""
            if self.level is None
            else (
                f"; mean of `{self.level}` in the later half of those records at most a standard error above that in "
                "the earlier half"
            )
        )
        mean = "" if self.level_test is None else f"; of the mean over those records, {self.level_test}"
        return "; ".join(map(str, self.tests)) + still + mean + aside


RULES: tuple[Rule, ...] = (
    Rule(
        "constant_reward",
        (Test("reward/std", below=1e-6), Test("reward/std", below=1e-6, of="first")),
        4,
        "every rollout gets the same reward, so nothing can be learned; the reward function ignores the completion, or "
        "a parser in it always fails",
        "call the reward function on some completions by hand; let it tell better from worse ones",
    ),
    Rule(
        "constant_reward",
        (Test("reward/std", below=1e-6), Test("reward/mean", below=0, of="change")),
        4,
        "every rollout gets the same reward, and less than at the beginning: the policy has collapsed, or the reward "
        "function has begun to fail",
        "read the samples; call the reward function on some of them by hand",
    ),
    Rule(
        "flat_reward",
        (
            Test("reward/mean", above=-0.5, below=0.5, of="change", per="reward/std"),
            Test("kl/per_sequence", below=0.5),
            Test("reward/std", above=1e-6),
        ),
        40,
        "the reward is where it began, and so is the policy: it hardly differs from the reference",
        "raise the learning rate (optimizer.kwargs.lr) three to ten times, or lower the weight of the KL penalty",
        level="reward/mean",
    ),
    Rule(
        "flat_reward",
        (
            Test("reward/mean", below=0.1, of="change", per="reward/std"),
            Test("kl/per_sequence", above=2),
            Test("reward/std", above=1e-6),
        ),
        40,
        "the policy moves away from the reference, and the reward does not rise: updates follow noise, or the reward "
        "is as good as it gets",
        "read the samples; average over more rollouts (method.num_rollouts), lower the learning rate, and look whether "
        "the reward tells completions of one prompt apart",
        level="reward/mean",
    ),
    Rule(
        "flat_reward",
        (
            Test("reward/mean", below=0.5, of="change", per="reward/std"),
            Test("group/zero_std_fraction", below=0.9),
            Test("reward/std", above=1e-6),
        ),
        40,
        "the reward is no higher than it began, and does not rise: updates are too small, or follow noise, or the "
        "reward is as good as it gets; without a KL to a reference, nothing tells which",
        "read the samples; if they have hardly changed, raise the learning rate (optimizer.kwargs.lr) three times; if "
        "they have become worse, lower it three times, or take more samples of each prompt (method.num_generations)",
        unless="kl/per_sequence",
        level="reward/mean",
        # Of the mean, since single records waver: a run that has learned something and stays there is left alone.
        level_test=Test("reward/mean", below=0.1, of="change", per="reward/std"),
    ),
    Rule(
        "falling_evaluation",
        (
            Test(_REWARD, above=2, of="fall", per=_ERROR),
            Test("reward/mean", above=0.3, of="change", per="reward/std"),
        ),
        2,
        "evaluations are worse than before training, and only the reward of training rises: the policy learns its few "
        "prompts by heart, or exploits a reward that evaluations do not share",
        "read the samples; take more prompts, fewer steps and a lower learning rate, and raise the weight of the KL "
        "penalty (method.init_kl_coef, or method.beta)",
    ),
    Rule(
        "falling_evaluation",
        (Test(_REWARD, above=2, of="fall", per=_ERROR),),
        2,
        "evaluations are worse than before training: most often the learning rate is too high for this model; else "
        "training and evaluation differ in prompts or sampling",
        "lower the learning rate (optimizer.kwargs.lr) three to ten times; read the samples; raise the weight of the "
        "KL penalty (method.init_kl_coef, or method.beta)",
    ),
    Rule(
        "falling_evaluation",
        (Test(_REWARD, above=3, of="fall_from_best", per=_ERROR),),
        3,
        "evaluations fall from their best: the policy learns its prompts by heart, exploits the reward of training, or "
        "the learning rate is too high by now",
        "read the samples; take the best checkpoint and stop earlier, let the learning rate fall (scheduler), take "
        "more prompts, or raise the weight of the KL penalty (method.init_kl_coef, or method.beta)",
    ),
    Rule(
        "equal_groups",
        (Test("group/zero_std_fraction", above=0.9),),
        4,
        "nearly all prompts have samples of one and the same score, and nothing can be learned from comparing those: "
        "the prompts are too easy or too hard, or the reward does not tell completions apart",
        "take prompts that are solved now and then, or more samples of each (method.num_generations); stop if the task "
        "is solved",
    ),
    Rule(
        "failed_rewards",
        (Test("reward/failed_fraction", above=0.5),),
        1,
        "most completions have no reward and teach nothing: the reward function, or a service it calls, fails "
        "(`reward_errors: skip`), or applies to few prompts",
        "look for its errors on the console and call it by hand; stop and resume once it answers",
    ),
    Rule(
        "one_token",
        (
            Test("completion/top_token_fraction", above=0.6),
            Test("completion/top_token_fraction", above=1.5, of="ratio"),
            Test("completion/length_mean", above=3),
        ),
        2,
        "the policy has collapsed to repeating one token: the reward likes it, or an update was far too large",
        "read the samples; mend the reward, "
        "raise the weight of the KL penalty (method.init_kl_coef), lower the learning rate",
    ),
    Rule(
        "same_completions",
        (
            Test("completion/distinct_across_prompts", below=0.4),
            Test("completion/distinct_across_prompts", below=0.6, of="ratio"),
            Test("completion/distinct_fraction", below=0.3),
        ),
        2,
        "the policy gives the same few completions to different prompts: collapse, or a reward that one text satisfies",
        "read the samples; let the reward depend on the prompt, "
        "raise the weight of the KL penalty (method.init_kl_coef), lower the learning rate",
    ),
    Rule(
        "entropy_collapse",
        (Test("ppo/entropy", below=0.05), Test("ppo/entropy", below=0.1, of="ratio")),
        4,
        "the policy has become deterministic, so it explores nothing any more",
        "lower the learning rate, "
        "raise the weight of the KL penalty or of the entropy (method.init_kl_coef, method.entropy_coef), "
        "or stop if the task is solved",
    ),
    Rule(
        "entropy_collapse",
        (Test("dpo/entropy", below=0.1), Test("dpo/entropy", below=0.25, of="ratio")),
        3,
        "the policy has become deterministic: the learning rate is far too high, or the pairs are learned by heart",
        "lower the learning rate, raise method.beta, make fewer passes",
    ),
    Rule(
        "entropy_collapse",
        (Test("grpo/entropy", below=0.05), Test("grpo/entropy", below=0.1, of="ratio")),
        4,
        "the policy has become deterministic, so it explores nothing any more",
        "lower the learning rate, raise method.entropy_coef or method.beta, or stop if the task is solved",
    ),
    Rule(
        "large_kl",
        (Test("kl/per_sequence", above=40), Test("kl/per_token", above=0.1)),
        2,
        "the policy is far from the reference, usually because it exploits the reward",
        "read the samples; "
        "raise the weight of the KL penalty ten times (method.init_kl_coef, or method.beta), lower the learning rate",
    ),
    Rule(
        "large_kl",
        (Test("kl/per_token", above=3), Test("kl/per_sequence", above=20)),
        2,
        "the policy is far from the reference, usually because it exploits the reward",
        "read the samples; "
        "raise the weight of the KL penalty ten times (method.init_kl_coef, or method.beta), lower the learning rate",
    ),
    *(
        Rule(
            "large_kl",
            # A policy that learns a task sharpens. Where it moves as far and does not, it writes what the reference
            # finds unlikely; walks on a graph, whose entropy fell by a third, reached 1.9 nats and were right.
            (
                Test("kl/per_token", above=0.5),
                Test("kl/per_sequence", above=5),
                Test(entropy, above=0.8, of="ratio"),
            ),
            3,
            "completions are far from the reference for their length, and the entropy has not fallen: the text comes "
            "apart, usually because the reward pays for its parts",
            "read the samples; raise the weight of the KL penalty ten times (method.init_kl_coef, or method.beta), "
            "lower the learning rate",
        )
        for entropy in ("ppo/entropy", "grpo/entropy")
    ),
    Rule(
        "kl_coef_runs_away",
        (Test("kl/coef", above=1), Test("kl/coef", above=10, of="ratio")),
        2,
        "the adaptive controller cannot hold the KL at method.target",
        "lower the learning rate, or raise method.target",
    ),
    Rule(
        "negative_kl",
        (Test("kl/per_token", below=-0.05),),
        4,
        "the KL estimate is negative for long, so samples are not the policy's own: filtered sampling, or an EOS that "
        "the sampler may not draw",
        "sample with top_k 0, top_p 1.0 and no minimum length",
    ),
    Rule(
        "large_update",
        (Test("ppo/approx_kl", above=0.5),),
        2,
        "one update moves the policy far from the one that sampled",
        "lower the learning rate or method.ppo_epochs",
    ),
    Rule(
        "clipped",
        (Test("ppo/clip_fraction", above=0.5),),
        3,
        "most actions are clipped, so most of the update is thrown away",
        "lower the learning rate or method.ppo_epochs",
    ),
    Rule(
        "large_update",
        (Test("grpo/approx_kl", above=0.5),),
        2,
        "one update moves the policy far from the one that sampled",
        "lower the learning rate or method.num_iterations",
    ),
    Rule(
        "clipped",
        (Test("grpo/clip_fraction", above=0.5),),
        3,
        "most actions are clipped, so most of the update is thrown away",
        "lower the learning rate or method.num_iterations",
    ),
    Rule(
        "nothing_clipped",
        (Test("ppo/clip_fraction", below=1e-9), Test("ppo/approx_kl", below=1e-5), Test("steps", above=1)),
        10,
        "updates hardly move the policy",
        "raise the learning rate or method.ppo_epochs; are all rewards equal, or the schedule at its end",
    ),
    Rule(
        "wrong_old_logprobs",
        (Test("ppo/ratio_max_dev_first_minibatch", above=0.1),),
        2,
        "the ratio is not 1 before anything has changed, so scoring and update compute different log-probabilities",
        "use compute_dtype float32; if it stays, this is a defect worth reporting",
        unless="rollout/staleness",  # an earlier policy sampled
    ),
    Rule(
        "sampler_differs",
        (Test("sampler/abs_ratio", above=1.1), Test("sampler/ratio", above=0.98, below=1.02)),
        3,
        "sampler and scoring give the same tokens other probabilities",
        "use compute_dtype float32; if it stays, this is a defect worth reporting",
    ),
    Rule(
        "useless_values",
        (Test("ppo/explained_variance", below=-0.5), Test("reward/std", above=1e-6)),
        10,
        "values predict the returns worse than a constant would",
        "lower the learning rate, scale the rewards (method.scale_reward), raise method.vf_coef",
    ),
    Rule(
        "diverging_values",
        (Test("ppo/value_loss", above=10, of="ratio"), Test("ppo/explained_variance", below=0.0)),
        3,
        "the value loss is ten times what it was at the beginning, and values explain nothing of the returns",
        "lower the learning rate or method.vf_coef, scale the rewards (method.scale_reward: running), set "
        "train.max_grad_norm",
    ),
    Rule(
        "length_limit",
        (
            Test("completion/truncated_fraction", above=0.95),
            Test("completion/truncated_fraction", above=2, of="ratio"),
        ),
        3,
        "completions have grown to the length limit: the policy has unlearned to end",
        "set method.missing_eos_penalty, or let the reward count length",
    ),
    Rule(
        "truncated",
        # Where nearly all are cut, the task may have no end; where samples are compared, some are.
        (Test("group/truncated_fraction", above=0.1, below=0.95),),
        3,
        "more than a tenth of the completions are cut at the length limit, and the answers that they were to end with "
        "are compared with whole ones",
        "raise max_new_tokens, set method.overlong_buffer_len, or leave them out with "
        "method.mask_truncated_completions",
    ),
    Rule(
        "empty_completions",
        (Test("completion/length_mean", below=1.5), Test("completion/length_mean", below=0.3, of="ratio")),
        3,
        "completions have shrunk to nothing: the policy ends at once",
        "read the samples; mend a reward that prefers short texts",
    ),
    Rule(
        "learning_rate",
        (Test("optim/learning_rate", above=0.999),),
        1,
        "the learning rate is 1 or more; adaptive optimizers move every weight by about that much in a step",
        "language models train at 1e-6 to 1e-3",
    ),
    Rule(
        "skipped_steps",
        (Test("optim/skipped_steps", above=0),),
        1,
        "an optimizer step had a loss or gradient that is not finite, and was left out",
        "lower the learning rate, set train.max_grad_norm, use a wider compute_dtype; rewards must be finite",
        unless="ddpo/loss_scale",  # a scale that was too large is tried, skipped and halved
    ),
    *(
        Rule(
            "diverging_loss",
            (Test(metric, above=2, of="ratio"), Test(metric, above=floor)),
            patience,
            "the loss is twice what it was at the beginning",
            "lower the learning rate, warm it up, set train.max_grad_norm",
        )
        for metric, floor, patience in (
            ("sft/loss", 1.0, 5),
            ("dpo/loss", 1.0, 5),
            ("reward_model/loss", 1.0, 5),
            ("ilql/loss", 1.0, 8),
        )
    ),
    Rule(
        "wrong_order",
        (Test("reward_model/accuracy", below=0.5), Test("reward_model/loss", above=0.5)),
        25,
        "most pairs stay in the wrong order: nothing is learned from them, or the learning rate is too high",
        "read some pairs; check the column names; change the learning rate",
    ),
    Rule(
        "wrong_order",
        (Test("rewards/accuracies", below=0.5), Test("rewards/margins", below=0.0)),
        25,
        "most pairs stay in the wrong order: nothing is learned from them, or the learning rate is too high",
        "read some pairs; check the column names; change the learning rate",
    ),
    Rule(
        "displaced",
        (Test("rewards/chosen", below=0.0), Test("rewards/margins", above=0.0)),
        10,
        "the margin grows while chosen completions become less likely than under the reference, so the policy leaves "
        "both (arXiv:2410.08847)",
        "raise method.beta, lower the learning rate, set 'sft' beside the loss, or take pairs that differ more",
    ),
    Rule(
        "q_explosion",
        (Test("ilql/q_loss", above=10, of="ratio"), Test("ilql/q_loss", above=5.0)),
        5,
        "Q values diverge: heads and their targets chase each other",
        "lower the learning rate or method.alpha, raise method.steps_for_target_q_sync",
    ),
    Rule(
        "awac_weights",
        (Test("ilql/awac_weight_max", above=4.8e8),),
        3,
        "weights of the behaviour loss stand at their limit, e to the 20",
        "lower method.beta",
    ),
    Rule(
        "images_clipped",
        (Test("ddpo/clip_fraction", above=0.9),),
        3,
        "nearly all denoising steps are clipped, so the update is thrown away",
        "lower the learning rate, or widen method.train_clip_range",
    ),
    Rule(
        "clipped_before_update",
        (Test("ddpo/pre_update_clip_fraction", above=0.05),),
        1,
        "ratios leave the clip range before anything has been learned, so rounding decides what is clipped",
        "sample and train at equal batch sizes, compute in float32, widen method.train_clip_range, or set "
        "method.old_log_probs to recompute",
    ),
    Rule(
        "empty_rounds",
        (Test("rft/empty_rounds", above=0),),
        1,
        "a round of sampling gave no sample with a score",
        "the reward function fails, or gives NaN, on all of them: call it by hand",
    ),
)
"""What the watch looks for. Thresholds leave room around what the shipped recipes do."""


def rises(values: Sequence[float]) -> bool:
    """True where the later half's mean is more than a standard error above the earlier half's.

    The error is that of the difference of both means. The variance of a value is half the mean square of differences
    between neighbours (von Neumann, 1941), which a slow trend hardly enters.

    Args:
      values: In order, at least two.
    """
    middle, count = len(values) // 2, len(values)
    rise = math.fsum(values[middle:]) / (count - middle) - math.fsum(values[:middle]) / middle
    variance = math.fsum((later - one) ** 2 for one, later in pairwise(values)) / (2 * (count - 1))
    return rise > math.sqrt(variance * (1 / middle + 1 / (count - middle)))


@dataclass(frozen=True)
class Finding:
    """A finding of the watch.

    Attributes:
      rule: The rule that was met.
      step: Optimizer step of the record that completed it.
      value: Of the rule's first metric there.
      least: The value from which it fell, where the rule is of a fall.
    """

    rule: Rule
    step: int
    value: float
    least: float | None = None

    @property
    def metric(self) -> str:
        """The metric that is reported."""
        return self.rule.tests[0].metric

    def record(self) -> dict[str, Any]:
        """Record of the finding, for `metrics.jsonl` and `history`."""
        healthy = HEALTHY.get(self.metric)
        said = None if healthy is None else str(healthy)
        return {
            "step": self.step,
            FOUND: self.rule.name,
            "metric": self.metric,
            "value": self.value,
            "healthy": said if self.least is None else f"{self.least:.3g} or more",
            "cause": self.rule.cause,
            "remedy": self.rule.remedy,
        }


class Watch:
    """Follows a run's records and finds each thing once.

    Args:
      history: Records of the run so far, findings among them: what they say is not said again.
      rules: What to look for.
    """

    def __init__(self, history: Iterable[Record] = (), rules: Sequence[Rule] = RULES) -> None:
        self._rules = rules
        self._first: dict[str, list[float]] = {}
        self._recent = [deque[bool]([], rule.patience) for rule in rules]
        self._levels = [deque[float]([], rule.patience) for rule in rules]
        self._step, self._told = 0, set[str]()
        self._last: dict[str, float] = {}
        # The "last" one, and by the name of a fall the one that it is measured from.
        self._evaluations = dict[str, EvaluatedReward]()
        for record in history:
            self._follow(record)
            if FOUND in record:
                self._told.add(record[FOUND])

    def see(self, record: Record) -> list[Finding]:
        """Findings that this record of training, or of an evaluation, completes, in the order of the rules."""
        found = []
        for rule, value in self._follow(record):
            if rule.name not in self._told:
                self._told.add(rule.name)
                found.append(Finding(rule, int(record["step"]), value, self._least(rule.tests[0])))
        return found

    def state(self) -> dict[str, Any]:
        """Baselines, windows and what was told, as plain JSON, for a watch that goes on without the records."""
        recent = {rule.condition(): list(seen) for rule, seen in zip(self._rules, self._recent, strict=True)}
        levels = {rule.condition(): list(seen) for rule, seen in zip(self._rules, self._levels, strict=True)}
        first = {name: list(values) for name, values in self._first.items()}
        told = sorted(self._told)
        return {
            "step": self._step,
            "first": first,
            "recent": recent,
            "levels": levels,
            "told": told,
            "last": dict(self._last),
            "evaluations": {name: list(reward) for name, reward in self._evaluations.items()},
        }

    def load(self, found: Mapping[str, Any]) -> None:
        """Goes on where `state` was asked; a rule that was not there then begins anew.

        Args:
          found: What `state` gave.
        """
        self._step, self._told = int(found["step"]), set(found["told"])
        self._first = {name: list(values) for name, values in found["first"].items()}
        # Older states knew of no evaluations.
        self._last, rewards = dict(found.get("last", {})), found.get("evaluations", {})
        self._evaluations = {name: EvaluatedReward(*values) for name, values in rewards.items()}
        self._recent = [
            deque(found["recent"].get(rule.condition(), ()), rule.patience) for rule in self._rules
        ]
        self._levels = [
            deque(found.get("levels", {}).get(rule.condition(), ()), rule.patience) for rule in self._rules
        ]

    def _follow(self, record: Record) -> list[tuple[Rule, float]]:
        """Takes a record in; the rules that are met now, with the value of their metric."""
        of_evaluation = "evaluation" in record
        if not of_evaluation and "iteration" not in record:
            return []
        if of_evaluation:
            record = {name.removeprefix(EVAL): value for name, value in record.items()}
            self._remember(record)
        values = {name: value for name, value in record.items() if _is_finite(value)}
        if of_evaluation:
            values = {f"{EVAL}{name}": value for name, value in values.items()}
        else:
            values["steps"] = values["step"] - self._step
            self._step = record["step"]
        for name, value in values.items():
            first = self._first.setdefault(name, [])
            if len(first) < (1 if of_evaluation else BASELINE):
                first.append(value)
        if of_evaluation:
            return self._met(self._last | values, of_evaluation=True)
        self._last = values
        return self._met(values, of_evaluation=False)

    def _remember(self, record: Record) -> None:
        """Keeps the reward of the first evaluation that has an error, of the best one, and of this one."""
        reward = EvaluatedReward.of(record)
        if reward is None or reward.error is None:
            return
        kept = self._evaluations
        kept["last"] = reward
        kept.setdefault("fall", reward)
        if reward.mean > kept.setdefault("fall_from_best", reward).mean:
            kept["fall_from_best"] = reward

    def _met(self, values: Mapping[str, float], *, of_evaluation: bool) -> list[tuple[Rule, float]]:
        """Takes figures into the windows of the rules that judge them; the rules that are met, with their values."""
        met = []
        for rule, recent, level in zip(self._rules, self._recent, self._levels, strict=True):
            known = all(name in values for test in rule.tests for name in test.metrics)
            if rule.of_evaluations == of_evaluation and rule.unless not in values and known:
                recent.append(all(self._holds(test, values) for test in rule.tests))
                if rule.level is not None:
                    level.append(values[rule.level])
                if len(recent) == rule.patience and all(recent) and self._stays(rule, level, values):
                    met.append((rule, values[rule.tests[0].metric]))
        return met

    def _stays(self, rule: Rule, levels: Sequence[float], values: Mapping[str, float]) -> bool:
        """True where a rule asks for no level, or its values do not rise and their mean passes."""
        if rule.level is None:
            return True
        mean = {rule.level: math.fsum(levels) / len(levels)}
        passes = rule.level_test is None or self._holds(rule.level_test, {**values, **mean})
        return passes and not rises(list(levels))

    def _least(self, test: Test) -> float | None:
        """Value from which a fall is measured; None of other tests."""
        return self._evaluations[test.of].mean if test.of in self._evaluations else None

    def _holds(self, test: Test, values: Mapping[str, float]) -> bool:
        if test.of in self._evaluations:
            change = self._evaluations["last"].change_from(self._evaluations[test.of])
            return change is not None and test.admits(_fall_in_errors(*change))
        unit = 1.0 if test.per is None else self._baseline(test.per)
        return test.holds(values[test.metric], self._baseline(test.metric), unit)

    def _baseline(self, metric: str) -> float:
        first = self._first[metric]
        return math.fsum(first) / len(first)


def find(history: Iterable[Record], rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Findings of a whole run, as a watch would have reported them, in order: a pure function of its records."""
    watch = Watch(rules=rules)
    return [found for record in history for found in watch.see(record)]


def say(record: Record) -> str:
    """A finding's record as one line for people."""
    healthy = "" if record["healthy"] is None else f" (healthy: {record['healthy']})"
    return (
        f"{record[FOUND]}: {record['metric']} is {record['value']:.3g}{healthy} at step {record['step']}. Likely "
        f"cause: {record['cause']}. Remedy: {record['remedy']}."
    )


def rules_table(rules: Sequence[Rule] = RULES) -> str:
    """The rules as `docs/metrics.md` shows them."""
    rows = [
        f"| `{rule.name}` | {rule.condition()} | {rule.patience} | {rule.cause} | {rule.remedy} |"
        for rule in rules
    ]
    head = ["| finding | said when | records in a row | likely cause | remedy |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _fall_in_errors(change: float, error: float) -> float:
    """A fall in standard errors: infinite where all prompts fall alike, whose changes have no deviation."""
    if error:
        return -change / error
    return math.inf if change < 0 else 0.0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
