# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks over two streams, an image's patches and a prompt's tokens, which attend together.

Reference: Esser et al. 2024, arXiv:2403.03206, section 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain, constrain_rows
from jrl.models.diffusion.layers import fan_in_range, linear
from jrl.models.diffusion.modulation import EPSILON, Modulation, modulated
from jrl.models.diffusion.transformer import attend
from jrl.models.layers import Norm, Projection
from jrl.models.positions import Rotation, rotate

LORA_TARGETS = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)
"""The projections of the joint attention: what an adapter adapts where its configuration names nothing."""


class Heads(NamedTuple):
    """Shape of an attention.

    Attributes:
      num_heads: N.
      width: H of each.
      is_normed: Whether queries and keys have an RMS norm in each head.
    """

    num_heads: int
    width: int
    is_normed: bool

    @property
    def total(self) -> int:
        """N · H, the width of the streams."""
        return self.num_heads * self.width


def split_heads(
    x: Float[Array, "B P D"],
    heads: Heads,
    projections: tuple[str, str, str],
    norms: tuple[str, str],
    dtype: Any,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N H"], Float[Array, "B P N H"]]:
    """Queries, keys and values of a stream; the layers are those of the module that calls.

    Args:
      x: The stream.
      heads: Of the attention.
      projections: Names of the three linear maps.
      norms: Names of the norms of queries and keys.
      dtype: Of the projections.
    """
    shape = (heads.num_heads, heads.width)

    def project(name: str) -> Float[Array, "B P N H"]:
        y = Projection((heads.total,), shape, True, fan_in_range(heads.total), dtype, name=name)(x)
        return constrain(y, "batch", None, "heads", None)

    queries, keys, values = project(projections[0]), project(projections[1]), project(projections[2])
    if heads.is_normed:
        queries = Norm("rms", EPSILON, shape[1:], dtype, name=norms[0])(queries)
        keys = Norm("rms", EPSILON, shape[1:], dtype, name=norms[1])(keys)
    return queries, keys, values


def attend_rotated(
    queries: Float[Array, "B P N H"],
    keys: Float[Array, "B P N H"],
    values: Float[Array, "B P N H"],
    rotation: Rotation | None,
) -> Float[Array, "B P N H"]:
    """Attention of all to all, with queries and keys turned by their positions where there is a rotation."""
    if rotation is not None:
        queries, keys = (rotate(part, rotation, interleaved=True) for part in (queries, keys))
    return constrain(attend(queries, keys, values), "batch", None, "heads", None)


class JointAttention(nn.Module):
    """Attention of the image's tokens, and the prompt's where they are given, to all of them.

    Attributes:
      heads: Of it.
      makes_context: The prompt's tokens are written, too; in the last block they are only read.
      dtype: Of the projections.
    """

    heads: Heads
    makes_context: bool
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B P D"],
        context: Float[Array, "B Q D"] | None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B Q D"] | None]:
        """Attends, and returns what both streams gain before their gates; None for a prompt that is not written."""
        names = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
        queries, keys, values = split_heads(x, self.heads, *names, self.dtype)
        if context is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")
            added = split_heads(context, self.heads, *names, self.dtype)
            parts = zip((queries, keys, values), added, strict=True)
            queries, keys, values = (jnp.concatenate(pair, axis=1) for pair in parts)
        y = attend_rotated(queries, keys, values, rotation)
        made = self._out(y[:, : x.shape[1]], "to_out_0")
        if context is None or not self.makes_context:
            return made, None
        return made, self._out(y[:, x.shape[1] :], "to_add_out")

    def _out(self, y: Float[Array, "B P N H"], name: str) -> Float[Array, "B P D"]:
        width = self.heads.total
        return Projection(y.shape[2:], (width,), True, fan_in_range(width), self.dtype, name=name)(y)


class Gelu(nn.Module):
    """A linear map and GELU by its tanh formula.

    Attributes:
      width: Of the result.
      dtype: Of the linear map.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P E"]:
        """(B, P, D) to (B, P, width)."""
        y = constrain(linear(x.shape[-1], self.width, self.dtype, name="proj")(x), "batch", None, "mlp")
        return nn.gelu(y, approximate=True)


class FeedForward(nn.Module):
    """A layer four times as wide as its input, and a linear map back.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        """Output of the MLP, before its gate."""
        width = x.shape[-1]
        return linear(4 * width, width, self.dtype, name="net_2")(
            Gelu(4 * width, self.dtype, name="net_0")(x)
        )


class JointBlock(nn.Module):
    """Joint attention and a feed-forward layer for each stream, all shifted, scaled and gated by the timestep.

    Attributes:
      heads: Of its attentions.
      dtype: Of the computation.
      is_dual: The image's stream also attends to itself alone.
      is_last: The prompt's stream is read and not written.
    """

    heads: Heads
    dtype: Any
    is_dual: bool = False
    is_last: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B P D"],
        context: Float[Array, "B Q D"],
        time: Float[Array, "B D"],
        rotation: Rotation | None = None,
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B Q D"]]:
        """Both streams behind the block.

        Args:
          x: The image's.
          context: The prompt's.
          time: The embedded timestep.
          rotation: Of the image's tokens and then the prompt's; None: nothing is turned.
        """
        is_dual, is_last = self.is_dual, self.is_last
        shift, scale, gate, late_shift, late_scale, late_gate, *dual = Modulation(
            9 if is_dual else 6, self.dtype, name="norm1"
        )(time)
        of_context = Modulation(2 if is_last else 6, self.dtype, name="norm1_context")(time)
        # The norm at an end is written with its scale first.
        context_shift, context_scale = of_context[:2][::-1] if is_last else of_context[:2]
        attention = JointAttention(self.heads, not is_last, self.dtype, name="attn")
        made, written = attention(
            modulated(x, shift, scale), modulated(context, context_shift, context_scale), rotation
        )
        after = x + gate * made
        if is_dual:
            second = JointAttention(self.heads, False, self.dtype, name="attn2")
            after += dual[2] * second(modulated(x, dual[0], dual[1]), None)[0]
        ff = FeedForward(self.dtype, name="ff")
        x = constrain_rows(after + late_gate * ff(modulated(after, late_shift, late_scale)))
        if written is None:
            return x, context
        _, _, gate, late_shift, late_scale, late_gate = of_context
        context = context + gate * written
        ff = FeedForward(self.dtype, name="ff_context")
        return x, constrain_rows(context + late_gate * ff(modulated(context, late_shift, late_scale)))
