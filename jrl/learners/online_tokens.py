# SPDX-License-Identifier: Apache-2.0
"""Figures of single tokens of a few rollouts: log-probability, KL, value, advantage."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.learners.credit import ScoreMoments
from jrl.learners.recipe import Recipe
from jrl.ops.alignment import window_targets
from jrl.typing import Rollouts


class TokenFigures(NamedTuple):
    """Completions and their figures at the actions, as they are before the first optimizer step on them.

    Attributes:
      prompt: Ids of the whole row, or what an encoder reads.
      prompt_mask: True on the prompt's.
      reward: The user's, of the whole completion.
      tokens: Ids of the completion window.
      mask: True on the policy's actions. Elsewhere no figure means anything.
      logprobs: log π of the actions, in nats.
      advantages: As the loss reads them; NaN in a row that it leaves out.
      kl: log π − log π_ref, or the KL of whole distributions where the recipe computes it; None without a reference.
      values: Of the state before each action; None without a critic.
    """

    prompt: Int[Array, "K L"]
    prompt_mask: Bool[Array, "K L"]
    reward: Float[Array, "K"]
    tokens: Int[Array, "K T"]
    mask: Bool[Array, "K T"]
    logprobs: Float[Array, "K T"]
    advantages: Float[Array, "K T"]
    kl: Float[Array, "K T"] | None
    values: Float[Array, "K T"] | None


def token_figures(
    recipe: Recipe,
    moments: ScoreMoments,
    kl_coef: Float[Array, ""],
    rollouts: Rollouts,
    *,
    num_rows: int,
) -> TokenFigures:
    """Figures of the first rows; the credit is given to all of them, as the update does.

    Args:
      recipe: The algorithm.
      moments: Of the scores, before the update.
      kl_coef: Weight of the KL penalty, likewise.
      rollouts: All of an iteration.
      num_rows: Rows to return.
    """
    kept = recipe.selected(rollouts)
    rewards, _ = recipe.scaled_rewards(kept, moments)
    targets = recipe.targets(
        rewards, kept.scored, kept.sequences.mask, kl_coef, kept.groups, kept.sampler_logprobs
    )
    sequences, scored = rollouts.sequences, rollouts.scored
    tokens = sequences.inputs.tokens
    prompt, prompt_mask = sequences.inputs.context_tokens, sequences.inputs.context_mask
    if prompt is None:
        before = jnp.arange(tokens.shape[1])[None, :] <= sequences.starts[:, None]
        prompt, prompt_mask = tokens, before & sequences.inputs.attention_mask
    kl = scored.full_kl
    if kl is None and scored.ref_logprobs is not None:
        kl = scored.logprobs - scored.ref_logprobs
    assert prompt_mask is not None, "of every context"
    found = TokenFigures(
        prompt=prompt,
        prompt_mask=prompt_mask,
        reward=jnp.sum(rollouts.rewards, axis=1, where=sequences.mask),
        tokens=window_targets(tokens, sequences.starts, width=sequences.mask.shape[1]),
        mask=sequences.mask,
        logprobs=scored.logprobs,
        advantages=jnp.where(kept.sequences.mask, targets.advantages, jnp.nan),
        kl=kl,
        values=scored.values,
    )
    first: TokenFigures = jax.tree.map(lambda part: part[:num_rows], found)
    return first
