# SPDX-License-Identifier: Apache-2.0
"""A causal convolution of every channel for itself, over the real tokens of a row, which a cache may continue."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.layers import as_row
from jrl.models.recurrent_rows import RecurrentRows


def convolve(
    x: Float[Array, "B Q *channels"],
    taps: Float[Array, "*channels W"],
    rows: RecurrentRows,
    tail: Float[Array, "B W-1 *channels"] | None = None,
) -> tuple[Float[Array, "B Q *channels"], Float[Array, "B W-1 *channels"]]:
    """Σ over W tokens of tap · x, the last tap for the token itself, in float32.

    Args:
      x: In the order of `rows`.
      taps: Of every channel.
      rows: Which tokens are real, and where packed rows begin anew.
      tail: The inputs before the first; None: there are none.
    Returns:
      The sums, and the inputs at the newest real tokens, for those that follow.
    """
    before = taps.shape[-1] - 1
    if tail is None:
        tail = jnp.zeros((x.shape[0], before, *x.shape[2:]), x.dtype)
    whole = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    length = x.shape[1]
    total = jnp.zeros(x.shape, jnp.float32)
    for index in range(before + 1):
        read = whole[:, index : index + length].astype(jnp.float32)
        if rows.segments is not None and index < before:
            lag = before - index
            same = rows.segments[:, lag:] == rows.segments[:, :-lag] if lag < length else rows.real[:, :0]
            same = jnp.pad(same, ((0, 0), (length - same.shape[1], 0)))
            read = jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), read, 0.0)
        total = total + read * as_row(taps[..., index].astype(jnp.float32), x.ndim)
    newest = rows.counts[:, None] + jnp.arange(before)[None, :]
    newest = newest.reshape(*newest.shape, *[1] * (x.ndim - 2))
    return total, jnp.take_along_axis(whole, newest, axis=1, mode="promise_in_bounds")
