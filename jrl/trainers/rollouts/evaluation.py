# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sample on the evaluation prompts, score, and show a table."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.prompts import PromptSet
from jrl.data.sources.fingerprint import fingerprint
from jrl.distributed import on_main
from jrl.placement import DISPATCH, local_computation
from jrl.rollout.collect import Collector
from jrl.rollout.gathering import Judgement, Judging, Part, totals
from jrl.rollout.reward_call import RewardCall, keep_failed
from jrl.rollout.reward_columns import RewardColumns, known_or_none, prompt_means, standard_error
from jrl.rollout.rewards import MetricError, RewardError, call_metric_fn
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.text import Texts
from jrl.trainers.config.gen_kwargs import Sweep
from jrl.typing import Frozen, Params, PRNGKey

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
      metrics: `reward/mean` and its `reward/standard_error` (of several functions also `reward/<name>/mean`),
        `metrics/<name>` and `completion/length_mean`, each with the suffix `@name=value` where a generation argument is
        swept. Under `train.reward_errors: skip` also `reward/failed`, and rows that failed are in no mean.
      score: What `save_best` compares: `reward/mean`, else `metrics/reward`, else None; of the first value of a sweep,
        which is what rollouts use.
      columns: Of the table.
      rows: One a prompt (and sweep value): prompt, output, reward, per-sample metrics.
      sampling: How the samples were made, without which no figure says anything, and each prompt's mean reward; None
        where nothing was sampled.
    """

    metrics: dict[str, float]
    score: float | None
    columns: list[str]
    rows: list[list[Any]]
    sampling: dict[str, Any] | None = None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a policy on a fixed prompt set.

    Attributes:
      collect: Samples and decodes.
      prompts: The evaluation prompts.
      tokenizer: Of the run.
      settings: How to sample.
      sweep: (name, values) of the generation argument that every evaluation runs through, or None.
      rewards: The user's reward function, or None.
      metric_fn: The user's metrics, or None.
      step: Optimizer steps so far, for messages.
      skip_errors: Whether figures of a `metric_fn` that raises are left out; otherwise it stops the run.
      failures: Folder of the completions that a function of the user's failed on.
      handed_tokenizer: What the user's metrics are given.
      of_training: Whether `prompts` are some of those that the run trains on, because no others were given.
    """

    collect: Collector
    prompts: PromptSet
    tokenizer: Any
    settings: GenerationSettings
    sweep: Sweep | None
    rewards: RewardCall | None
    metric_fn: Callable[..., Any] | None
    step: int
    skip_errors: bool
    failures: Path
    handed_tokenizer: Any
    of_training: bool = False

    def __call__(self, params: Params, frozen: Frozen, key: PRNGKey) -> Evaluation:
        """Runs every sweep value over every prompt; row i of the set always samples with key i."""
        name, values = self.sweep or (None, (None,))
        metrics: dict[str, float] = {}
        columns: list[str] = []
        rows: list[list[Any]] = []
        scores_of_values: list[float | None] = []
        for value in values:
            settings = replace(self.settings, **{name: value}) if name else self.settings
            judgement = self._sample(params, frozen, settings, key)
            texts = judgement.texts
            scores = None if judgement.rewards is None else judgement.rewards.tolist()
            columns_of_samples, found = self._judge(texts, scores, judgement.columns)
            scores_of_values.append(found.get("reward/mean", found.get("metrics/reward")))
            suffix = f"@{name}={value}" if name else ""
            found["completion/length_mean"] = float(np.mean(texts.lengths))
            metrics.update({f"{key_}{suffix}": number for key_, number in found.items()})
            columns = (
                ([name] if name else []) + ["prompt", "output"] + (["reward"] if scores is not None else [])
            )
            columns += list(columns_of_samples)
            for row in range(len(texts.outputs)):
                cells = ([value] if name else []) + [texts.prompts[row], texts.outputs[row]]
                cells += [scores[row]] if scores is not None else []
                rows.append(cells + [column[row] for column in columns_of_samples.values()])
        return Evaluation(metrics, scores_of_values[0], columns, rows, self._sampling(judgement))

    def _sampling(self, judgement: Judgement) -> dict[str, Any]:
        """Facts of the sampling, for every score: number of samples, their distribution; swept values as a list."""
        settings, rewards, prompts = self.settings, judgement.rewards, judgement.texts.prompts
        template = self.tokenizer.chat_template
        found = count_samples(prompts) | {
            "prompts": "training" if self.of_training else "evaluation",
            "do_sample": settings.do_sample,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens,
            "reward": None if self.rewards is None else " + ".join(self.rewards.functions),
            # Of the tokenizer: a text prompt passes by it, and so would one that was rendered before.
            "chat_template_sha256": None if template is None else fingerprint(str(template))[:16],
        }
        if self.sweep is not None:
            return found | {self.sweep[0]: list(self.sweep[1])}
        if rewards is None:
            return found
        return found | {"reward_means": known_or_none(prompt_means(rewards, prompts))}

    def _sample(
        self, params: Params, frozen: Frozen, settings: GenerationSettings, key: PRNGKey
    ) -> Judgement:
        """Samples a completion for each prompt; the reward function sees all that this process has at once."""
        everything = np.arange(len(self.prompts))
        with DISPATCH:
            calls = self.collect.parts(
                params, frozen, self.prompts, everything, settings, key, clock=lambda name: DISPATCH.left()
            )
            parts = [part for _, part in calls]
        own = Part.concatenate(parts)
        judging = Judging(self.rewards, totals)
        judging.add(own, self.prompts.metadata(own.numbers), label=self._label)
        return judging.together()

    def _judge(
        self, texts: Texts, scores: list[float] | None, by_function: RewardColumns | None
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Metrics of the samples: (per-sample columns, means)."""
        means: dict[str, float] = {}
        if self.rewards is not None and scores is not None:
            means["reward/mean"] = _mean_of_known(scores)
            error = standard_error(prompt_means(np.asarray(scores), texts.prompts))
            means |= {} if error is None else {"reward/standard_error": error}
            if self.rewards.skip_errors:
                means["reward/failed"] = float(np.sum(np.isnan(scores)))
        columns: dict[str, list[Any]] = {}
        if by_function is not None:
            means |= by_function.metrics()
            columns |= by_function.cells()
        if self.metric_fn is not None:
            for name, value in on_main(partial(self._measure, self.metric_fn, texts)).items():
                means[f"metrics/{name}"] = _mean_of_known(value if isinstance(value, list) else [value])
                if isinstance(value, list):
                    columns[name] = value
        return columns, means

    def _measure(self, metric_fn: Callable[..., Any], texts: Texts) -> dict[str, list[float] | float]:
        """Calls the user's metrics; texts on which they fail are kept on the disk before the run stops."""
        metadata = self.prompts.metadata(np.arange(len(self.prompts)))
        try:
            with local_computation():
                return call_metric_fn(metric_fn, texts, tokenizer=self.handed_tokenizer, metadata=metadata)
        except RewardError as error:
            told = f"evaluation at step {self.step}: {error}"
            if self.skip_errors and isinstance(error, MetricError):
                _logger.warning("Its metrics are left out: %s", told)
                return {}
            failure = RewardError(told)
            failure.add_note(keep_failed(self.failures, texts, metadata, label=self._label))
            raise failure from (error.__cause__ or error)

    @property
    def _label(self) -> str:
        """Names this evaluation in the file that keeps completions."""
        return f"evaluation_at_step_{self.step:06d}"


def count_samples(prompts: Sequence[str]) -> dict[str, int | None]:
    """`num_prompts`, the different ones, and `samples_per_prompt`: how often each is there, None where that differs.

    Args:
      prompts: One a sample.
    """
    counts = Counter(prompts)
    alike = len(set(counts.values())) == 1
    return {"num_prompts": len(counts), "samples_per_prompt": len(prompts) // len(counts) if alike else None}


def _mean_of_known(values: Sequence[float]) -> float:
    """Mean of the entries that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
