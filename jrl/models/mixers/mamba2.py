# SPDX-License-Identifier: Apache-2.0
"""A layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): convolution, state space, and a gate with a norm.

Queries, keys and values are what the paper calls C, B and x; see `jrl.models.mixers.state_space`. The step Δ says how
fast a state decays, and how much of a value it takes up.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain
from jrl.models.attention import AttentionContext, residual_init_range
from jrl.models.cache import StateCache, constrain_cache
from jrl.models.config import Mamba2, TransformerConfig
from jrl.models.layers import Norm, Projection, as_row
from jrl.models.mixers.convolution import convolve
from jrl.models.mixers.state_space import StateSpaceInputs, state_space_rows, state_space_step
from jrl.models.recurrent_rows import RecurrentRows

MOST_DECAY = 16.0
"""A fresh layer decays by rates between 1 and this, times the step."""
FRESH_STEPS = (1e-3, 0.1)
"""Least and largest step of a fresh layer."""


class Mamba2Mixer(nn.Module):
    """The state space in place of attention; state and convolution go on from a cache.

    Attributes:
      config: The decoder.
      sizes: Of heads and convolution.
      dtype: Of the projections; convolution, recurrence and state are float32.
    """

    config: TransformerConfig
    sizes: Mamba2
    dtype: Any

    def setup(self) -> None:
        """Names the projections and the small parameters."""
        config, sizes = self.config, self.sizes
        keys, values = (sizes.groups, sizes.state_dim), (sizes.heads, sizes.head_dim)

        def project(*outputs: int) -> Projection:
            return Projection((config.width,), outputs, False, config.init_range, self.dtype)

        def small(name: str, init: Any, *shape: int) -> Array:
            parameter: Array = self.param(name, init, shape, jnp.float32)
            return parameter

        self.q, self.k, self.v = project(*keys), project(*keys), project(*values)
        self.gate, self.step = project(*values), project(sizes.heads)
        self.o = Projection(values, (config.width,), False, residual_init_range(config), self.dtype)
        if sizes.norm is not None:
            per_group = (sizes.groups, sizes.heads // sizes.groups, sizes.head_dim)
            self.norm = Norm("rms", config.norm_epsilon, per_group, jnp.float32, num_axes=2)
        taps, zeros = nn.initializers.normal(config.init_range), nn.initializers.zeros_init()
        shapes = {"q": keys, "k": keys, "v": values}
        self.taps = {part: small(f"{part}_taps", taps, *shape, sizes.taps) for part, shape in shapes.items()}
        if sizes.taps_bias:
            self.taps_bias = {
                part: small(f"{part}_taps_bias", zeros, *shape) for part, shape in shapes.items()
            }
        self.log_rates = small("log_rates", _init_log_rates, sizes.heads)
        self.step_bias = small("step_bias", init_step_bias, sizes.heads)
        self.skip = small("skip", nn.initializers.ones_init(), sizes.heads)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: StateCache | None
    ) -> tuple[Float[Array, "B Q D"], StateCache | None]:
        """Answers for every token, to be added to the residual stream, and the cache's entry after them."""
        rows, sizes = context.recurrent, self.sizes
        assert rows is not None
        x = rows.take(x)
        entry = cache if cache is not None else empty_mamba2(sizes, x.shape[0], self.dtype)
        q_tail, k_tail, v_tail = entry.tails
        q, q_tail = self._convolved("q", self.q(x) * sizes.query_scale, rows, q_tail)
        k, k_tail = self._convolved("k", self.k(x) * sizes.key_scale, rows, k_tail)
        v, v_tail = self._convolved("v", self.v(x) * sizes.value_scale, rows, v_tail)
        v = constrain(v, "batch", None, "heads", None)
        steps = self._steps(x)
        # A step of 0 neither lets the state decay nor takes up a value: padding is left out.
        steps = jnp.where(rows.real[:, :, None], steps, 0.0)
        rates = jnp.exp(as_row(self.log_rates.astype(jnp.float32), 3))
        inputs = StateSpaceInputs(q, k, steps[..., None] * v, -rates * steps)
        assert entry.state is not None
        if x.shape[1] == 1:
            read, state = state_space_step(inputs, entry.state)
        else:
            read, state = state_space_rows(inputs, entry.state, rows.segments)
        read = read + self.skip.astype(jnp.float32)[None, None, :, None] * v
        out = self.o(self._gated(read, x).astype(self.dtype)) * sizes.out_scale
        after = StateCache((q_tail, k_tail, v_tail), constrain_cache(state))
        return rows.put_back(out), None if cache is None else after

    def _convolved(
        self, part: str, x: Float[Array, "B Q N H"], rows: RecurrentRows, tail: Float[Array, "B N T H"]
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N T H"]]:
        """One of queries, keys and values after the convolution, and the newest inputs of this."""
        sums, newest = convolve(x, self.taps[part], rows, tail.swapaxes(1, 2))
        if self.sizes.taps_bias:
            sums = sums + as_row(self.taps_bias[part].astype(jnp.float32), sums.ndim)
        # Rounded as the projections are, as in the torch implementation.
        mixed = jax.nn.silu(sums).astype(self.dtype).astype(jnp.float32)
        return mixed, constrain_cache(newest.swapaxes(1, 2))

    def _steps(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q N"]:
        """Δ of every token and head, between its limits."""
        raw = (self.step(x) * self.sizes.step_scale).astype(jnp.float32)
        least, largest = self.sizes.step_limits
        return jnp.clip(jax.nn.softplus(raw + as_row(self.step_bias.astype(jnp.float32), 3)), least, largest)

    def _gated(self, read: Float[Array, "B Q N V"], x: Float[Array, "B Q D"]) -> Float[Array, "B Q N V"]:
        """What is read under the gate, and under the norm of each group if there is one."""
        sizes = self.sizes
        gate = jax.nn.silu((self.gate(x) * sizes.gate_scale).astype(jnp.float32))
        if sizes.norm == "before_gate":
            read = self._normed(read) * gate
        else:
            read = read * gate
            read = read if sizes.norm is None else self._normed(read)
        return constrain(read, "batch", None, "heads", None)

    def _normed(self, read: Float[Array, "B Q N V"]) -> Float[Array, "B Q N V"]:
        groups = read.reshape(*read.shape[:2], self.sizes.groups, -1, read.shape[-1])
        return self.norm(groups).reshape(read.shape)


def empty_mamba2(sizes: Mamba2, batch_size: int, dtype: Any) -> StateCache:
    """The entry before the first token."""
    keys, values = (sizes.groups, sizes.state_dim), (sizes.heads, sizes.head_dim)
    tails = tuple(
        constrain_cache(jnp.zeros((batch_size, heads, sizes.taps - 1, width), dtype))
        for heads, width in (keys, keys, values)
    )
    state = jnp.zeros((batch_size, sizes.heads, sizes.state_dim, sizes.head_dim), jnp.float32)
    return StateCache(tails, constrain_cache(state))


def _init_log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, MOST_DECAY))


def init_step_bias(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Biases whose softplus is a step between the bounds, evenly in its logarithm."""
    low, high = (math.log(step) for step in FRESH_STEPS)
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return jnp.log(jnp.expm1(steps))
