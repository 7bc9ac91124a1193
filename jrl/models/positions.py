# SPDX-License-Identifier: Apache-2.0
"""Positions in a decoder: counted over real tokens, as rotations of queries and keys, or as ALiBi's slopes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jrl.models.config import TransformerConfig


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles at each query's position, float32.

    Attributes:
      cos: Of each pair of dimensions.
      sin: Likewise.
      growth: Multiplies the queries; None: nothing does.
    """

    cos: Float[Array, "B Q R"]
    sin: Float[Array, "B Q R"]
    growth: Float[Array, "B Q"] | None = None


def token_positions(
    attention_mask: Bool[Array, "B L"], segment_ids: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
    """Position of every token, counted over the real ones: the same whatever the padding and its side.

    Padding gets a position too (0 on the left), which nothing reads.

    Args:
      attention_mask: True on real tokens.
      segment_ids: Of packed rows; positions restart where the id changes. None: one segment.
    """
    counts = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)
    positions = jnp.maximum(counts - 1, 0)
    if segment_ids is None:
        return positions
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    before = jax.lax.cummax(jnp.where(starts, counts - attention_mask, 0), axis=1)
    return jnp.maximum(counts - 1 - before, 0)


def check_length(config: TransformerConfig, shape: tuple[int, ...], attention_mask: Any) -> None:
    """Refuses rows that are longer than a table of positions, or than the scaling of the rotary ones holds.

    Plain rotary positions and ALiBi go on beyond the context, as they do in transformers.

    Args:
      config: The architecture.
      shape: Of the tokens, (B, L).
      attention_mask: True on real tokens, which are counted where their number is known; under `jax.jit` the columns
        are. None: all are real.
    Raises:
      ValueError: If a row is too long.
    """
    if not (config.learned_positions or any(rope.is_bounded for rope in config.ropes)):
        return
    known = attention_mask is not None and not isinstance(attention_mask, jax.core.Tracer)
    longest = int(np.sum(np.asarray(attention_mask, bool), axis=1).max(initial=0)) if known else shape[1]
    if longest > config.max_positions:
        raise ValueError(
            f"`tokens` must have rows of at most {config.max_positions} tokens, the positions that this model has, got "
            f"{longest}: shorten the rows, or bring a model with a longer context."
        )


def rotations(config: TransformerConfig, positions: Int[Array, "B Q"]) -> tuple[Rotation, ...]:
    """The rotation of each of `config.ropes` at these positions."""
    found = []
    for rope in config.ropes:
        frequencies = jnp.asarray(rope.frequencies(config.head_dim))
        angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
        factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
        growth = None
        if rope.query_growth is not None:
            steps = (positions + rope.query_growth.first) // rope.query_growth.length
            growth = 1.0 + rope.query_growth.rate * jnp.log1p(steps.astype(jnp.float32))
        found.append(Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor, growth))
    return tuple(found)


def rotate(x: Float[Array, "B Q N H"], rotation: Rotation, *, interleaved: bool) -> Float[Array, "B Q N H"]:
    """Rotates the leading dimensions of every head in pairs: the halves against each other, or neighbours."""
    dim = 2 * rotation.cos.shape[-1]
    turned, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    cos, sin = rotation.cos[:, :, None, :], rotation.sin[:, :, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    join = jnp.stack if interleaved else jnp.concatenate
    turned = join(parts, axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slope of each head's scores over the distance, (N,) float32 (Press et al. 2021, section 3).

    The slopes of the nearest smaller power of two come first; missing heads take every other one of twice as many.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - power), 2) / power)
    return np.concatenate([slopes, between]).astype(np.float32)
