# SPDX-License-Identifier: Apache-2.0
"""A layer of Mamba (Gu and Dao 2023, arXiv:2312.00752): convolution, selective scan, and a gate.

Queries, keys and values are what the paper calls C, B and x; see `jrl.models.mixers.selective_scan`. Queries, keys and
the short vector that the steps Δ are expanded from are normalised, as Jamba does it (arXiv:2403.19887).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.models.attention import AttentionContext, residual_init_range
from jrl.models.cache import StateCache, constrain_channels
from jrl.models.config import Mamba1, TransformerConfig
from jrl.models.layers import Norm, Projection, as_row
from jrl.models.mixers.convolution import convolve
from jrl.models.mixers.mamba2 import init_step_bias
from jrl.models.mixers.selective_scan import SelectiveInputs, selective_rows, selective_step


class Mamba1Mixer(nn.Module):
    """The selective scan in place of attention; state and convolution go on from a cache.

    Attributes:
      config: The decoder.
      sizes: Of channels, state and convolution.
      dtype: Of the projections; convolution, recurrence and state are float32.
    """

    config: TransformerConfig
    sizes: Mamba1
    dtype: Any

    def setup(self) -> None:
        """Names the projections, the norms and the small parameters."""
        config, sizes = self.config, self.sizes

        def project(size_in: int, size_out: int, init_range: float = config.init_range) -> Projection:
            return Projection((size_in,), (size_out,), False, init_range, self.dtype)

        def norm(size: int) -> Norm:
            return Norm("rms", config.norm_epsilon, (size,), self.dtype)

        def small(name: str, init: Any, *shape: int) -> Array:
            parameter: Array = self.param(name, init, shape, jnp.float32)
            return parameter

        self.v, self.gate = (project(config.width, sizes.width) for _ in range(2))
        self.q, self.k = (project(sizes.width, sizes.state_dim) for _ in range(2))
        self.step_down = project(sizes.width, sizes.step_rank)
        self.step_up = project(sizes.step_rank, sizes.width)
        self.out = project(sizes.width, config.width, residual_init_range(config))
        self.q_norm, self.k_norm = (norm(sizes.state_dim) for _ in range(2))
        self.step_norm = norm(sizes.step_rank)
        taps, zeros = nn.initializers.normal(config.init_range), nn.initializers.zeros_init()
        self.v_taps = small("v_taps", taps, sizes.width, sizes.taps)
        if sizes.taps_bias:
            self.v_taps_bias = small("v_taps_bias", zeros, sizes.width)
        self.log_rates = small("log_rates", _init_log_rates, sizes.state_dim, sizes.width)
        self.step_bias = small("step_bias", init_step_bias, sizes.width)
        self.skip = small("skip", nn.initializers.ones_init(), sizes.width)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: StateCache | None
    ) -> tuple[Float[Array, "B Q D"], StateCache | None]:
        """Answers for every token, to be added to the residual stream, and the cache's entry after them."""
        rows = context.recurrent
        assert rows is not None
        x = rows.take(x)
        entry = cache if cache is not None else empty_mamba1(self.sizes, x.shape[0], self.dtype)
        sums, tail = convolve(self.v(x), self.v_taps, rows, entry.tails[0])
        if self.sizes.taps_bias:
            sums = sums + as_row(self.v_taps_bias.astype(jnp.float32), 3)
        v = constrain_channels(jax.nn.silu(sums).astype(self.dtype))
        # A step of 0 neither lets the state decay nor takes up a value: padding is left out.
        steps = jnp.where(rows.real[:, :, None], self._steps(v), 0.0)
        q, k = self.q_norm(self.q(v))[:, :, None], self.k_norm(self.k(v))[:, :, None]
        q, k, v = (part.astype(jnp.float32) for part in (q, k, v))
        inputs = SelectiveInputs(q, k, v, steps)
        rates = jnp.exp(self.log_rates.astype(jnp.float32))
        assert entry.state is not None
        if x.shape[1] == 1:
            read, state = selective_step(inputs, rates, entry.state)
        else:
            read, state = selective_rows(inputs, rates, entry.state, rows.segments)
        read = read + as_row(self.skip.astype(jnp.float32), 3) * v
        read = constrain_channels(read * jax.nn.silu(self.gate(x).astype(jnp.float32)))
        after = StateCache((constrain_channels(tail),), constrain_channels(state))
        return rows.put_back(self.out(read.astype(self.dtype))), None if cache is None else after

    def _steps(self, v: Float[Array, "B Q C"]) -> Float[Array, "B Q C"]:
        """Δ of every token and channel."""
        raw = self.step_up(self.step_norm(self.step_down(v))).astype(jnp.float32)
        return constrain_channels(jax.nn.softplus(raw + as_row(self.step_bias.astype(jnp.float32), 3)))


def empty_mamba1(sizes: Mamba1, batch_size: int, dtype: Any) -> StateCache:
    """The entry before the first token."""
    tail = jnp.zeros((batch_size, sizes.taps - 1, sizes.width), dtype)
    state = jnp.zeros((batch_size, sizes.state_dim, sizes.width), jnp.float32)
    return StateCache((constrain_channels(tail),), constrain_channels(state))


def _init_log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Rates 1 to K in every channel (S4D-Real), as in the paper's section 3.6."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[0] + 1, dtype=dtype))[:, None], shape)
