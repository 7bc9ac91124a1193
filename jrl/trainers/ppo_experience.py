# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one PPO iteration: the device samples and scores while the host decodes and calls the reward function.

Chunks overlap: while the user's reward function works on chunk i, the device scores chunk i and samples chunk i + 1.
The host waits only for sampled ids. What is random depends on `(key, row)` alone, never on the order of arrival.

Of several processes each decodes and rewards the rows that lie on its devices; `sharing` brings them together.
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
from jrl.mesh import replicated
from jrl.ops.alignment import join
from jrl.rollout.rewards import RewardError, to_score_matrix
from jrl.rollout.score import make_score
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.generation import GenerationSettings, Sampler
from jrl.trainers.placing import local_rows, own_rows, place_rows, rows_sharding
from jrl.trainers.ppo_assembly import assemble
from jrl.trainers.reward_calls import RewardCall
from jrl.trainers.sharing import Judging, Part, to_main
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
      rows: One dict a rollout, for the samples' log: prompt, output, reward, tokens; all of them in every process.
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

        self._own_rows = own_rows(mesh, self._chunk_size)
        self._join_and_score = jax.jit(join_and_score, out_shardings=rows_sharding(mesh, self._chunk_size))
        self._assemble = jax.jit(
            assemble,
            static_argnames=("counts", "pad_token_id", "eos_penalty"),
            out_shardings=(rows_sharding(mesh, num_rollouts), replicated(mesh)),
        )

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
        chunks: list[Chunk] = []

        def dispatch_next() -> None:
            if len(chunks) < len(starts):
                start = starts[len(chunks)]
                chunks.append(self._dispatch(params, frozen, ref_params, indices, start, width, key))

        dispatch_next()
        while_sampling()
        judging = Judging(self._rewards, self._as_matrix)
        for number, start in enumerate(starts):
            chunk = chunks[number]
            rows = self._own_rows[self._own_rows < chunk.count]
            with stopwatch("rollout"):
                tokens = local_rows(chunk.completions.tokens, rows)
                lengths = local_rows(chunk.completions.lengths, rows)
            if not self._rewards.on_main:
                dispatch_next()
            with stopwatch("decode"):
                part = Part(start + rows, self._decode(chunk, rows, tokens, lengths))
                if self._rewards.on_main:
                    # Before the next chunk: what goes from host to host queues behind what was sent.
                    part = to_main(part)
                    dispatch_next()
            with stopwatch("reward"):
                metadata = self._metadata(chunk, part.numbers - start)
                judging.add(part, metadata, label=f"iteration_{iteration:06d}_row_{start:06d}")
        with stopwatch("reward"):
            texts, scores = judging.together()
        assert scores is not None, "there is a reward function"
        return self._experience(chunks, texts, scores)

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

    def _decode(self, chunk: Chunk, rows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> Texts:
        """Some rows of a chunk, whose sampled ids these are."""
        return decode_rows(
            self._tokenizer,
            [chunk.batch.token_lists[row] for row in rows],
            tokens,
            lengths,
            eos_token_ids=self._settings.eos_token_id,
            stop_sequences=self._stop_sequences,
            separator=self._prompts.separator,
        )

    def _metadata(self, chunk: Chunk, rows: np.ndarray) -> dict[str, list[Any]]:
        """One list a key, aligned with some rows of a chunk."""
        return {name: [column[row] for row in rows] for name, column in chunk.batch.metadata.items()}

    def _as_matrix(self, rewards: Sequence[float | np.ndarray], texts: Texts) -> np.ndarray:
        """Rewards placed on the actions that earned them, (rows, T); rows that failed under "skip" are NaN."""
        return to_score_matrix(rewards, texts.lengths, width=self._settings.max_new_tokens)

    def _experience(self, chunks: list[Chunk], texts: Texts, scores: np.ndarray) -> Experience:
        failed = np.isnan(scores).any(axis=1)
        if failed.all():
            raise RewardError(
                "`reward_fn` failed on every rollout of the iteration, so `reward_errors: skip` leaves nothing "
                "to learn from. Is the service it calls down?"
            )
        ended = texts.ended(self._settings.eos_token_id)
        batch, agreement = self._assemble(
            [(chunk.sequences, chunk.scored, chunk.completions.logprobs) for chunk in chunks],
            np.where(failed[:, None], 0.0, scores).astype(np.float32),
            np.where(failed, 0, texts.lengths).astype(np.int32),
            ended,
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
