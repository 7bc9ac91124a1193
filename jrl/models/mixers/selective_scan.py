# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752), for whole rows and token by token.

Every channel c has a state of K numbers, float32. At each token t, with a step Δ of every channel,

    S[k, c] ← exp(−Δ[c] · rate[k, c]) · S[k, c] + key[k] · Δ[c] · v[c],   o[c] = Σₖ query[k] · S[k, c]

In the paper's letters query is C, key is B, v is x and rate is −A. All channels share queries and keys. At Δ = 0 the
state stays as it is: so padding is left out.

Each number of a state decays at a rate of its own, so that no product of matrices stands for a chunk as it does in
`jrl.models.mixers.state_space`. The tokens of a chunk go one after the other, by the very step of decoding. An
associative scan (section 3.3 of the paper) has fewer steps, but holds the states of all tokens of a chunk at once,
several times over; here the backward pass alone does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.mixers.chunks import ChunkSegments, scan_chunks


class SelectiveInputs(NamedTuple):
    """Inputs of the scan at every token, float32.

    Attributes:
      q: Queries.
      k: Keys.
      v: Values.
      step: Δ, at least 0.
    """

    q: Float[Array, "B Q 1 K"]
    k: Float[Array, "B Q 1 K"]
    v: Float[Array, "B Q C"]
    step: Float[Array, "B Q C"]


def selective_step(
    inputs: SelectiveInputs, rates: Float[Array, "K C"], state: Float[Array, "B K C"]
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B K C"]]:
    """One token.

    Args:
      inputs: With one column.
      rates: Of the decay, at least 0.
      state: Before it.
    Returns:
      What is read, and the state after it.
    """
    read, state = _token(SelectiveInputs(*(x[:, 0] for x in inputs)), rates, state)
    return read[:, None], state


def selective_rows(
    inputs: SelectiveInputs,
    rates: Float[Array, "K C"],
    state: Float[Array, "B K C"],
    segments: Int[Array, "B Q"] | None = None,
) -> tuple[Float[Array, "B Q C"], Float[Array, "B K C"]]:
    """Whole rows, in chunks; the backward pass keeps the states between these and computes the rest again.

    Args:
      inputs: Of all tokens.
      rates: Of the decay, at least 0.
      state: Before the first.
      segments: The state begins at 0 wherever the number changes; None: nowhere.
    Returns:
      What every token reads, and the state after the last one.
    """
    return scan_chunks(partial(_chunk, rates), inputs, state, segments)


def _chunk(
    rates: Float[Array, "K C"],
    inputs: SelectiveInputs,
    state: Float[Array, "B K C"],
    segments: ChunkSegments | None,
) -> tuple[Float[Array, "B C T"], Float[Array, "B K C"]]:
    """One chunk of T tokens, with channels before tokens as `scan_chunks` has them."""
    before, own = (None, None) if segments is None else (segments[0], segments[1].swapaxes(0, 1))

    def one(carry: Any, token: Any) -> tuple[Any, Array]:
        (state, before), (inputs, own) = carry, token
        if own is not None:
            state = jnp.where((own != before)[:, None, None], 0.0, state)
        read, state = _token(inputs, rates, state)
        return (state, own), read

    tokens = SelectiveInputs(*(jnp.moveaxis(x, 2, 0) for x in inputs))
    (state, _), read = jax.lax.scan(one, (state, before), (tokens, own))
    return jnp.moveaxis(read, 0, 2), state


def _token(
    inputs: SelectiveInputs, rates: Float[Array, "K C"], state: Float[Array, "B K C"]
) -> tuple[Float[Array, "B C"], Float[Array, "B K C"]]:
    """The step of one token, whose inputs have no axis of tokens."""
    q, k = (x[:, 0, :, None] for x in (inputs.q, inputs.k))
    v, step = (x[:, None] for x in (inputs.v, inputs.step))
    state = jnp.exp(-rates[None] * step) * state + k * (step * v)
    return (q * state).sum(axis=1), state
