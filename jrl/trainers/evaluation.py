# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sample on the evaluation prompts, score, and show a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrl.data.prompts import PromptSet
from jrl.rollout.rewards import call_metric_fn
from jrl.rollout.text import Texts
from jrl.trainers.completing import Completer
from jrl.trainers.generation import GenerationSettings, Sweep
from jrl.trainers.reward_calls import RewardCall
from jrl.typing import Frozen, Params, PRNGKey


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
      metrics: `reward/mean`, `metrics/<name>` and `completion/length_mean`, each with the suffix `@name=value` where a
        generation argument is swept. Under `train.reward_errors: skip` also `reward/failed`, and rows that failed are
        in no mean.
      score: What `save_best` compares: `reward/mean`, else `metrics/reward`, else None; of the first value of a sweep,
        which is what rollouts use.
      columns: Of the table.
      rows: One a prompt (and sweep value): prompt, output, reward, per-sample metrics.
    """

    metrics: dict[str, float]
    score: float | None
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a policy on a fixed prompt set.

    Attributes:
      complete: Samples and decodes.
      prompts: The evaluation prompts.
      tokenizer: Handed to the user's metrics.
      settings: How to sample.
      sweep: (name, values) of the generation argument that every evaluation runs through, or None.
      rewards: The user's reward function, or None.
      metric_fn: The user's metrics, or None.
      label: Names this evaluation in the file that keeps completions whose reward failed.
    """

    complete: Completer
    prompts: PromptSet
    tokenizer: Any
    settings: GenerationSettings
    sweep: Sweep | None
    rewards: RewardCall | None
    metric_fn: Callable[..., Any] | None
    label: str

    def __call__(self, params: Params, frozen: Frozen, key: PRNGKey) -> Evaluation:
        """Runs every sweep value over every prompt; row i of the set always samples with key i."""
        name, values = self.sweep or (None, (None,))
        everything = np.arange(len(self.prompts))
        metrics: dict[str, float] = {}
        columns: list[str] = []
        rows: list[list[Any]] = []
        scores_of_values: list[float | None] = []
        for value in values:
            settings = replace(self.settings, **{name: value}) if name else self.settings
            texts = self.complete(params, frozen, self.prompts, everything, settings, key)
            scores, columns_of_samples, found = self._judge(texts, self.prompts.metadata(everything))
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
        return Evaluation(metrics, scores_of_values[0], columns, rows)

    def _judge(
        self, texts: Texts, metadata: Mapping[str, list[Any]]
    ) -> tuple[list[float] | None, dict[str, list[float]], dict[str, float]]:
        """Rewards and metrics of the samples: (rewards, per-sample columns, means)."""
        means: dict[str, float] = {}
        scores: list[float] | None = None
        if self.rewards is not None:
            rewards = self.rewards(texts, metadata, label=self.label)
            scores = [float(np.sum(reward)) for reward in rewards]
            means["reward/mean"] = _mean_of_known(scores)
            if self.rewards.skip_errors:
                means["reward/failed"] = float(np.sum(np.isnan(scores)))
        columns: dict[str, list[float]] = {}
        if self.metric_fn is not None:
            found = call_metric_fn(self.metric_fn, texts, tokenizer=self.tokenizer, metadata=metadata)
            for name, value in found.items():
                means[f"metrics/{name}"] = _mean_of_known(value if isinstance(value, list) else [value])
                if isinstance(value, list):
                    columns[name] = value
        return scores, columns, means


def _mean_of_known(values: Sequence[float]) -> float:
    """Mean of the entries that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
