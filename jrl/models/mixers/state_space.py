# SPDX-License-Identifier: Apache-2.0
"""The selective state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), for whole rows and token by token.

Every head has a state S, (K, V), float32. At each token t

    S ← αₜ S + kₜ ⊗ vₜ,   oₜ = Sᵀqₜ

with a decay α in (0, 1]. In the paper's letters q is C, k is B, v is Δ·x, and log α is Δ·A: its section 5 shows that
this is attention without a softmax, masked by decays. Several heads share queries and keys. At v = 0 and α = 1 the
state stays as it is: so padding is left out.

Whole rows go by chunks of 64 tokens (section 6 of the paper).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain
from jrl.models.mixers.chunks import ChunkSegments, chunk_decays, dot, scan_chunks


class StateSpaceInputs(NamedTuple):
    """Inputs of the recurrence at every token, float32. G divides N: each q and k serves N / G heads in a row.

    Attributes:
      q: Queries.
      k: Keys.
      v: Values, times the step.
      log_decay: log α, at most 0.
    """

    q: Float[Array, "B Q G K"]
    k: Float[Array, "B Q G K"]
    v: Float[Array, "B Q N V"]
    log_decay: Float[Array, "B Q N"]


def state_space_step(
    inputs: StateSpaceInputs, state: Float[Array, "B N K V"]
) -> tuple[Float[Array, "B 1 N V"], Float[Array, "B N K V"]]:
    """One token.

    Args:
      inputs: With one column.
      state: Before it.
    Returns:
      What is read, and the state after it.
    """
    q, k, v, log_decay = (x[:, 0] for x in inputs)
    q, k = (_spread(x, v.shape[1])[..., None] for x in (q, k))
    state = state * jnp.exp(log_decay)[:, :, None, None] + k * v[:, :, None, :]
    return (state * q).sum(axis=2)[:, None], state


def state_space_rows(
    inputs: StateSpaceInputs, state: Float[Array, "B N K V"], segments: Int[Array, "B Q"] | None = None
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
    inputs: StateSpaceInputs, state: Float[Array, "B N K V"], segments: ChunkSegments | None
) -> tuple[Float[Array, "B N C V"], Float[Array, "B N K V"]]:
    """One chunk with heads before tokens."""
    q, k, v, log_decay = inputs
    heads = v.shape[1]
    between, since_start, until_end = chunk_decays(log_decay, segments)
    weights = _spread(dot("bgik,bgjk->bgij", q, k), heads) * between
    read = dot("bnij,bnjv->bniv", weights, v)
    read = read + since_start[..., None] * dot("bnik,bnkv->bniv", _spread(q, heads), state)
    kept = since_start[:, :, -1, None, None] * state
    return read, kept + dot("bnik,bniv->bnkv", _spread(k, heads), until_end[..., None] * v)


def _spread(x: Float[Array, "B G *rest"], heads: int) -> Float[Array, "B N *rest"]:
    """One for every head, of one for every group of heads."""
    rest = [None] * (x.ndim - 2)
    if x.shape[1] < heads:
        # Before and after: what the mesh does not divide is whole on every device.
        x = jnp.repeat(constrain(x, "batch", "kv_heads", *rest), heads // x.shape[1], axis=1)
    return constrain(x, "batch", "heads", *rest)
