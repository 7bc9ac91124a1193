# SPDX-License-Identifier: Apache-2.0
"""Attention over the places of an image and over a prompt (Rombach et al. 2022, arXiv:2112.10752, appendix E.2.1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain, constrain_rows, rows_parts
from jrl.models.diffusion.layers import Conv, GroupNorm, fan_in_range, linear
from jrl.models.layers import Norm, Projection

GROUP_NORM_EPSILON = 1e-6
LAYER_NORM_EPSILON = 1e-5
# Of the scores that one device holds at once, in bytes; more are made in chunks of queries. An image of 512 pixels has
# 4096 places on its first level: 2^24 scores, 64 MiB in float32, for each of 8 heads and each row, which the backward
# pass would keep. The next level has a sixteenth of that, which fits for 8 rows, and is faster at once.
SCORES_BYTES = 1 << 28
# Fewer queries at a time would not fill a matrix product, however many rows there are.
LEAST_QUERIES = 64


def attend(
    q: Float[Array, "B Q N H"], k: Float[Array, "B S N H"], v: Float[Array, "B S N H"]
) -> Float[Array, "B Q N H"]:
    """Softmax attention of every query to every key; scores and softmax are float32 whatever the dtype is.

    So the config key `upcast_attention` asks for nothing more: the products of half-precision q and k are exact in
    float32, and are never rounded. A fused kernel would not need the chunks; cuDNN's has limits on head widths that
    Stable Diffusion 1.5 passes (160), and bounds no memory on other devices.
    """
    queries = queries_at_once(q.shape, k.shape[1])
    if q.shape[1] <= queries:
        return _attend_at_once(q, k, v)

    # The backward pass makes the scores of a chunk anew: kept, they would be all scores again.
    @jax.checkpoint
    def one_query(query: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        return _attend_at_once(query[:, None], k, v)[:, 0]

    return jax.lax.map(one_query, q.swapaxes(0, 1), batch_size=queries).swapaxes(0, 1)


def queries_at_once(shape: tuple[int, ...], num_keys: int) -> int:
    """Queries whose scores fit into `SCORES_BYTES` of a device, a power of two.

    Args:
      shape: (rows, queries, heads, width); the rows are split over the mesh in force.
      num_keys: S.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = -(-shape[0] // rows_parts(mesh))
    fitting = SCORES_BYTES // (rows * shape[2] * num_keys * np.dtype(np.float32).itemsize)
    # Places are divisible by powers of two: no chunk is left over.
    return 1 << (max(LEAST_QUERIES, fitting).bit_length() - 1)


def _attend_at_once(
    q: Float[Array, "B Q N H"], k: Float[Array, "B S N H"], v: Float[Array, "B S N H"]
) -> Float[Array, "B Q N H"]:
    scores = jnp.einsum("bqnh,bsnh->bnqs", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(v.dtype)
    out = jnp.einsum("bnqs,bsnh->bqnh", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


class CrossAttention(nn.Module):
    """Attention to a context; with the input itself as context, self-attention.

    Attributes:
      num_heads: N; divides the width of the input.
      dtype: Of the projections.
    """

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"], context: Float[Array, "B S E"]) -> Float[Array, "B P D"]:
        """Output of attention, to be added to the residual stream."""
        width = x.shape[-1]
        heads = (self.num_heads, width // self.num_heads)

        def project(name: str, source: Float[Array, "B S E"]) -> Float[Array, "B S N H"]:
            size = source.shape[-1]
            y = Projection((size,), heads, False, fan_in_range(size), self.dtype, name=name)(source)
            return constrain(y, "batch", None, "heads", None)

        q, k, v = project("to_q", x), project("to_k", context), project("to_v", context)
        y = constrain(attend(q, k, v), "batch", None, "heads", None)
        return Projection(heads, (width,), True, fan_in_range(width), self.dtype, name="to_out_0")(y)


class GatedGelu(nn.Module):
    """Gated GELU (Shazeer 2020, arXiv:2002.05202): half of a linear map times the exact GELU of the other half.

    Attributes:
      width: Of each half.
      dtype: Of the linear map.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P E"]:
        """(B, P, D) to (B, P, width)."""
        size = x.shape[-1]
        # The halves have an axis of their own, so that each is split over the mesh in the same way.
        project = Projection((size,), (2, self.width), True, fan_in_range(size), self.dtype, name="proj")
        halves = constrain(project(x), "batch", None, None, "mlp")
        return halves[:, :, 0] * nn.gelu(halves[:, :, 1], approximate=False)


class FeedForward(nn.Module):
    """The gated layer, four times as wide as its input, and a linear map back.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        """Output of the MLP, to be added to the residual stream."""
        width = x.shape[-1]
        x = GatedGelu(4 * width, self.dtype, name="net_0")(x)
        return linear(4 * width, width, self.dtype, name="net_2")(x)


class TransformerBlock(nn.Module):
    """Self-attention, attention to the prompt and a feed-forward layer, each after a norm and beside the identity.

    Attributes:
      num_heads: Of both attentions.
      dtype: Of the computation.
    """

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"], context: Float[Array, "B Q E"]) -> Float[Array, "B P D"]:
        """The residual stream behind the block."""

        def norm(name: str) -> Norm:
            return Norm("layer", LAYER_NORM_EPSILON, (x.shape[-1],), self.dtype, name=name)

        h = norm("norm1")(x)
        x = x + CrossAttention(self.num_heads, self.dtype, name="attn1")(h, h)
        x = x + CrossAttention(self.num_heads, self.dtype, name="attn2")(norm("norm2")(x), context)
        return x + FeedForward(self.dtype, name="ff")(norm("norm3")(x))


class SpatialTransformer(nn.Module):
    """Transformer blocks over the places of an image, row by row, between two linear maps, beside the identity.

    Attributes:
      num_blocks: Of them.
      num_heads: Of their attentions.
      num_groups: Of the norm at the entrance.
      linear_projection: The two maps are stored as linear ones rather than as 1 × 1 convolutions.
      dtype: Of the computation.
    """

    num_blocks: int
    num_heads: int
    num_groups: int
    linear_projection: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Y X D"], context: Float[Array, "B Q E"]) -> Float[Array, "B Y X D"]:
        """The image behind the blocks."""
        batch, height, width, channels = x.shape

        def project(name: str) -> nn.Module:
            if self.linear_projection:
                return linear(channels, channels, self.dtype, name=name)
            return Conv(channels, 1, self.dtype, name=name)

        h = project("proj_in")(GroupNorm(self.num_groups, GROUP_NORM_EPSILON, name="norm")(x))
        h = h.reshape(batch, height * width, channels)
        for index in range(self.num_blocks):
            h = TransformerBlock(self.num_heads, self.dtype, name=f"transformer_blocks_{index}")(h, context)
        h = project("proj_out")(h.reshape(x.shape))
        return constrain_rows(x.astype(self.dtype) + h)
