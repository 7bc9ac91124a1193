# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): a cache of one short vector a token for all heads.

Rows that are read whole, and prompts, expand keys and values from it and attend as any attention does. A step of
decoding does not expand the whole cache for one query: it takes the queries to the short vectors instead. The two
differ by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain
from jrl.models.attention import AttentionContext, attend, residual_init_range, weight_dropout
from jrl.models.cache import LatentCache, attend_written, constrain_cache
from jrl.models.config import LatentAttention, LayerConfig, TransformerConfig
from jrl.models.layers import Norm, Projection
from jrl.models.positions import rotate
from jrl.models.score_blocks import Operands


class LatentMixer(nn.Module):
    """Latent attention of one block.

    Attributes:
      config: The decoder; queries have `config.num_heads` heads.
      layer: Scale, window and rotary positions of this layer, if it has any.
      sizes: Of the short vectors and of a head.
      dtype: Of the computation; scores and softmax are float32 always.
    """

    config: TransformerConfig
    layer: LayerConfig
    sizes: LatentAttention
    dtype: Any

    def setup(self) -> None:
        """Names the projections and norms."""
        config, sizes, heads = self.config, self.sizes, self.config.num_heads
        width, query_dim = config.width, sizes.plain_dim + sizes.rope_dim

        def project(size_in: int, *outputs: int, use_bias: bool = False) -> Projection:
            return Projection((size_in,), outputs, use_bias, config.init_range, self.dtype)

        def norm(size: int) -> Norm:
            return Norm("rms", sizes.norm_epsilon, (size,), self.dtype)

        if sizes.query_rank is None:
            self.q = project(width, heads, query_dim)
        else:
            self.q_down = project(width, sizes.query_rank, use_bias=config.qkv_bias)
            self.q_norm = norm(sizes.query_rank)
            self.q_up = project(sizes.query_rank, heads, query_dim)
        self.kv_down = project(width, sizes.rank, use_bias=config.qkv_bias)
        self.k_rope = project(width, sizes.rope_dim, use_bias=config.qkv_bias)
        self.kv_norm = norm(sizes.rank)
        self.k_up = project(sizes.rank, heads, sizes.plain_dim)
        self.v_up = project(sizes.rank, heads, sizes.value_dim)
        self.o = Projection(
            (heads, sizes.value_dim),
            (width,),
            config.attention_out_bias,
            residual_init_range(config),
            self.dtype,
        )
        self.dropout = nn.Dropout(config.attention_dropout)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: LatentCache | None
    ) -> tuple[Float[Array, "B Q D"], LatentCache | None]:
        """Output of attention, to be added to the residual stream, and the cache with the new columns."""
        rope, sizes = self.layer.rope, self.sizes
        q = self.q(x) if sizes.query_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q_plain, q_rope = jnp.split(q, [sizes.plain_dim], axis=-1)
        k_rope = self.k_rope(x)[:, :, None]
        if rope is not None:
            rotation = context.rotations[self.config.ropes.index(rope)]
            q_rope, k_rope = (
                rotate(part, rotation, interleaved=rope.interleaved) for part in (q_rope, k_rope)
            )
        q = constrain(jnp.concatenate([q_plain, q_rope], axis=-1), "batch", None, "heads", None)
        latents = self.kv_norm(self.kv_down(x))
        if cache is None:
            k, v = self.k_up(latents), self.v_up(latents)
            k = jnp.concatenate([k, jnp.broadcast_to(k_rope, (*k.shape[:3], sizes.rope_dim))], axis=-1)
            k, v = (constrain_cache(part.swapaxes(1, 2)) for part in (k, v))
            out = self._attention()(self._operands(q, (k,), (v,), context))
        else:
            assert context.column is not None
            new = jnp.concatenate([latents[:, None], k_rope.swapaxes(1, 2)], axis=-1)
            cache = cache.append(new, context.column)
            out = self._attend_cached(q, cache, context)
        return self.o(constrain(out, "batch", None, "heads", None)), cache

    def _attend_cached(
        self, q: Float[Array, "B Q N H"], cache: LatentCache, context: AttentionContext
    ) -> Float[Array, "B Q N V"]:
        k_up, v_up = self.k_up.whole_kernel(q), self.v_up.whole_kernel(q)
        whole, rank = self._attention(), self.sizes.rank
        assert context.column is not None

        def expand(buffer: Float[Array, "B 1 S R"]) -> tuple[Array, Array]:
            latents, k_rope = buffer[:, 0, :, :rank], buffer[:, :, :, rank:]
            k = jnp.einsum("bsr,rnh->bnsh", latents, k_up)
            k_rope = jnp.broadcast_to(k_rope, (*k.shape[:3], k_rope.shape[-1]))
            v = jnp.einsum("bsr,rnh->bnsh", latents, v_up)
            return constrain_cache(jnp.concatenate([k, k_rope], axis=-1)), constrain_cache(v)

        def expanded(operands: Operands) -> Float[Array, "B Q N V"]:
            k, v = zip(*map(expand, operands.k), strict=True)
            return whole(operands._replace(k=k, v=v))

        if q.shape[1] > 1:
            operands = self._operands(q, cache.latents, cache.latents, context)
            return attend_written(expanded, operands, context.column)
        q_plain, q_rope = jnp.split(q, [self.sizes.plain_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bqnh,rnh->bqnr", q_plain, k_up), q_rope], axis=-1)
        operands = self._operands(q, cache.latents, cache.latents, context)
        # What lies behind the rank are rotary keys, which no value is made of.
        read = attend_written(whole, operands, context.column)[..., :rank]
        return jnp.einsum("bqnr,rnh->bqnh", read, v_up)

    def _operands(
        self,
        q: Float[Array, "B Q N H"],
        k: tuple[Float[Array, "B K S H"], ...],
        v: tuple[Float[Array, "B K S V"], ...],
        context: AttentionContext,
    ) -> Operands:
        assert context.masks is not None
        return Operands(q, k, v, context.masks[self.config.reaches.index(self.layer.reach)])

    def _attention(self) -> Callable[[Operands], Float[Array, "B Q N V"]]:
        dropout = weight_dropout(self.dropout)
        return functools.partial(attend, scale=self.layer.attention_scale, dropout=dropout)
