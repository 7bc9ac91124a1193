# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one PPO iteration: the device samples and scores while the host decodes and calls the reward function.

Chunks overlap: while the user's reward function works on chunk i, the device scores chunk i and samples chunk i + 1.
The host waits only for sampled ids. What is random depends on `(key, row)` alone, never on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data.prompts import PromptBatch, PromptSet
from jrl.ops.alignment import join, length_mask
from jrl.ops.rewards import missing_eos_penalty, place_scores
from jrl.rollout.health import sampler_agreement
from jrl.rollout.rewards import RewardError, to_score_matrix
from jrl.rollout.score import make_score
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.generation import GenerationSettings, Sampler
from jrl.trainers.placing import place_rows
from jrl.trainers.reward_calls import RewardCall
from jrl.trainers.timing import Stopwatch
from jrl.typing import (
    Completions,
    Frozen,
    Metrics,
    ModelInputs,
    Params,
    PolicyFns,
    PPOBatch,
    PRNGKey,
    Scored,
    Sequences,
)


@dataclass(frozen=True)
class Chunk:
    """Rollouts of one sampling call, on the device.

    Attributes:
      batch: The prompts, host side.
      count: Rows that are real; the others fill the call up.
      completions: What was sampled.
      sequences: Prompts and completions, right-padded.
      scored: Log-probabilities and values.
    """

    batch: PromptBatch
    count: int
    completions: Completions
    sequences: Sequences
    scored: Scored


@dataclass(frozen=True)
class Experience:
    """What one iteration collected.

    Attributes:
      batch: For the learner.
      metrics: Host-side figures of the rollouts.
      agreement: How well sampler and learner agree; still on the device.
      rows: One dict a rollout, for the samples' log: prompt, output, reward, tokens.
    """

    batch: PPOBatch
    metrics: dict[str, float]
    agreement: Metrics
    rows: list[dict[str, Any]]


class Collector:
    """Collects `num_rollouts` rollouts an iteration, `chunk_size` a sampling call.

    Args:
      policy: The model.
      sampler: Compiled samplers.
      prompts: Training prompts, in an order that is a pure function of (seed, index).
      tokenizer: Decodes.
      settings: How to sample.
      stop_sequences: Texts that end a completion.
      rewards: The user's reward function.
      mesh: Where rows go.
      num_rollouts: Rollouts an iteration, global.
      chunk_size: Rows a sampling call, global.
      logprob_chunk_bytes: Largest logits array of the scoring pass.
      missing_eos_penalty: Subtracted from the score of a completion that `max_new_tokens` cut; None: nothing.
      with_full_kl: Whether the scoring pass compares whole distributions with the reference's.
    """

    def __init__(
        self,
        policy: PolicyFns,
        sampler: Sampler,
        prompts: PromptSet,
        tokenizer: Any,
        settings: GenerationSettings,
        *,
        stop_sequences: Sequence[str],
        rewards: RewardCall,
        mesh: jax.sharding.Mesh,
        num_rollouts: int,
        chunk_size: int,
        logprob_chunk_bytes: int,
        missing_eos_penalty: float | None,
        with_full_kl: bool = False,
    ) -> None:
        self._sampler, self._prompts, self._tokenizer, self._settings = sampler, prompts, tokenizer, settings
        self._stop_sequences, self._rewards, self._mesh = stop_sequences, rewards, mesh
        self._num_rollouts, self._chunk_size = num_rollouts, min(chunk_size, num_rollouts)
        self._missing_eos_penalty = missing_eos_penalty
        score = make_score(policy, logprob_chunk_bytes=logprob_chunk_bytes, with_full_kl=with_full_kl)

        def join_and_score(
            params: Params,
            frozen: Frozen,
            ref_params: Params,
            inputs: ModelInputs,
            completions: Completions,
            temperature: jax.Array,
        ) -> tuple[Sequences, Scored]:
            sequences = join(inputs, completions, pad_token_id=settings.pad_token_id)
            return sequences, score(params, frozen, ref_params, sequences, temperature)

        self._join_and_score = jax.jit(join_and_score)
        self._assemble = jax.jit(assemble, static_argnames=("counts", "pad_token_id", "eos_penalty"))

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params,
        iteration: int,
        key: PRNGKey,
        *,
        while_sampling: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> Experience:
        """Samples, scores and rewards the rollouts of an iteration.

        Args:
          params: Of the policy.
          frozen: Shared by policy and reference.
          ref_params: Of the reference.
          iteration: Decides which prompts come, whatever happened before.
          key: Of this iteration's samples.
          while_sampling: Called once the first sampling call is on its way: the host is free then.
          stopwatch: Receives `rollout` (waiting for samples) and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the rollouts are on disk by then.
        """
        numbers = np.arange(self._num_rollouts)
        indices = numbers + iteration * self._num_rollouts
        width = self._prompts.width(self._prompts.order(indices))
        starts = range(0, self._num_rollouts, self._chunk_size)
        ahead = self._dispatch(params, frozen, ref_params, indices, starts[0], width, key)
        while_sampling()
        chunks, texts, scores = [], [], []
        for number, start in enumerate(starts):
            chunk = ahead
            with stopwatch("rollout"):
                tokens, lengths = jax.device_get((chunk.completions.tokens, chunk.completions.lengths))
            if number + 1 < len(starts):
                ahead = self._dispatch(params, frozen, ref_params, indices, starts[number + 1], width, key)
            with stopwatch("decode"):
                text = decode_rows(
                    self._tokenizer,
                    chunk.batch.token_lists[: chunk.count],
                    tokens[: chunk.count],
                    lengths[: chunk.count],
                    eos_token_ids=self._settings.eos_token_id,
                    stop_sequences=self._stop_sequences,
                    separator=self._prompts.separator,
                )
            with stopwatch("reward"):
                scores.append(self._reward(text, chunk, iteration, start))
            chunks.append(chunk)
            texts.append(text)
        return self._experience(chunks, Texts.concatenate(texts), np.concatenate(scores))

    def _dispatch(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params,
        indices: np.ndarray,
        start: int,
        width: int,
        key: PRNGKey,
    ) -> Chunk:
        """Sends one chunk's sampling and scoring to the device; waits for nothing."""
        rows = np.arange(start, start + self._chunk_size)
        count = int(np.sum(rows < len(indices)))
        rows = np.minimum(
            rows, len(indices) - 1
        )  # a short last chunk repeats its last row: same program, row dropped
        batch = self._prompts.rows(self._prompts.order(indices[rows]), width=width)
        inputs = place_rows(self._mesh, batch.inputs)
        completions = self._sampler(params, frozen, inputs, rows, self._settings, key)
        sequences, scored = self._join_and_score(
            params, frozen, ref_params, inputs, completions, jnp.float32(self._settings.temperature)
        )
        return Chunk(batch, count, completions, sequences, scored)

    def _reward(self, texts: Texts, chunk: Chunk, iteration: int, start: int) -> np.ndarray:
        """Scores of a chunk, (count, T); rows that failed under "skip" are NaN."""
        metadata = {name: column[: chunk.count] for name, column in chunk.batch.metadata.items()}
        rewards = self._rewards(texts, metadata, label=f"iteration_{iteration:06d}_row_{start:06d}")
        return to_score_matrix(rewards, texts.lengths, width=self._settings.max_new_tokens)

    def _experience(self, chunks: list[Chunk], texts: Texts, scores: np.ndarray) -> Experience:
        failed = np.isnan(scores).any(axis=1)
        if failed.all():
            raise RewardError(
                "`reward_fn` failed on every rollout of the iteration, so `reward_errors: skip` leaves nothing "
                "to learn from. Is the service it calls down?"
            )
        terminated = np.concatenate([np.asarray(c.completions.terminated)[: c.count] for c in chunks])
        ended = terminated | texts.stopped
        batch, agreement = self._assemble(
            [(chunk.sequences, chunk.scored, chunk.completions.logprobs) for chunk in chunks],
            jnp.asarray(np.where(failed[:, None], 0.0, scores), jnp.float32),
            jnp.asarray(np.where(failed, 0, texts.lengths), jnp.int32),
            jnp.asarray(ended),
            counts=tuple(chunk.count for chunk in chunks),
            pad_token_id=self._settings.pad_token_id,
            eos_penalty=self._missing_eos_penalty,
        )
        metrics = {
            "completion/truncated_fraction": float(np.mean(~ended)),
            "completion/tokens": float(np.sum(texts.lengths)),
            "reward/failed": float(np.sum(failed)),
        }
        rows = [
            {
                "prompt": texts.prompts[row],
                "output": texts.outputs[row],
                "reward": None if failed[row] else float(math.fsum(scores[row])),
                "output_tokens": [int(token) for token in texts.output_tokens[row]],
            }
            for row in range(len(texts.outputs))
        ]
        return Experience(batch, metrics, agreement, rows)


def assemble(
    chunks: list[tuple[Sequences, Scored, jax.Array]],
    scores: jax.Array,
    lengths: jax.Array,
    ended: jax.Array,
    *,
    counts: tuple[int, ...],
    pad_token_id: int,
    eos_penalty: float | None,
) -> tuple[PPOBatch, Metrics]:
    """Chunks as one batch of exactly the real rollouts, cut to what the reward function saw.

    Reward, mask and stored ids all use the same end: a stop string found on the host shortens the row here.

    Args:
      chunks: Rows, their scores under policy and reference, and the sampler's own log-probabilities.
      scores: Rewards per token (N T).
      lengths: Completion lengths after stop strings, (N,); 0 leaves a row out of everything.
      ended: False where the length limit cut the row, (N,).
      counts: Real rows of each chunk.
      pad_token_id: Replaces what is cut off.
      eos_penalty: Subtracted from the last action's score where the row did not end; None: nothing.
    Returns:
      The batch, and how well sampler and learner agree.
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
        penalties = missing_eos_penalty(jnp.zeros_like(scores[:, 0]), ended, penalty=eos_penalty)
        scores = scores + place_scores(penalties, mask)
    batch = PPOBatch(Sequences(inputs, rows.starts, mask), scored, scores)
    return batch, sampler_agreement(scored.logprobs, sampler_logprobs, mask)
