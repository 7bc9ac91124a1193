# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), for whole rows and token by token.

Every head has a state S, (K, V), float32. At each token t

    S ← αₜ S,   S ← S + kₜ ⊗ βₜ (vₜ − Sᵀkₜ),   oₜ = Sᵀqₜ

with a decay α in (0, 1] and a rate β in [0, 1]. At β = 0 and α = 1 the state stays as it is: so padding is left out.

Whole rows go by chunks of 64 tokens. Inside a chunk the corrections u solve a triangular system (the WY form, section
3.3 of the paper): (I + L) u = β (v − γ Sᵀk) with L the strictly lower part of β kkᵀ times the decay between two tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain
from jrl.models.layers import as_row

CHUNK = 64
"""Tokens of a chunk."""
_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


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
    length = inputs.q.shape[1]
    size = min(CHUNK, length)
    padding = -length % size

    def cut(x: Array, fill: int = 0) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def heads_first(x: Array) -> Array:
        return constrain(x.swapaxes(1, 2), "batch", "heads", *[None] * (x.ndim - 2))

    def one(carry: Any, chunk: Any) -> Any:
        state, segment = carry
        own, ids = chunk
        own = DeltaInputs(*(heads_first(x) for x in own))
        read, state = _chunk(own, state, None if ids is None else (segment, ids))
        return (state, None if ids is None else ids[:, -1]), read.swapaxes(1, 2)

    ids = None if segments is None else cut(segments, -1)
    first = None if segments is None else segments[:, 0]
    chunks = DeltaInputs(*(cut(x) for x in inputs)), ids
    (state, _), read = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), (state, first), chunks)
    return read.swapaxes(0, 1).reshape(read.shape[1], -1, *read.shape[3:])[:, :length], state


def _chunk(
    inputs: DeltaInputs,
    state: Float[Array, "B N K V"],
    segments: tuple[Int[Array, "B"], Int[Array, "B C"]] | None,
) -> tuple[Float[Array, "B N C V"], Float[Array, "B N K V"]]:
    """One chunk with heads before tokens; `segments` are the number before it and those in it."""
    q, k, v, log_decay, rate = inputs
    size = q.shape[2]
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
    decay = jnp.where(sees, jnp.exp(between), 0.0)
    system = jnp.tril(_dot("bnik,bnjk->bnij", rate[..., None] * k, k) * decay, -1)
    wanted = v - since_start[..., None] * _dot("bnik,bnkv->bniv", k, state)
    written = _dot("bnij,bnjv->bniv", unit_lower_inverse(system), rate[..., None] * wanted)
    read = since_start[..., None] * _dot("bnik,bnkv->bniv", q, state)
    read = read + _dot("bnij,bnjv->bniv", _dot("bnik,bnjk->bnij", q, k) * decay, written)
    kept = since_start[:, :, -1, None, None] * state
    return read, kept + _dot("bnik,bniv->bnkv", until_end[..., None] * k, written)


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
        inverse = inverse - _dot("...ij,...jk,...kl->...il", inverse, corners(width), inverse)
        width *= 2
    return inverse


def _below(rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """1 where a block of this width on the diagonal has another one to its left, with which it makes a pair."""
    block, left = rows // width, columns // width
    return ((block % 2 == 1) & (left == block - 1)).astype(np.float32)
