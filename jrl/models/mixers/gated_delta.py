# SPDX-License-Identifier: Apache-2.0
"""A layer of the gated delta rule, as in Qwen3-Next: convolution, recurrence, and a norm under a gate.

Kimi Delta Attention (Kimi team 2025, arXiv:2510.26692) is the same with a decay for every channel of a key. Decays and
gates then come from short vectors.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain
from jrl.models.attention import AttentionContext, residual_init_range
from jrl.models.cache import StateCache, constrain_cache
from jrl.models.config import GatedDelta, TransformerConfig
from jrl.models.layers import ACTIVATIONS, Norm, Projection, as_row
from jrl.models.mixers.convolution import convolve
from jrl.models.mixers.delta_rule import DeltaInputs, delta_rows, delta_step

UNIT_EPSILON = 1e-6
"""Added to the squared length of queries and keys that are made unit vectors."""
MOST_DECAY = 16.0
"""A fresh layer decays by rates between 0 and this."""


class GatedDeltaMixer(nn.Module):
    """The recurrence in place of attention; state and convolution go on from a cache.

    Attributes:
      config: The decoder.
      sizes: Of heads and convolution.
      dtype: Of the projections; convolution, recurrence and state are float32.
    """

    config: TransformerConfig
    sizes: GatedDelta
    dtype: Any

    def setup(self) -> None:
        """Names the projections and the small parameters."""
        config, sizes = self.config, self.sizes
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
        decays: tuple[int, ...] = (sizes.value_heads,)

        def project(*outputs: int, size_in: int = config.width) -> Projection:
            return Projection((size_in,), outputs, False, config.init_range, self.dtype)

        self.q, self.k, self.v = project(*keys), project(*keys), project(*values)
        self.rate = project(sizes.value_heads)
        if sizes.rank is None:
            self.gate, self.decay = project(*values), project(*decays)
        else:
            decays = (sizes.value_heads, sizes.key_dim)
            self.gate_down, self.decay_down = project(sizes.rank), project(sizes.rank)
            self.gate_up = project(*values, size_in=sizes.rank)
            self.decay_up = project(*decays, size_in=sizes.rank)
        self.o = Projection(values, (config.width,), False, residual_init_range(config), self.dtype)
        self.norm = Norm("rms", config.norm_epsilon, values[1:], jnp.float32)
        taps = nn.initializers.normal(config.init_range)
        self.q_taps = self.param("q_taps", taps, (*keys, sizes.taps), jnp.float32)
        self.k_taps = self.param("k_taps", taps, (*keys, sizes.taps), jnp.float32)
        self.v_taps = self.param("v_taps", taps, (*values, sizes.taps), jnp.float32)
        self.log_rates = self.param("log_rates", _init_log_rates, (sizes.value_heads,), jnp.float32)
        self.decay_bias = self.param("decay_bias", nn.initializers.ones_init(), decays, jnp.float32)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: StateCache | None
    ) -> tuple[Float[Array, "B Q D"], StateCache | None]:
        """Answers for every token, to be added to the residual stream, and the cache's entry after them."""
        rows = context.recurrent
        assert rows is not None
        x = rows.take(x)
        entry = cache if cache is not None else empty_delta(self.sizes, x.shape[0], self.dtype)
        activation = ACTIVATIONS[self.config.activation]
        mixed, tails = [], []
        parts = ((self.q, self.q_taps), (self.k, self.k_taps), (self.v, self.v_taps))
        for (project, taps), tail in zip(parts, entry.tails, strict=True):
            sums, newest = convolve(project(x), taps, rows, tail.swapaxes(1, 2))
            # Rounded as the projections are, as in the torch implementation.
            mixed.append(activation(sums).astype(self.dtype).astype(jnp.float32))
            tails.append(constrain_cache(newest.swapaxes(1, 2)))
        inputs = self._inputs(x, *mixed)
        of_decays = rows.real[:, :, None, None] if inputs.by_channel else rows.real[:, :, None]
        inputs = inputs._replace(
            log_decay=jnp.where(of_decays, inputs.log_decay, 0.0),
            rate=jnp.where(rows.real[:, :, None], inputs.rate, 0.0),
        )
        assert entry.state is not None
        if x.shape[1] == 1:
            read, state = delta_step(inputs, entry.state)
        else:
            read, state = delta_rows(inputs, entry.state, rows.segments)
        read = self.norm(read.astype(self.dtype)) * self._gates(x)
        out = self.o(constrain(read.astype(self.dtype), "batch", None, "heads", None))
        after = None if cache is None else StateCache(tuple(tails), constrain_cache(state))
        return rows.put_back(out), after

    def _inputs(
        self,
        x: Float[Array, "B Q D"],
        q: Float[Array, "B Q M K"],
        k: Float[Array, "B Q M K"],
        v: Float[Array, "B Q N V"],
    ) -> DeltaInputs:
        """Unit queries and keys of every value head, and its decays and rate at each token."""
        sharing = self.sizes.value_heads // self.sizes.key_heads

        def spread(x: Float[Array, "B Q M K"]) -> Float[Array, "B Q N K"]:
            x = x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + UNIT_EPSILON)
            if sharing > 1:
                # Before and after, as keys of attention are: what the mesh does not divide is whole on every device.
                x = jnp.repeat(constrain(x, "batch", None, "kv_heads", None), sharing, axis=2)
            return constrain(x, "batch", None, "heads", None)

        by_channel = self.sizes.rank is not None
        raw = self.decay_up(self.decay_down(x)) if by_channel else self.decay(x)
        steps = jax.nn.softplus(raw.astype(jnp.float32) + as_row(self.decay_bias, raw.ndim))
        log_rates = self.log_rates[:, None] if by_channel else self.log_rates
        return DeltaInputs(
            spread(q) * self.sizes.key_dim**-0.5,
            spread(k),
            constrain(v, "batch", None, "heads", None),
            -jnp.exp(as_row(log_rates.astype(jnp.float32), steps.ndim)) * steps,
            jax.nn.sigmoid(self.rate(x).astype(jnp.float32)),
        )

    def _gates(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q N V"]:
        """What multiplies the norm of what is read, float32."""
        if self.sizes.rank is None:
            return jax.nn.silu(self.gate(x).astype(jnp.float32))
        return jax.nn.sigmoid(self.gate_up(self.gate_down(x)).astype(jnp.float32))


def empty_delta(sizes: GatedDelta, batch_size: int, dtype: Any) -> StateCache:
    """The entry before the first token."""
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    tails = tuple(
        constrain_cache(jnp.zeros((batch_size, heads, sizes.taps - 1, width), dtype))
        for heads, width in (keys, keys, values)
    )
    state = jnp.zeros((batch_size, sizes.value_heads, sizes.key_dim, sizes.value_dim), jnp.float32)
    return StateCache(tails, constrain_cache(state))


def _init_log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, MOST_DECAY))
