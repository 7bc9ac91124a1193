# SPDX-License-Identifier: Apache-2.0
"""Rows in chunks of 64 tokens: how a linear recurrence with decays goes through a row that is read whole.

Inside a chunk every token reads those before it by products of matrices; from chunk to chunk the state is handed on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain

CHUNK = 64
"""Tokens of a chunk."""
dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
"""Products of float32 in float32."""

Inputs = TypeVar("Inputs", bound=tuple[Array, ...])
ChunkSegments = tuple[Int[Array, "B"], Int[Array, "B C"]]
"""Segment of the token before a chunk, and of each in it."""


class Decays(NamedTuple):
    """Factors by which a state shrinks between two points of a chunk; 0 from one segment to another.

    Attributes:
      between: From token j to token i; 0 where j comes after i.
      since_start: From the state before the chunk to token i, its own decay included.
      until_end: From token j to the end of the chunk.
    """

    between: Float[Array, "B N C C"]
    since_start: Float[Array, "B N C"]
    until_end: Float[Array, "B N C"]


def chunk_decays(log_decay: Float[Array, "B N C"], segments: ChunkSegments | None) -> Decays:
    """The decays of one chunk, of each token's own in logarithms."""
    size = log_decay.shape[2]
    sees = jnp.asarray(np.tri(size, dtype=bool))[None, None]
    # Between two tokens what lies between them is added up. The difference of two sums from the start would lose digits
    # where a head decays fast.
    after = jnp.asarray(np.tri(size, k=-1, dtype=bool))[None, None]
    between = jnp.cumsum(jnp.where(after, log_decay[..., None], 0.0), axis=2)
    since_start, until_end = jnp.exp(jnp.cumsum(log_decay, axis=2)), jnp.exp(between[:, :, -1])
    if segments is not None:
        before, own = segments
        sees = sees & (own[:, :, None] == own[:, None, :])[:, None]
        since_start = jnp.where((own == before[:, None])[:, None], since_start, 0.0)
        until_end = jnp.where((own == own[:, -1:])[:, None], until_end, 0.0)
    return Decays(jnp.where(sees, jnp.exp(between), 0.0), since_start, until_end)


def scan_chunks(
    chunk: Callable[[Inputs, Array, ChunkSegments | None], tuple[Array, Array]],
    inputs: Inputs,
    state: Float[Array, "B N K V"],
    segments: Int[Array, "B Q"] | None,
) -> tuple[Float[Array, "B Q N V"], Float[Array, "B N K V"]]:
    """Whole rows, chunk by chunk; the backward pass keeps the states between these and computes the rest again.

    Args:
      chunk: `(inputs of a chunk with heads before tokens, state, segments) -> (what is read, state after it)`.
      inputs: Of all tokens, (B, Q, heads, ...). Where all are 0, as behind a row's end, the state stays as it is.
      state: Before the first token.
      segments: The state begins at 0 wherever the number changes; None: nowhere.
    Returns:
      What every token reads, and the state after the last one.
    """
    length = inputs[0].shape[1]
    size = min(CHUNK, length)
    padding = -length % size
    kind: Any = type(inputs)

    def cut(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode)
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def heads_first(x: Array) -> Array:
        return constrain(x.swapaxes(1, 2), "batch", "heads", *[None] * (x.ndim - 2))

    def one(carry: Any, pieces: Any) -> Any:
        state, segment = carry
        own, ids = pieces
        own = kind(*(heads_first(x) for x in own))
        read, state = chunk(own, state, None if ids is None else (segment, ids))
        return (state, None if ids is None else ids[:, -1]), read.swapaxes(1, 2)

    ids = None if segments is None else cut(segments, "edge")
    first = None if segments is None else segments[:, 0]
    pieces = kind(*(cut(x) for x in inputs)), ids
    (state, _), read = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), (state, first), pieces)
    return read.swapaxes(0, 1).reshape(read.shape[1], -1, *read.shape[3:])[:, :length], state
