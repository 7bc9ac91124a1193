# SPDX-License-Identifier: Apache-2.0
"""Statistics of the distribution over the vocabulary at each chosen token.

Reference: none; textbook definitions, computed stably.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_float
from jrl.ops.logprobs import take_targets, where_or_zero
from jrl.ops.masking import at_least_float32


class TokenReads(NamedTuple):
    """Statistics of each position's distribution. Only `logprobs` passes a gradient.

    Attributes:
      logprobs: log π of the target, in nats.
      entropy: −Σ π log π, in nats.
      collision: log Σ π²: how probable it is that two draws agree, in nats.
      mean_logits: Mean of the logits over the vocabulary, −inf left out.
      is_top: True where no token has a larger logit than the target; ties count.
    """

    logprobs: Float[Array, "*rows"]
    entropy: Float[Array, "*rows"]
    collision: Float[Array, "*rows"]
    mean_logits: Float[Array, "*rows"]
    is_top: Bool[Array, "*rows"]


def read_tokens(logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"]) -> TokenReads:
    """Reads logits once; in float32.

    Args:
      logits: −inf excludes a token, as in a padded vocabulary.
      targets: Ids in [0, V).
    Returns:
      One entry for each target, (*rows,), in every field.
    Example:
      >>> found = read_tokens(jnp.log(jnp.array([0.5, 0.25, 0.25])), jnp.array(1))
      >>> [round(float(x), 4) for x in (found.logprobs, found.entropy, found.collision)], bool(found.is_top)
      ([-1.3863, 1.0397, -0.9808], False)
    """
    check_float("logits", logits)
    logits = at_least_float32(logits)
    # One exponential serves all of it: each pass over the vocabulary is as long as the head's own backward pass.
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    target = take_targets(shifted, targets)
    watched, seen, mass = (jax.lax.stop_gradient(x) for x in (shifted, weights, total))
    present = watched > -jnp.inf
    count = jnp.sum(present, axis=-1, dtype=mass.dtype)
    return TokenReads(
        logprobs=target - jnp.log(total),
        # An excluded token enters as 0·0: 0·(−inf) is NaN.
        entropy=jnp.log(mass) - jnp.sum(seen * where_or_zero(present, watched), axis=-1) / mass,
        collision=jnp.log(jnp.sum(jnp.square(seen), axis=-1)) - 2 * jnp.log(mass),
        mean_logits=jnp.sum(where_or_zero(present, jax.lax.stop_gradient(logits)), axis=-1) / count,
        is_top=jax.lax.stop_gradient(target) >= 0,
    )
