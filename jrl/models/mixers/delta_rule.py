# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), for whole rows and token by token.

Every head has a state S, (K, V), float32. At each token t

    S ← αₜ S,   S ← S + kₜ ⊗ βₜ (vₜ − Sᵀkₜ),   oₜ = Sᵀqₜ

with a decay α in (0, 1] and a rate β in [0, 1]. At β = 0 and α = 1 the state stays as it is: so padding is left out.
A head has one α, or one for each channel of a key, which multiplies a row of S (Kimi Delta Attention, Kimi team 2025,
arXiv:2510.26692).

Whole rows go by chunks of 64 tokens. Inside a chunk the corrections u solve a triangular system (the WY form, section
3.3 of the paper): (I + L) u = β (v − γ Sᵀk) with L the strictly lower part of β kkᵀ times the decay between two tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.models.layers import as_row
from jrl.models.mixers.channel_decays import ChannelDecays
from jrl.models.mixers.chunks import ChunkSegments, chunk_decays, dot, scan_chunks


class DeltaInputs(NamedTuple):
    """Inputs of the rule at every token, float32.

    Attributes:
      q: Queries.
      k: Keys, of length 1.
      v: Values.
      log_decay: log α, at most 0, of every head or of every channel of its keys.
      rate: β.
    """

    q: Float[Array, "B Q N K"]
    k: Float[Array, "B Q N K"]
    v: Float[Array, "B Q N V"]
    log_decay: Float[Array, "B Q N"] | Float[Array, "B Q N K"]
    rate: Float[Array, "B Q N"]

    @property
    def by_channel(self) -> bool:
        """True where every channel of a key decays by itself."""
        return self.log_decay.ndim > self.rate.ndim


def delta_step(
    inputs: DeltaInputs, state: Float[Array, "B N K V"]
) -> tuple[Float[Array, "B 1 N V"], Float[Array, "B N K V"]]:
    """One token.

    Args:
      inputs: With one column.
      state: Before it.
    Returns:
      What is read, and the state after it.
    """
    q, k, v, log_decay, rate = (x[:, 0] for x in inputs)
    decay = jnp.exp(log_decay)
    state = state * (decay[:, :, :, None] if inputs.by_channel else decay[:, :, None, None])
    correction = rate[:, :, None] * (v - (state * k[:, :, :, None]).sum(axis=2))
    state = state + k[:, :, :, None] * correction[:, :, None, :]
    return (state * q[:, :, :, None]).sum(axis=2)[:, None], state


def delta_rows(
    inputs: DeltaInputs, state: Float[Array, "B N K V"], segments: Int[Array, "B Q"] | None = None
) -> tuple[Float[Array, "B Q N V"], Float[Array, "B N K V"]]:
    """Whole rows, in chunks; the backward pass keeps the states between these and computes the rest again.

    Args:
      inputs: Of all tokens.
      state: Before the first.
      segments: The state begins at 0 wherever the number changes; None: nowhere.
    Returns:
      What every token reads, and the state after the last one.
    """
    return scan_chunks(_chunk, inputs, state, segments)


def _chunk(
    inputs: DeltaInputs, state: Float[Array, "B N K V"], segments: ChunkSegments | None
) -> tuple[Float[Array, "B N C V"], Float[Array, "B N K V"]]:
    """One chunk with heads before tokens."""
    q, k, v, log_decay, rate = inputs
    decays = (ChannelDecays if inputs.by_channel else HeadDecays)(log_decay, segments)
    system = jnp.tril(decays.products(rate[..., None] * k, k), -1)
    wanted = v - decays.read(k, state)
    written = dot("bnij,bnjv->bniv", unit_lower_inverse(system), rate[..., None] * wanted)
    read = decays.read(q, state)
    read = read + dot("bnij,bnjv->bniv", decays.products(q, k), written)
    kept = decays.kept(state)
    return read, kept + dot("bnik,bniv->bnkv", decays.late(k), written)


class HeadDecays:
    """Factors of a chunk where all channels of a head decay alike; the methods are those of `ChannelDecays`."""

    def __init__(self, log_decay: Float[Array, "B N C"], segments: ChunkSegments | None):
        self._between, self._since_start, self._until_end = chunk_decays(log_decay, segments)

    def products(
        self, queries: Float[Array, "B N C K"], keys: Float[Array, "B N C K"]
    ) -> Float[Array, "B N C C"]:
        """Products of the query of token i and the key of token j, decayed between the two."""
        return dot("bnik,bnjk->bnij", queries, keys) * self._between

    def read(self, x: Float[Array, "B N C K"], state: Float[Array, "B N K V"]) -> Float[Array, "B N C V"]:
        """Products of each token's x and the decayed state before the chunk."""
        return self._since_start[..., None] * dot("bnik,bnkv->bniv", x, state)

    def kept(self, state: Float[Array, "B N K V"]) -> Float[Array, "B N K V"]:
        """The state before the chunk, decayed to its end."""
        return self._since_start[:, :, -1, None, None] * state

    def late(self, keys: Float[Array, "B N C K"]) -> Float[Array, "B N C K"]:
        """The keys, decayed to the end of the chunk."""
        return self._until_end[..., None] * keys


def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + L)⁻¹ of a strictly lower L, from blocks of one row up, each twice as large as the one before.

    Two blocks A, B on the diagonal with C below A have the inverse A⁻¹, B⁻¹ with −B⁻¹ C A⁻¹: products of matrices
    alone, as exact as substitution row by row. A series in L would not be: its terms grow where keys are alike.
    """
    size = lower.shape[-1]
    rows, columns = np.indices((size, size))

    def corners(width: int) -> Float[Array, "*batch C C"]:
        return lower * as_row(jnp.asarray(_below(rows, columns, width)), lower.ndim)

    inverse = as_row(jnp.eye(size, dtype=lower.dtype), lower.ndim) - corners(1)
    width = 2
    while width < size:
        inverse = inverse - dot("...ij,...jk,...kl->...il", inverse, corners(width), inverse)
        width *= 2
    return inverse


def _below(rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """1 where a block of this width on the diagonal has another one to its left, with which it makes a pair."""
    block, left = rows // width, columns // width
    return ((block % 2 == 1) & (left == block - 1)).astype(np.float32)
