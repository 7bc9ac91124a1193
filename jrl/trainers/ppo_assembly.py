# SPDX-License-Identifier: Apache-2.0
"""From the chunks of a collection to the batch that PPO learns from: the device part."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops.alignment import length_mask
from jrl.ops.rewards import missing_eos_penalty, place_scores
from jrl.rollout.health import sampler_agreement
from jrl.typing import Metrics, PPOBatch, Scored, Sequences


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
