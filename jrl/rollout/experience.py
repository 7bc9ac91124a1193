# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one iteration of an online algorithm: sampled, scored, judged, and brought together for the learner.

The device samples and scores while the host decodes and calls the reward function (`jrl.rollout.collect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.prompts import PromptSet
from jrl.mesh import replicated
from jrl.ops.alignment import join, length_mask
from jrl.ops.rewards import missing_eos_penalty, place_scores
from jrl.placement import rows_sharding
from jrl.rollout.collect import Clock, Collected, Collector
from jrl.rollout.gathering import totals
from jrl.rollout.generate import repeat_rows
from jrl.rollout.health import sampler_agreement
from jrl.rollout.rewards import RewardError, to_reward_matrix
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.score import make_score
from jrl.rollout.text import Texts, variety
from jrl.typing import (
    Completions,
    Frozen,
    Metrics,
    ModelInputs,
    Params,
    PolicyFns,
    PRNGKey,
    Rollouts,
    Scored,
    Sequences,
)


@dataclass(frozen=True)
class Experience:
    """Result of collecting an iteration's rollouts.

    Attributes:
      rollouts: For the learner.
      metrics: Host-side figures of the rollouts.
      agreement: How well sampler and learner agree; still on the device.
      rows: One dict a rollout, for the samples' log: prompt, output, reward, tokens; all of them in every process.
    """

    rollouts: Rollouts
    metrics: dict[str, float]
    agreement: Metrics
    rows: list[dict[str, Any]]


class ExperienceCollector:
    """Collects `num_rollouts` rollouts an iteration, a sampling call at a time.

    Args:
      policy: The model.
      collector: Samples and judges; its `as_array` is not read.
      prompts: Training prompts, in an order that is a pure function of (seed, index).
      settings: How to sample.
      num_rollouts: Rollouts an iteration, global.
      logprob_chunk_bytes: Largest logits array of the scoring pass.
      num_generations: Samples of each prompt; must divide `num_rollouts` and the rows of a call.
      missing_eos_penalty: Subtracted from the score of a completion that `max_new_tokens` cut; None: nothing.
      with_full_kl: Whether the scoring pass compares whole distributions with the reference's.
      with_greedy: Whether each prompt is completed greedily, too, for its score alone.
      by_function: Whether the learner gets the scores of each reward function, beside their weighted sum.
    """

    def __init__(
        self,
        policy: PolicyFns,
        collector: Collector,
        prompts: PromptSet,
        settings: GenerationSettings,
        *,
        num_rollouts: int,
        num_generations: int = 1,
        logprob_chunk_bytes: int,
        missing_eos_penalty: float | None,
        with_full_kl: bool = False,
        with_greedy: bool = False,
        by_function: bool = False,
    ) -> None:
        chunk_size = min(collector.chunk_size, num_rollouts)
        # One call ahead: behind it, scoring keeps the device busy.
        self._collect = replace(
            collector,
            chunk_size=chunk_size,
            as_array=self._as_matrix,
            num_generations=num_generations,
            ahead=1,
        )
        self._num_generations = num_generations
        self._complete_greedily = (
            replace(collector, chunk_size=chunk_size, as_array=totals) if with_greedy else None
        )
        self._prompts, self._settings, self._by_function = prompts, settings, by_function
        self._num_rollouts, self._missing_eos_penalty = num_rollouts, missing_eos_penalty
        score = make_score(policy, logprob_chunk_bytes=logprob_chunk_bytes, with_full_kl=with_full_kl)

        def join_and_score(
            params: Params,
            frozen: Frozen,
            ref_params: Params | None,
            inputs: ModelInputs,
            completions: Completions,
            temperature: jax.Array,
        ) -> tuple[Sequences, Scored]:
            rows = repeat_rows(inputs, num_generations)
            sequences = join(rows, completions, pad_token_id=settings.pad_token_id)
            return sequences, score(params, frozen, ref_params, sequences, temperature)

        mesh = collector.mesh
        self._join_and_score = jax.jit(
            join_and_score, out_shardings=rows_sharding(mesh, chunk_size), compiler_options=COMPILER_OPTIONS
        )
        self._assemble = jax.jit(
            assemble,
            static_argnames=("counts", "pad_token_id", "eos_penalty"),
            out_shardings=(rows_sharding(mesh, num_rollouts), replicated(mesh)),
        )

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params | None,
        iteration: int,
        key: PRNGKey,
        *,
        while_sampling: Callable[[], None],
        stopwatch: Clock,
    ) -> Experience:
        """Samples, scores and rewards the rollouts of an iteration.

        Args:
          params: Of the policy.
          frozen: Shared by policy and reference.
          ref_params: Of the reference; None: the algorithm has none.
          iteration: Decides which prompts come, whatever happened before.
          key: Of this iteration's samples.
          while_sampling: Called once the first sampling call is on its way: the host is free then.
          stopwatch: Receives `rollout` (waiting for samples), `decode` and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the rollouts are on disk by then.
        """

        def follow(inputs: ModelInputs, completions: Completions) -> tuple[Sequences, Scored]:
            temperature = jnp.float32(self._settings.temperature)
            return self._join_and_score(params, frozen, ref_params, inputs, completions, temperature)

        numbers = np.arange(self._num_rollouts) + iteration * self._num_rollouts
        prompts = self._prompts.order(numbers // self._num_generations)
        collected = self._collect(
            params,
            frozen,
            self._prompts,
            prompts,
            self._settings,
            key,
            label=f"iteration_{iteration:06d}",
            follow=follow,
            meanwhile=while_sampling,
            clock=stopwatch,
        )
        greedy = None
        if self._complete_greedily is not None:
            found = self._complete_greedily(
                params,
                frozen,
                self._prompts,
                prompts[:: self._num_generations],
                replace(self._settings, do_sample=False),
                key,
                label=f"iteration_{iteration:06d}_greedy",
                clock=stopwatch,
            )
            assert found.rewards is not None, "there is a reward function"
            cut = ~found.texts.ended(self._settings.eos_token_id)
            greedy = np.repeat(
                found.rewards - cut * (self._missing_eos_penalty or 0.0), self._num_generations
            )
        return self._experience(collected, greedy)

    def _as_matrix(self, rewards: Sequence[float | np.ndarray], texts: Texts) -> np.ndarray:
        """Rewards placed on the actions that earned them, (rows, T); rows that failed under "skip" are NaN."""
        return to_reward_matrix(rewards, texts.lengths, width=self._settings.max_new_tokens)

    def _experience(self, collected: Collected, greedy: np.ndarray | None) -> Experience:
        texts, rewards, columns = collected.texts, collected.rewards, collected.columns
        assert rewards is not None and columns is not None, "there is a reward function"
        failed = np.isnan(rewards).any(axis=1)
        if greedy is not None:  # a prompt without a baseline teaches nothing
            failed |= np.isnan(greedy)
            greedy = np.where(failed, 0.0, greedy).astype(np.float32)
        if failed.all():
            raise RewardError(
                "No rollout of the iteration has a reward, so there is nothing to learn from: `reward_fn` failed on "
                "each (`reward_errors: skip`) or answered None (not applicable). Is a service it calls down? Give a "
                "reward function that applies to every prompt."
            )
        ended = texts.ended(self._settings.eos_token_id)
        rollouts, agreement = self._assemble(
            [(*call.followed, call.completions.logprobs) for call in collected.calls],
            np.where(failed[:, None], 0.0, rewards).astype(np.float32),
            np.where(failed, 0, texts.lengths).astype(np.int32),
            ended,
            None if self._num_generations == 1 else np.arange(self._num_rollouts) // self._num_generations,
            greedy,
            columns.scores.astype(np.float32) if self._by_function else None,
            counts=tuple(call.count for call in collected.calls),
            pad_token_id=self._settings.pad_token_id,
            eos_penalty=self._missing_eos_penalty,
        )
        metrics = {
            "completion/truncated_fraction": float(np.mean(~ended)),
            "completion/tokens": float(np.sum(texts.lengths)),
            **variety(texts, self._settings.eos_token_id),
            "reward/failed": float(np.sum(failed)),
            **columns.metrics(),
        }
        scores = [None if lost else math.fsum(row) for lost, row in zip(failed, rewards, strict=True)]
        return Experience(rollouts, metrics, agreement, sample_rows(texts, scores, **columns.cells()))


def sample_rows(texts: Texts, scores: Sequence[float | None], **more: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of the samples' log, a dict for each sample: prompt, output, reward, further columns, tokens.

    Args:
      texts: What was written.
      scores: One a sample; None where the reward function failed.
      **more: Further columns by name.
    """
    return [
        {
            "prompt": texts.prompts[row],
            "output": texts.outputs[row],
            "reward": score if score is None else float(score),
            **{name: column[row] for name, column in more.items()},
            "output_tokens": [int(token) for token in texts.output_tokens[row]],
        }
        for row, score in enumerate(scores)
    ]


def assemble(
    chunks: list[tuple[Sequences, Scored, jax.Array]],
    rewards: jax.Array,
    lengths: jax.Array,
    ended: jax.Array,
    groups: jax.Array | None = None,
    greedy_scores: jax.Array | None = None,
    scores_by_function: jax.Array | None = None,
    *,
    counts: tuple[int, ...],
    pad_token_id: int,
    eos_penalty: float | None,
) -> tuple[Rollouts, Metrics]:
    """Sampling calls as one batch of exactly the real rollouts, cut to what the reward function saw.

    Reward, mask and stored ids all use the same end: a stop string found on the host shortens the row here.

    Args:
      chunks: Rows, their scores under policy and reference, and the sampler's own log-probabilities.
      rewards: Of the actions (N T).
      lengths: Completion lengths after stop strings, (N,); 0 leaves a row out of everything.
      ended: False where the length limit cut the row, (N,).
      groups: As in `Rollouts`, (N,).
      greedy_scores: As in `Rollouts`, (N,).
      scores_by_function: As in `Rollouts`, (N, F).
      counts: Real rows of each call.
      pad_token_id: Replaces what is cut off.
      eos_penalty: Subtracted from the last action's reward where the row did not end; None: nothing.
    Returns:
      The rollouts, and how well sampler and learner agree.
    """

    def stack(*parts: jax.Array) -> jax.Array:
        return jnp.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])

    rows, scored, sampler_logprobs = jax.tree.map(stack, *chunks)
    mask = rows.mask & length_mask(lengths, width=rows.mask.shape[1])
    real = rows.inputs.attention_mask & length_mask(
        rows.starts + 1 + lengths, width=rows.inputs.tokens.shape[1]
    )
    inputs = rows.inputs._replace(
        tokens=jnp.where(real, rows.inputs.tokens, pad_token_id), attention_mask=real
    )
    if eos_penalty:
        penalties = missing_eos_penalty(jnp.zeros_like(rewards[:, 0]), ended, penalty=eos_penalty)
        rewards = rewards + place_scores(penalties, mask)
    sequences = Sequences(inputs, rows.starts, mask)
    rollouts = Rollouts(
        sequences, scored, rewards, sampler_logprobs, groups, greedy_scores, scores_by_function
    )
    return rollouts, sampler_agreement(scored.logprobs, sampler_logprobs, mask)
