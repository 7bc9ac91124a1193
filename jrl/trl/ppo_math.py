# SPDX-License-Identifier: Apache-2.0
"""The pieces of a PPO step under TRL's names, for scripts that compose it by hand: `jrl.ops` on whole rows.

Arrays are (B, L − 1): column t speaks of the token after column t. They may be traced, so `jax.grad` goes through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.learners.ppo_estimates import KL_PENALTIES
from jrl.ops.kl import kl_k1, kl_k2
from jrl.ops.logprobs import entropy_from_logits, kl_from_logits
from jrl.ops.masking import at_least_float32, masked_mean, masked_variance, whiten, zero_masked
from jrl.ops.policy_gradient import (
    clip_events,
    clipped_surrogate,
    clipped_value_loss,
    importance_ratio,
    value_clip_events,
)
from jrl.ops.returns import gae
from jrl.ops.rewards import place_scores
from jrl.trl.core import as_jax
from jrl.typing import Scored


class Ranges(NamedTuple):
    """Constants of the loss.

    Attributes:
      clip: ε of the ratio.
      value_clip: ε around the old value.
      value_coef: Weight of the value loss.
      ratio_threshold: Above this mean ratio a minibatch's losses are 0; None: never.
    """

    clip: float
    value_clip: float
    value_coef: float
    ratio_threshold: float | None


def kl_penalty(logprobs: Any, ref_logprobs: Any, kind: str) -> Float[Array, "B L"]:
    """Distance from the reference at every column.

    Args:
      logprobs: Of the tokens (B, L − 1); for "full" of the whole vocabulary (B, L − 1, V).
      ref_logprobs: The reference's.
      kind: "kl", "abs", "mse" or "full".
    """
    ours, theirs = at_least_float32(as_jax(logprobs)), at_least_float32(as_jax(ref_logprobs))
    if kind == "full":
        return kl_from_logits(ours, theirs)
    return KL_PENALTIES[kind](Scored(ours, theirs, ours))


def token_rewards(
    scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any, *, kl_coef: float, kind: str
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """(rewards, rewards without the scores, KL), each at every column, masked or not.

    Args:
      scores: One a row, or dense ones (B, L − 1).
      logprobs: See `kl_penalty`.
      ref_logprobs: The same.
      masks: Not 0 on actions; a row's score goes to the last of them.
      kl_coef: Weight of the penalty.
      kind: Of the penalty.
    """
    mask = as_jax(masks) != 0
    kl = kl_penalty(logprobs, ref_logprobs, kind)
    given = at_least_float32(as_jax(scores))
    placed = place_scores(given, mask) if given.ndim == 1 else zero_masked(given, mask)
    non_score = -kl_coef * kl
    return non_score + placed, non_score, kl


def advantages_and_returns(
    values: Any, rewards: Any, mask: Any, *, gamma: float, lam: float, whiten_rewards: bool
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """(values, whitened advantages, returns), all 0 where the mask is."""
    real = as_jax(mask) != 0
    old, earned = zero_masked(as_jax(values), real), zero_masked(as_jax(rewards), real)
    if whiten_rewards:
        earned = whiten(earned, real, shift_mean=False)
    raw = gae(earned, old, real, gamma=gamma, gae_lambda=lam)
    return old, whiten(raw, real), zero_masked(raw + old, real)


def minibatch_loss(
    old_logprobs: Any,
    values: Any,
    logits: Any,
    vpreds: Any,
    logprobs: Any,
    mask: Any,
    advantages: Any,
    returns: Any,
    ranges: Ranges,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
    """(policy loss, weighed value loss, statistics) of one minibatch; arguments as `PPOTrainer.loss`."""
    real = as_jax(mask) != 0
    old, old_values, new_values, new, earned, returned = (
        zero_masked(as_jax(x), real) for x in (old_logprobs, values, vpreds, logprobs, advantages, returns)
    )
    ratio = importance_ratio(new, old)
    kept = real
    if ranges.ratio_threshold is not None:
        kept = real & ~(masked_mean(ratio, real) > ranges.ratio_threshold)
    policy_loss = masked_mean(
        clipped_surrogate(zero_masked(new, kept), old, earned, clip_range=ranges.clip), kept
    )
    value_loss = masked_mean(
        clipped_value_loss(zero_masked(new_values, kept), old_values, returned, clip_range=ranges.value_clip),
        kept,
    )
    clipped = clip_events(new, old, earned, clip_range=ranges.clip)
    stats = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "loss/total": policy_loss + ranges.value_coef * value_loss,
        "policy/entropy": masked_mean(entropy_from_logits(as_jax(logits)), real),
        "policy/approxkl": masked_mean(kl_k2(old, new), real),
        "policy/policykl": masked_mean(kl_k1(old, new), real),
        "policy/clipfrac": masked_mean(clipped.high_positive | clipped.low_negative, real),
        "policy/advantages": earned,
        "policy/advantages_mean": masked_mean(earned, real),
        "policy/ratio": ratio,
        "returns/mean": masked_mean(returned, real),
        "returns/var": masked_variance(returned, real),
        "val/vpred": masked_mean(new_values, real),
        "val/error": masked_mean(jnp.square(new_values - returned), real),
        "val/clipfrac": masked_mean(
            value_clip_events(new_values, old_values, returned, clip_range=ranges.value_clip), real
        ),
        "val/mean": masked_mean(old_values, real),
        "val/var": masked_variance(old_values, real),
    }
    return policy_loss, ranges.value_coef * value_loss, jax.lax.stop_gradient(stats)
