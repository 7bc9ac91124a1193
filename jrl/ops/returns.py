# SPDX-License-Identifier: Apache-2.0
"""Advantage estimation over completion windows.

Index t speaks of the pair (s_t, a_t): `values[t]` is V(s_t), `rewards[t]` follows a_t. An episode ends after
its last action, where the value is 0. A completion that the length limit cut ends there too: bootstrapping
from the state behind the cut was left out, since the score already judges the text as it stands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.ops.checks import Scalar, check_batch, check_share
from jrl.ops.masking import zero_masked


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> Float[Array, "B T"]:
    """Generalised advantage estimates, backwards over the actions of each row.

        δ_t = r_t + γ·V(next action) − V_t,   A_t = δ_t + γλ·A(next action)

    Deviates from the paper: t counts actions, not columns. A column with mask 0 hands on the advantage and
    value of the next action without discount, so a tool turn of any length costs no credit, and trailing
    padding hands on 0.

    Args:
      rewards: Reward of each action, KL penalty included.
      values: Value of the state before each action, under the policy that acted.
      mask: True on actions. What stands elsewhere in the other arrays is irrelevant, NaN included.
      gamma: Discount γ per action, in [0, 1]; 1 is usual for text.
      gae_lambda: λ in [0, 1]: 0 is the one-step error, 1 the return minus the value.
    Returns:
      Advantages, not whitened; 0 where `mask` is False. Returns for the critic are `advantages + values`.
    Raises:
      ValueError: If the arrays differ in shape, or γ or λ is outside [0, 1].
      TypeError: If `mask` is not boolean.
    Reference: Schulman et al. 2016, arXiv:1506.02438, eqs. 11, 12 and 16.
    Example:
      >>> rewards, values = jnp.array([[0.0, 9.0, 1.0]]), jnp.array([[0.5, 9.0, 0.25]])
      >>> gae(rewards, values, jnp.array([[True, False, True]]), gamma=1.0, gae_lambda=1.0).tolist()
      [[0.5, 0.0, 0.75]]
    """
    check_batch(mask, rewards=rewards, values=values)
    check_share("gamma", gamma)
    check_share("gae_lambda", gae_lambda)

    def step(
        after: tuple[Array, Array], now: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        next_advantage, next_value = after
        reward, value, acts = now
        delta = reward + gamma * next_value - value
        advantage = jnp.where(acts, delta + gamma * gae_lambda * next_advantage, next_advantage)
        return (advantage, jnp.where(acts, value, next_value)), advantage

    # Garbage is removed before the recurrence: `where` inside it still computes with what it throws away.
    columns = (zero_masked(rewards, mask).T, zero_masked(values, mask).T, mask.T)
    end = jnp.zeros_like(columns[0][0])
    _, advantages = jax.lax.scan(step, (end, end), columns, reverse=True)
    return zero_masked(advantages.T, mask)
