# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), for whole rows and token by token.

Every head has a state S, (K, V), float32. At each token t

    S ← αₜ S,   S ← S + kₜ ⊗ βₜ (vₜ − Sᵀkₜ),   oₜ = Sᵀqₜ

with a decay α in (0, 1] and a rate β in [0, 1]. At β = 0 and α = 1 the state stays as it is: so padding is left out.

Whole rows go by chunks of 64 tokens. Inside a chunk the corrections u solve a triangular system (the WY form, section
3.3 of the paper): (I + L) u = β (v − γ Sᵀk) with L the strictly lower part of β kkᵀ times the decay between two tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.models.layers import as_row
from jrl.models.mixers.chunks import ChunkSegments, chunk_decays, dot, scan_chunks


class DeltaInputs(NamedTuple):
    """Inputs of the rule at every token, float32.

    Attributes:
      q: Queries.
      k: Keys, of length 1.
      v: Values.
      log_decay: log α, at most 0.
      rate: β.
    """

    q: Float[Array, "B Q N K"]
    k: Float[Array, "B Q N K"]
    v: Float[Array, "B Q N V"]
    log_decay: Float[Array, "B Q N"]
    rate: Float[Array, "B Q N"]


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
    state = state * jnp.exp(log_decay)[:, :, None, None]
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
    between, since_start, until_end = chunk_decays(log_decay, segments)
    system = jnp.tril(dot("bnik,bnjk->bnij", rate[..., None] * k, k) * between, -1)
    wanted = v - since_start[..., None] * dot("bnik,bnkv->bniv", k, state)
    written = dot("bnij,bnjv->bniv", unit_lower_inverse(system), rate[..., None] * wanted)
    read = since_start[..., None] * dot("bnik,bnkv->bniv", q, state)
    read = read + dot("bnij,bnjv->bniv", dot("bnik,bnjk->bnij", q, k) * between, written)
    kept = since_start[:, :, -1, None, None] * state
    return read, kept + dot("bnik,bniv->bnkv", until_end[..., None] * k, written)


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
