# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sample on the evaluation prompts, score, and show a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jrl.data.prompts import PromptSet
from jrl.rollout.rewards import call_metric_fn, call_reward_fn
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.generation import GenerationSettings, Sampler
from jrl.trainers.setup import place_rows
from jrl.typing import Frozen, Params, PRNGKey


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
      metrics: `reward/mean`, `metrics/<name>` and `completion/length_mean`, each with the suffix `@name=value` where a
        generation argument is swept.
      columns: Of the table.
      rows: One a prompt (and sweep value): prompt, output, reward, per-sample metrics.
    """

    metrics: dict[str, float]
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a policy on a fixed prompt set.

    Attributes:
      sampler: Compiled samplers, shared with the rollouts.
      prompts: The evaluation prompts.
      tokenizer: Decodes.
      settings: How to sample.
      sweep: (name, values) of the generation argument that every evaluation runs through, or None.
      chunk_size: Rows a sampling call.
      stop_sequences: Texts that end a completion.
      reward_fn: The user's reward, or None.
      metric_fn: The user's metrics, or None.
    """

    sampler: Sampler
    prompts: PromptSet
    tokenizer: Any
    settings: GenerationSettings
    sweep: tuple[str, tuple[Any, ...]] | None
    chunk_size: int
    stop_sequences: Sequence[str]
    reward_fn: Callable[..., Any] | None
    metric_fn: Callable[..., Any] | None

    def __call__(self, params: Params, frozen: Frozen, mesh: jax.sharding.Mesh, key: PRNGKey) -> Evaluation:
        """Runs every sweep value over every prompt; row i of the set always samples with key i."""
        name, values = self.sweep or (None, (None,))
        metrics: dict[str, float] = {}
        columns: list[str] = []
        rows: list[list[Any]] = []
        for value in values:
            settings = replace(self.settings, **{name: value}) if name else self.settings
            texts, metadata = self._sample(params, frozen, mesh, settings, key)
            scores, columns_of_samples, found = self._judge(texts, metadata)
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
        return Evaluation(metrics, columns, rows)

    def _sample(
        self,
        params: Params,
        frozen: Frozen,
        mesh: jax.sharding.Mesh,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> tuple[Texts, Mapping[str, list[Any]]]:
        """Samples the whole set chunk by chunk; all chunks are dispatched before the first is decoded."""
        total = len(self.prompts)
        chunk_size = min(self.chunk_size, total)
        everything = np.arange(total)
        width = self.prompts.width(everything)
        pending = []
        for start in range(0, total, chunk_size):
            indices = (
                np.arange(start, start + chunk_size) % total
            )  # the last chunk wraps; surplus rows are dropped
            batch = self.prompts.rows(indices, width=width)
            inputs = place_rows(mesh, batch.inputs)
            pending.append((batch, self.sampler(params, frozen, inputs, indices, settings, key)))
        parts = []
        for start, (batch, completions) in zip(range(0, total, chunk_size), pending, strict=True):
            count = min(chunk_size, total - start)
            tokens, lengths = jax.device_get((completions.tokens, completions.lengths))
            parts.append(
                decode_rows(
                    self.tokenizer,
                    batch.token_lists[:count],
                    tokens[:count],
                    lengths[:count],
                    eos_token_ids=settings.eos_token_id,
                    stop_sequences=self.stop_sequences,
                )
            )
        return Texts.concatenate(parts), self.prompts.metadata(everything)

    def _judge(
        self, texts: Texts, metadata: Mapping[str, list[Any]]
    ) -> tuple[list[float] | None, dict[str, list[float]], dict[str, float]]:
        """Rewards and metrics of the samples: (rewards, per-sample columns, means)."""
        means: dict[str, float] = {}
        scores: list[float] | None = None
        if self.reward_fn is not None:
            rewards = call_reward_fn(self.reward_fn, texts, tokenizer=self.tokenizer, metadata=metadata)
            scores = [float(np.sum(reward)) for reward in rewards]
            means["reward/mean"] = float(np.mean(scores))
        columns: dict[str, list[float]] = {}
        if self.metric_fn is not None:
            found = call_metric_fn(self.metric_fn, texts, tokenizer=self.tokenizer, metadata=metadata)
            for name, value in found.items():
                means[f"metrics/{name}"] = float(np.mean(value))
                if isinstance(value, list):
                    columns[name] = value
        return scores, columns, means
