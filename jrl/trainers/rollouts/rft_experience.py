# SPDX-License-Identifier: Apache-2.0
"""A round of rejection fine-tuning: every prompt is sampled many times, scored, and the best are kept.

While the user's reward function works on one chunk, the device samples the next. What is random depends on the key and
on the number of a row, prompt · samples per prompt + sample, never on the order of arrival.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.data.prompts import PromptSet
from jrl.data.selection import KeptSamples, select
from jrl.rollout.collect import Collector
from jrl.rollout.reward_columns import RewardColumns, mean_and_std
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.text import Texts, sample_rows, variety
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.typing import Frozen, Params, PRNGKey


@dataclass(frozen=True)
class Round:
    """Samples that a round of sampling collected.

    Attributes:
      kept: What there is to learn from; None where the reward function failed on every sample.
      metrics: Host-side figures of all samples.
      rows: One dict a sample, for the samples' log: prompt, output, reward, passes that learn from it, tokens.
    """

    kept: KeptSamples | None
    metrics: dict[str, float]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class RoundCollector:
    """Samples, scores and selects.

    Attributes:
      collect: Samples, decodes and judges.
      prompts: Training prompts.
      groups: Number of each of them among those that differ in their ids: the policy cannot tell the others apart, so
        they share their samples.
      settings: How to sample.
      num_samples_per_prompt: Samples of each prompt.
      percentiles: Of the improve steps.
      max_samples_per_prompt: Most that are kept of each; None: no limit.
    """

    collect: Collector
    prompts: PromptSet
    groups: np.ndarray
    settings: GenerationSettings
    num_samples_per_prompt: int
    percentiles: np.ndarray
    max_samples_per_prompt: int | None

    def __call__(
        self, params: Params, frozen: Frozen, number: int, key: PRNGKey, *, stopwatch: Stopwatch
    ) -> Round:
        """Samples, rewards and selects a round.

        Args:
          params: Of the policy.
          frozen: The rest.
          number: Of the round; names the file that keeps what the reward function failed on.
          key: Of this round's samples.
          stopwatch: Receives `rollout` (waiting for samples), `decode` and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the samples are on disk by then.
        """
        indices = np.repeat(np.arange(len(self.prompts)), self.num_samples_per_prompt)
        found = self.collect(
            params,
            frozen,
            self.prompts,
            indices,
            self.settings,
            key,
            label=f"round_{number:06d}",
            clock=stopwatch,
        )
        assert found.rewards is not None and found.columns is not None, "there is a reward function"
        return self._select(found.texts, self.groups[indices], found.rewards, found.columns)

    def _select(self, texts: Texts, groups: np.ndarray, scores: np.ndarray, columns: RewardColumns) -> Round:
        kept = select(
            groups,
            texts.output_tokens,
            scores,
            self.percentiles,
            num_groups=int(self.groups.max()) + 1,
            max_samples_per_prompt=self.max_samples_per_prompt,
        )
        passes = np.zeros(len(scores), np.int64)
        if kept is not None:
            passes[kept.indices] = kept.num_passes
        known = [None if math.isnan(score) else score for score in scores]
        rows = sample_rows(texts, known, **columns.cells(), passes=passes.tolist())
        return Round(kept, self._metrics(texts, scores) | columns.metrics(), rows)

    def _metrics(self, texts: Texts, scores: np.ndarray) -> dict[str, float]:
        known = scores[~np.isnan(scores)]
        means = {}
        if len(known):
            means["reward/mean"], means["reward/std"] = mean_and_std(known)
        return means | {
            "reward/failed": float(len(scores) - len(known)),
            "reward/failed_fraction": (len(scores) - len(known)) / len(scores),
            "completion/length_mean": float(np.mean(texts.lengths)),
            "completion/truncated_fraction": float(np.mean(~texts.ended(self.settings.eos_token_id))),
            "completion/tokens": float(np.sum(texts.lengths)),
            **variety(texts, self.settings.eos_token_id),
        }
