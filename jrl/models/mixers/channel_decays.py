# SPDX-License-Identifier: Apache-2.0
"""Decays of a chunk whose keys decay channel by channel (Kimi Delta Attention, arXiv:2510.26692, section 3).

A query then reads a key through Σ over channels of query · key · (all decays after the key, up to the query). That is
no product of matrices that is shrunk afterwards. Dividing by the decays so far would make it one, and overflow.

Here a chunk is halved, and its halves again, down to single tokens. Between two halves the query has the decays behind
their border and the key those before it: two factors of at most 1, so that every corner is one product of matrices. The
logarithms of both are sums of a few terms of one sign, which lose no digits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.models.mixers.chunks import ChunkSegments, dot


class Border(NamedTuple):
    """Decays on the two sides of the borders between neighbouring blocks of W tokens.

    Attributes:
      until: From each token of the first block to the border.
      since: From the border to each token of the second block, its own decay included.
    """

    until: Float[Array, "B N P W K"]
    since: Float[Array, "B N P W K"]


class ChannelDecays:
    """Factors by which each channel of a state shrinks between two points of a chunk; 0 between segments.

    Args:
      log_decay: Of each token and channel, at most 0.
      segments: Of the token before the chunk and of its own; None: one segment.
    """

    def __init__(self, log_decay: Float[Array, "B N C K"], segments: ChunkSegments | None):
        self._length = log_decay.shape[2]
        self._borders, since_start, until_end = _borders(_filled(log_decay))
        self._since_start = jnp.exp(since_start[:, :, : self._length])
        self._until_end = jnp.exp(until_end[:, :, : self._length])
        self._sees: Bool[Array, "B 1 C C"] | None = None
        if segments is not None:
            before, own = segments
            self._sees = (own[:, :, None] == own[:, None, :])[:, None]
            is_first, is_last = own == before[:, None], own == own[:, -1:]
            self._since_start = jnp.where(is_first[:, None, :, None], self._since_start, 0.0)
            self._until_end = jnp.where(is_last[:, None, :, None], self._until_end, 0.0)

    def products(
        self, queries: Float[Array, "B N C K"], keys: Float[Array, "B N C K"]
    ) -> Float[Array, "B N C C"]:
        """Products of the query of token i and the key of token j as it is by then; 0 where j comes after i."""
        queries, keys = _filled(queries), _filled(keys)
        blocks = (queries * keys).sum(axis=-1)[..., None, None]
        queries, keys = queries[:, :, :, None], keys[:, :, :, None]
        for border in self._borders:
            (_, late), (early, _) = _pairs(queries), _pairs(keys)
            corner = dot("bnpik,bnpjk->bnpij", late * border.since, early * border.until)
            first, second = _pairs(blocks)
            above = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
            blocks = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
            queries, keys = _joined(queries), _joined(keys)
        found = blocks[:, :, 0, : self._length, : self._length]
        return found if self._sees is None else jnp.where(self._sees, found, 0.0)

    def read(self, x: Float[Array, "B N C K"], state: Float[Array, "B N K V"]) -> Float[Array, "B N C V"]:
        """Products of each token's x and the state before the chunk, as it is by then."""
        return dot("bnik,bnkv->bniv", self._since_start * x, state)

    def kept(self, state: Float[Array, "B N K V"]) -> Float[Array, "B N K V"]:
        """The state before the chunk, as it is after it."""
        return self._since_start[:, :, -1, :, None] * state

    def late(self, keys: Float[Array, "B N C K"]) -> Float[Array, "B N C K"]:
        """The keys, as they are at the end of the chunk."""
        return self._until_end * keys


def _borders(
    log_decay: Float[Array, "B N C K"],
) -> tuple[list[Border], Float[Array, "B N C K"], Float[Array, "B N C K"]]:
    """The borders of blocks of one token, of two, and so on; and the logarithms since the start and until the end."""
    since = log_decay[:, :, :, None]
    until = jnp.zeros_like(since)
    found = []
    while since.shape[2] > 1:
        (first, second), (early, late) = _pairs(since), _pairs(until)
        found.append(Border(jnp.exp(early), jnp.exp(second)))
        since = jnp.concatenate([first, first[..., -1:, :] + second], axis=-2)
        until = jnp.concatenate([early + second[..., -1:, :], late], axis=-2)
    return found, since[:, :, 0], until[:, :, 0]


def _filled(x: Float[Array, "B N C K"]) -> Float[Array, "B N 2^n K"]:
    """With zeros behind, up to a power of two tokens."""
    length = x.shape[2]
    return jnp.pad(x, [(0, 0), (0, 0), (0, (1 << (length - 1).bit_length()) - length), (0, 0)])


def _pairs(
    blocks: Float[Array, "B N 2*P W D"],
) -> tuple[Float[Array, "B N P W D"], Float[Array, "B N P W D"]]:
    """The first and the second block of each pair."""
    return blocks[:, :, 0::2], blocks[:, :, 1::2]


def _joined(blocks: Float[Array, "B N 2*P W K"]) -> Float[Array, "B N P 2*W K"]:
    """Pairs of blocks as blocks."""
    _, _, count, width, channels = blocks.shape
    return blocks.reshape(*blocks.shape[:2], count // 2, 2 * width, channels)
