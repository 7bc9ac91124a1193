# SPDX-License-Identifier: Apache-2.0
"""Rows of several sampling calls become one batch of rollouts, with the rewards and ends that the host found."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops.alignment import length_mask
from jrl.ops.rewards import missing_eos_penalty, overlong_penalty, place_scores
from jrl.ops.sampler_agreement import sampler_agreement
from jrl.typing import Metrics, Rollouts, Scored, Sequences

Chunk = tuple[Sequences, Scored, jax.Array]
"""Rows, their scores under policy and reference, and the sampler's own log-probabilities."""


def hold_rows(chunk: Chunk, *, num_rows: int) -> Chunk:
    """Room for the rows of a batch: until something is put there, each is the chunk's first.

    Real prompts, and not zeros: attention over no token at all is no number.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (num_rows, *x.shape[1:])), chunk)


def put_rows(held: Chunk, chunk: Chunk, places: jax.Array) -> Chunk:
    """Rows of a chunk at their places in a batch; those with a place behind its end are dropped."""
    return jax.tree.map(lambda x, rows: x.at[places].set(rows, mode="drop"), held, chunk)


class Overlong(NamedTuple):
    """Penalty for length: as in `jrl.ops.overlong_penalty`.

    Attributes:
      max_length: From which on it is whole.
      buffer_length: Tokens over which it grows.
      size: Of the whole, in units of the score.
    """

    max_length: int
    buffer_length: int
    size: float


def assemble(
    chunks: list[Chunk],
    rewards: jax.Array,
    lengths: jax.Array,
    ended: jax.Array,
    groups: jax.Array | None = None,
    greedy_scores: jax.Array | None = None,
    scores_by_function: jax.Array | None = None,
    kept: jax.Array | None = None,
    *,
    counts: tuple[int, ...],
    pad_token_id: int,
    eos_penalty: float | None,
    overlong: Overlong | None = None,
    compare: bool = True,
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
      kept: As in `Rollouts`, (N,).
      counts: Real rows of each call.
      pad_token_id: Replaces what is cut off.
      eos_penalty: Subtracted from the last action's reward where the row did not end; None: nothing.
      overlong: Penalty for length, on the last action's reward; None: there is none.
      compare: Whether the scores are another pass's than the sampler's.
    Returns:
      The rollouts, and how well sampler and learner agree; nothing of that where there is nothing to compare.
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
    if overlong is not None:
        penalties = overlong_penalty(
            lengths, max_length=overlong.max_length, buffer_length=overlong.buffer_length
        )
        rewards = rewards + place_scores(overlong.size * penalties, mask)
    sequences = Sequences(inputs, rows.starts, mask)
    rollouts = Rollouts(
        sequences, scored, rewards, sampler_logprobs, groups, greedy_scores, scores_by_function, kept
    )
    return rollouts, sampler_agreement(scored.logprobs, sampler_logprobs, mask) if compare else {}
