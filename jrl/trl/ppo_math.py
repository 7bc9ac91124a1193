# SPDX-License-Identifier: Apache-2.0
"""The pieces of a PPO step under TRL's names, for scripts that compose it by hand: `jrl.ops` on whole rows.

Arrays are (B, L − 1): column t speaks of the token after column t. They may be traced, so `jax.grad` goes through.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.interop import as_array
from jrl.learners.credit import KL_PENALTIES, generalized_advantages
from jrl.learners.ppo import PPOConfig, ppo_policy_loss
from jrl.losses.policy_gradient import Targets
from jrl.ops.logprobs import entropy_from_logits, kl_from_logits
from jrl.ops.masking import at_least_float32, masked_mean, masked_variance, zero_masked
from jrl.ops.policy_gradient import importance_ratio
from jrl.ops.reductions import LossOut
from jrl.ops.rewards import place_scores
from jrl.typing import Predictions, Scored

OF_UPDATE = {
    "loss/policy": "ppo/policy_loss",
    "loss/value": "ppo/value_loss",
    "policy/entropy": "ppo/entropy",
    "policy/approxkl": "ppo/approx_kl_k2",
    "policy/policykl": "ppo/policy_kl",
    "policy/clipfrac": "ppo/clip_fraction",
    "val/vpred": "ppo/value_mean",
    "val/error": "ppo/value_error",
    "val/clipfrac": "ppo/value_clip_fraction",
}
"""TRL's name of a statistic → jrl's metric, of a minibatch and of a whole update."""


def kl_penalty(logprobs: Any, ref_logprobs: Any, kind: str) -> Float[Array, "B L"]:
    """Distance from the reference at every column.

    Args:
      logprobs: Of the tokens (B, L − 1); for "full" of the whole vocabulary (B, L − 1, V).
      ref_logprobs: The reference's.
      kind: "kl", "abs", "mse" or "full".
    """
    ours, theirs = at_least_float32(as_array(logprobs)), at_least_float32(as_array(ref_logprobs))
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
    mask = as_array(masks) != 0
    kl = kl_penalty(logprobs, ref_logprobs, kind)
    given = at_least_float32(as_array(scores))
    placed = place_scores(given, mask) if given.ndim == 1 else zero_masked(given, mask)
    non_score = -kl_coef * kl
    return non_score + placed, non_score, kl


def advantages_and_returns(
    values: Any, rewards: Any, mask: Any, *, gamma: float, lam: float, whiten_rewards: bool
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """(values, whitened advantages, returns), all 0 where the mask is."""
    real = as_array(mask) != 0
    old, earned = zero_masked(as_array(values), real), zero_masked(as_array(rewards), real)
    estimate = generalized_advantages(gamma=gamma, gae_lambda=lam, whiten_rewards=whiten_rewards)
    credit = estimate(earned, old, real, None)
    assert credit.returns is not None, "GAE has returns"
    return old, credit.advantages, credit.returns


def minibatch_loss(
    old_logprobs: Any,
    values: Any,
    logits: Any,
    vpreds: Any,
    logprobs: Any,
    mask: Any,
    advantages: Any,
    returns: Any,
    config: PPOConfig,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
    """(policy loss, weighed value loss, statistics) of one minibatch; arguments as `PPOTrainer.loss`."""
    real = as_array(mask) != 0
    old, old_values, new_values, new, earned, returned = (
        zero_masked(as_array(x), real) for x in (old_logprobs, values, vpreds, logprobs, advantages, returns)
    )
    now = Predictions(new, new_values, entropy_from_logits(as_array(logits)), lambda: as_array(logits))
    targets = Targets(old, old_values, earned, returned, real)
    found = ppo_policy_loss(config)(now, targets)
    # The objective is one sum. Its policy part is the same objective without the value loss.
    policy_loss = _loss(ppo_policy_loss(replace(config, vf_coef=0.0))(now, targets))
    total = _loss(found)
    stats = {ours: _mean(found.metrics[name]) for ours, name in OF_UPDATE.items()} | {
        "loss/total": total,
        "policy/advantages": earned,
        "policy/advantages_mean": masked_mean(earned, real),
        "policy/ratio": importance_ratio(new, old),
        "returns/mean": masked_mean(returned, real),
        "returns/var": masked_variance(returned, real),
        "val/mean": masked_mean(old_values, real),
        "val/var": masked_variance(old_values, real),
    }
    return policy_loss, total - policy_loss, jax.lax.stop_gradient(stats)


def _loss(out: LossOut) -> Float[Array, ""]:
    """The mean over the actions that count; 0 where none does."""
    return out.loss_sum / jnp.maximum(out.weight, 1.0)


def _mean(metric: Any) -> Float[Array, ""]:
    """Value of a metric of a minibatch; 0 where nothing counts."""
    return metric.total / jnp.maximum(metric.weight, 1.0)
