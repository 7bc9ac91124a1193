# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks of attention and MLP: a class for each kind, chosen by `TransformerConfig.block`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.mesh import constrain
from jrl.models.attention import AttentionContext, residual_init_range
from jrl.models.cache import LayerEntry
from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.experts import ExpertsMlp
from jrl.models.layers import ACTIVATIONS, Norm, Projection
from jrl.models.mixers import make_mixer

Stream = Float[Array, "B Q D"]


class Mlp(nn.Module):
    """The feed-forward half of a block, gated or not.

    Attributes:
      config: The decoder.
      dtype: Of the computation.
      width: Inner width; None: the config's `mlp_width`.
    """

    config: TransformerConfig
    dtype: Any
    width: int | None = None

    def setup(self) -> None:
        """Names the projections."""
        config, inner = self.config, self.width or self.config.mlp_width
        wide = ((config.width,), (inner,), config.mlp_bias, config.init_range, self.dtype)
        self.up = Projection(*wide)
        if config.gated_mlp:
            self.gate = Projection(*wide)
        self.down = Projection(
            (inner,), (config.width,), config.mlp_bias, residual_init_range(config), self.dtype
        )

    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Output of the MLP, to be added to the residual stream."""
        config = self.config
        activation = ACTIVATIONS[config.activation]
        if config.gated_mlp:
            y = activation(_scaled(self.gate(x), config.mlp_gate_scale)) * self.up(x)
        else:
            y = activation(self.up(x))
        return _scaled(self.down(constrain(y, "batch", None, "mlp")), config.mlp_out_scale)


def _scaled(x: Stream, scale: float | None) -> Stream:
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def stream_norm(config: TransformerConfig, dtype: Any) -> Norm:
    """A norm over the residual stream."""
    return Norm(config.norm, config.norm_epsilon, (config.width,), dtype)


class _Block(nn.Module):
    """Base class of the blocks.

    Attributes:
      config: The decoder.
      layer: What is particular to this layer.
      dtype: Of the computation.
    """

    config: TransformerConfig
    layer: LayerConfig
    dtype: Any

    def setup(self) -> None:
        """Names the mixer of tokens, `attn` whatever its kind, and the MLP."""
        config = self.config
        if self.layer.only != "feed_forward":
            self.attn = make_mixer(config, self.layer, self.dtype)
        if self.layer.only != "mixer":
            self._name_feed_forward()
        self.dropout = nn.Dropout(config.residual_dropout)

    def _name_feed_forward(self) -> None:
        config, experts = self.config, self.layer.experts
        if experts is None or experts.beside_mlp:
            self.mlp = Mlp(config, self.dtype, self.layer.mlp_width)
        if experts is None:
            return
        self.experts = ExpertsMlp(config, experts, self.dtype)
        if experts.beside_mlp:
            self.experts_norm, self.experts_out_norm = self.norm(), self.norm()
            self.mlp_part_norm = self.norm()
        if experts.shared_width is not None:
            self.shared_mlp = Mlp(config, self.dtype, experts.shared_width)
        if experts.shared_gate:
            self.shared_gate = Projection((config.width,), (1,), False, config.init_range, self.dtype)

    def norm(self) -> Norm:
        """A norm over the residual stream."""
        return stream_norm(self.config, self.dtype)

    def feed_forward(self, x: Stream, stream: Stream) -> Stream:
        """The MLP; or the mixture of experts in its place, with the MLP that all tokens share, or beside it.

        Args:
          x: What is read: the stream, normalised where the block does so.
          stream: The stream itself.
        """
        experts = self.layer.experts
        if experts is None:
            return self.mlp(x)
        if experts.beside_mlp:
            routed = self.experts_out_norm(self.experts(self.experts_norm(stream), stream))
            return self.mlp_part_norm(self.mlp(x)) + routed
        y = self.experts(x, stream)
        if experts.shared_width is None:
            return y
        shared = self.shared_mlp(x)
        return y + (nn.sigmoid(self.shared_gate(x)) * shared if experts.shared_gate else shared)

    def add(self, x: Stream, *updates: Stream) -> Stream:
        """The residual stream with what the sublayers add to it."""
        scale = self.config.residual_scale
        for update in updates:
            if scale is not None:
                update = update * jnp.asarray(scale, update.dtype)
            x = x + self.dropout(update, deterministic=not self.has_rng("dropout"))
        return constrain(x, "batch", None, None)


class SequentialBlock(_Block):
    """x += attention(x), then x += MLP(x), with a norm before each, after each, or both. A layer may have one alone.

    Where the decoder says so, x += norm(out(act(gate(x)) · what the layer reads of the token)) comes next, and last the
    stream is scaled.

    Attributes:
      norm_inputs: The sublayers read a normalised stream.
      norm_outputs: What they add is normalised.
    """

    norm_inputs: bool = True
    norm_outputs: bool = False

    def setup(self) -> None:
        """Names the norms, and what follows the two sublayers."""
        super().setup()
        config = self.config
        mixes, feeds_forward = self.layer.only != "feed_forward", self.layer.only != "mixer"
        if self.norm_inputs and mixes:
            self.attn_norm = self.norm()
        if self.norm_inputs and feeds_forward:
            self.mlp_norm = self.norm()
        if self.norm_outputs:
            self.attn_out_norm, self.mlp_out_norm = self.norm(), self.norm()
        if config.layer_input_width is not None:
            narrow, wide = (config.layer_input_width,), (config.width,)
            self.input_gate = Projection(wide, narrow, False, config.init_range, self.dtype)
            self.input_out = Projection(narrow, wide, False, residual_init_range(config), self.dtype)
            self.input_norm = self.norm()
        if config.stream_scale:
            self.stream_scale = self.param("stream_scale", nn.initializers.ones_init(), (1,), jnp.float32)

    def __call__(
        self,
        x: Stream,
        context: AttentionContext,
        cache: LayerEntry | None,
        layer_input: Float[Array, "B Q P"] | None = None,
    ) -> tuple[Stream, LayerEntry | None]:
        """The residual stream after this layer, and its cache."""
        if self.layer.only != "feed_forward":
            y, cache = self.attn(self.attn_norm(x) if self.norm_inputs else x, context, cache)
            x = self.add(x, self.attn_out_norm(y) if self.norm_outputs else y)
        if self.layer.only != "mixer":
            y = self.feed_forward(self.mlp_norm(x) if self.norm_inputs else x, x)
            x = self.add(x, self.mlp_out_norm(y) if self.norm_outputs else y)
        if self.config.layer_input_width is not None:
            assert layer_input is not None
            y = ACTIVATIONS[self.config.activation](self.input_gate(x)) * layer_input
            x = self.add(x, self.input_norm(self.input_out(constrain(y, "batch", None, "mlp"))))
        if self.config.stream_scale:
            x = x * jax.lax.stop_gradient(self.stream_scale)[None, None].astype(x.dtype)
        return x, cache


class ParallelBlock(_Block):
    """x += attention(x) + MLP(x): both read the stream as it came in, through one norm or one each.

    Attributes:
      two_norms: The MLP has a norm of its own.
    """

    two_norms: bool = False

    def setup(self) -> None:
        """Names the norms."""
        super().setup()
        self.attn_norm = self.norm()
        if self.two_norms:
            self.mlp_norm = self.norm()

    def __call__(
        self, x: Stream, context: AttentionContext, cache: LayerEntry | None
    ) -> tuple[Stream, LayerEntry | None]:
        """The residual stream after this layer, and its cache."""
        normed = self.attn_norm(x)
        attended, cache = self.attn(normed, context, cache)
        fed = self.feed_forward(self.mlp_norm(x) if self.two_norms else normed, x)
        return self.add(x, attended, fed), cache


class PostNormBlock(_Block):
    """x = norm(x + attention(x)), then x = norm(x + MLP(x)): the stream itself is normalised."""

    def setup(self) -> None:
        """Names the norms."""
        super().setup()
        self.attn_norm, self.mlp_norm = self.norm(), self.norm()

    def __call__(
        self, x: Stream, context: AttentionContext, cache: LayerEntry | None
    ) -> tuple[Stream, LayerEntry | None]:
        """The stream after this layer, and its cache."""
        y, cache = self.attn(x, context, cache)
        x = self.attn_norm(self.add(x, y))
        return self.mlp_norm(self.add(x, self.feed_forward(x, x))), cache


BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "pre_norm": SequentialBlock,
    "sandwich": partial(SequentialBlock, norm_outputs=True),
    "output_norm": partial(SequentialBlock, norm_inputs=False, norm_outputs=True),
    "parallel": ParallelBlock,
    "parallel_two_norms": partial(ParallelBlock, two_norms=True),
    "post_norm": PostNormBlock,
}


def make_block(
    config: TransformerConfig, layer: LayerConfig, dtype: Any, *, remat: bool = False, alone: bool = False
) -> nn.Module:
    """Builds a layer of the decoder.

    Args:
      config: The decoder.
      layer: What is particular to this layer.
      dtype: Of the computation.
      remat: Recompute its activations in the backward pass.
      alone: It is no part of the module in which this is called.
    """
    make = BLOCKS[config.block]
    if remat:
        kind, options = (make.func, make.keywords) if isinstance(make, partial) else (make, {})
        make = partial(nn.remat(kind), **options)
    return make(config, layer, dtype, parent=None) if alone else make(config, layer, dtype)


def equal_layers(
    config: TransformerConfig, start: int, dtype: Any, first_trained: int
) -> Callable[[int], tuple[Hashable, nn.Module]]:
    """`run_blocks`' question about the layers from `start` on: what two that share a body have in common."""

    def alike(index: int) -> tuple[Hashable, nn.Module]:
        layer = config.layers[start + index]
        return (layer, start + index < first_trained), make_block(config, layer, dtype, alone=True)

    return alike
