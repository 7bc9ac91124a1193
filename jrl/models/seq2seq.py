# SPDX-License-Identifier: Apache-2.0
"""The encoder-decoder of T5 (Raffel et al. 2020, arXiv:1910.10683), as parts applied with only their own parameters.

Every block is pre-norm with RMSNorm. Attention has no scale; a table of relative positions, one for each stack or each
layer, is added to the scores of self-attention. Dropout stands where the reference implementation has it: on
embeddings, attention weights, inside and behind every MLP, behind every attention, and on the output of both stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain, constrain_rows
from jrl.models.cache import Column, LayerCache
from jrl.models.layer_loop import run_blocks
from jrl.models.layers import ACTIVATIONS, Norm, Projection, Table, hide_padding
from jrl.models.seq2seq_attention import RelativeAttention, RelativeBias
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.models.transformer import Head

Stream = Float[Array, "B Q D"]
Bias = Float[Array, "1 N Q S"]


class Rows(NamedTuple):
    """Facts of the rows that the decoder's attention reads.

    Attributes:
      mask: True where query q may read key s of the decoder.
      queries: Columns of the queries.
      context_mask: True on real tokens of the encoder.
      column: Where the cache takes the next keys; None without a cache.
    """

    mask: Bool[Array, "B Q S"]
    queries: Int[Array, "Q"]
    context_mask: Bool[Array, "B C"]
    column: Column | None = None


class Mlp(nn.Module):
    """The feed-forward half of a block, gated or not, with dropout inside.

    Attributes:
      config: The model.
      dtype: Of the computation.
    """

    config: Seq2SeqConfig
    dtype: Any

    def setup(self) -> None:
        """Names the projections."""
        config = self.config
        narrow, wide = (config.width,), (config.mlp_width,)
        into, out = (config.init_factor * fan**-0.5 for fan in (config.width, config.mlp_width))
        self.up = Projection(narrow, wide, False, into, self.dtype)
        if config.gated_mlp:
            self.gate = Projection(narrow, wide, False, into, self.dtype)
        self.down = Projection(wide, narrow, False, out, self.dtype)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(self, x: Stream) -> Stream:
        """Output of the MLP, to be added to the residual stream."""
        activation = ACTIVATIONS[self.config.activation]
        y = activation(self.gate(x)) * self.up(x) if self.config.gated_mlp else activation(self.up(x))
        y = self.dropout(y, deterministic=not self.has_rng("dropout"))
        return self.down(constrain(y, "batch", None, "mlp"))


class _Block(nn.Module):
    """Base class of the blocks of both stacks.

    Attributes:
      reads_ahead: Self-attention reads later tokens too.
      config: The model.
      dtype: Of the computation.
    """

    reads_ahead: ClassVar[bool]
    config: Seq2SeqConfig
    dtype: Any

    def setup(self) -> None:
        """Names the parts."""
        if self.config.bias_in_every_layer:
            self.relative_bias = RelativeBias(self.config, both_ways=self.reads_ahead)
        self.attn, self.mlp = RelativeAttention(self.config, self.dtype), Mlp(self.config, self.dtype)
        self.attn_norm, self.mlp_norm = self.norm(), self.norm()
        self.dropout = nn.Dropout(self.config.dropout)

    def norm(self) -> Norm:
        """A norm over the residual stream."""
        return Norm("rms", self.config.norm_epsilon, (self.config.width,), self.dtype)

    def bias(self, of_stack: Bias | None, queries: Int[Array, "Q"], keys: Int[Array, "S"]) -> Bias:
        """The relative positions that the self-attention reads: this layer's where the stack has none."""
        return self.relative_bias(queries, keys) if of_stack is None else of_stack

    def add(self, x: Stream, update: Stream) -> Stream:
        """The residual stream with what a sublayer adds to it."""
        update = self.dropout(update, deterministic=not self.has_rng("dropout"))
        return constrain(x + update, "batch", None, None)


class EncoderBlock(_Block):
    """Self-attention over the whole context, then the MLP."""

    reads_ahead = True

    def __call__(self, x: Stream, mask: Bool[Array, "B Q S"], bias: Bias | None) -> Stream:
        """The residual stream after this layer; `bias` is None where every layer has its own."""
        normed, columns = self.attn_norm(x), jnp.arange(x.shape[1])
        bias = self.bias(bias, columns, columns)
        x = self.add(x, self.attn(normed, self.attn.memory(normed), mask, bias))
        return self.add(x, self.mlp(self.mlp_norm(x)))


class DecoderBlock(_Block):
    """Causal self-attention, attention over the encoder's output, then the MLP."""

    reads_ahead = False

    def setup(self) -> None:
        """Names the cross-attention beside what all blocks have."""
        super().setup()
        self.cross, self.cross_norm = RelativeAttention(self.config, self.dtype), self.norm()

    def read(self, encoded: Float[Array, "B C D"]) -> LayerCache:
        """Keys and values that the cross-attention has of the encoder's output."""
        return self.cross.memory(encoded)

    def __call__(
        self,
        x: Stream,
        source: Float[Array, "B C D"] | LayerCache,
        rows: Rows,
        bias: Bias | None,
        cache: LayerCache | None,
    ) -> tuple[Stream, LayerCache | None]:
        """The residual stream after this layer, and its cache.

        Args:
          x: The stream before it.
          source: The encoder's output, or `read` of it.
          rows: What attention needs to know.
          bias: Relative positions; None where every layer has its own.
          cache: Earlier keys and values; None without a cache.
        """
        bias = self.bias(bias, rows.queries, jnp.arange(rows.mask.shape[2]))
        normed = self.attn_norm(x)
        memory = self.attn.memory(normed)
        if cache is not None:
            assert rows.column is not None
            memory = cache = cache.append(memory, rows.column)
        x = self.add(x, self.attn(normed, memory, rows.mask, bias, rows.column))
        read = source if isinstance(source, LayerCache) else self.read(source)
        visible = rows.context_mask[:, None, :]
        visible = jnp.broadcast_to(visible, (visible.shape[0], x.shape[1], visible.shape[2]))
        x = self.add(x, self.cross(self.cross_norm(x), read, visible))
        return self.add(x, self.mlp(self.mlp_norm(x))), cache


class EncoderDecoder(nn.Module):
    """Both stacks. Call its methods through `apply`, with the parameters that the method touches.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms, softmax and logits are float32 whatever it is.
      remat: Recompute each layer's activations in the backward pass instead of keeping them.
      share_layers: Equal layers share one body of the program; None: where that is the platform's form.
    """

    config: Seq2SeqConfig
    dtype: Any = jnp.float32
    remat: bool = False
    share_layers: bool | None = None

    def setup(self) -> None:
        """Names the parts; what a method does not touch needs no parameters."""
        config = self.config
        self.embed = Table(config.padded_vocab_size, config.width, config.init_factor, "vocab")
        if not config.bias_in_every_layer:
            self.encoder_relative_bias = RelativeBias(config, both_ways=True)
            self.decoder_relative_bias = RelativeBias(config, both_ways=False)
        encoder, decoder = EncoderBlock, DecoderBlock
        if self.remat:
            encoder, decoder = nn.remat(EncoderBlock), nn.remat(DecoderBlock)
        self.encoder_layers = [encoder(config, self.dtype) for _ in range(config.num_encoder_layers)]
        self.layers = [decoder(config, self.dtype) for _ in range(config.num_layers)]
        self.encoder_final_norm, self.final_norm = (
            Norm("rms", config.norm_epsilon, (config.width,), self.dtype) for _ in range(2)
        )
        if not config.tie_embeddings:
            self.lm_head = Head(config.width, config.padded_vocab_size, False, config.init_factor, self.dtype)
        self.dropout = nn.Dropout(config.dropout)

    def outer_parts(self, ids: Int[Array, "B Q"]) -> Float[Array, "B Q V"]:
        """Touches every part but the layers, which is what `init` needs."""
        columns = jnp.arange(ids.shape[1])
        if not self.config.bias_in_every_layer:
            self.encoder_relative_bias(columns, columns), self.decoder_relative_bias(columns, columns)
        return self.logits(self.norm(self.encoder_final_norm(self.embed_tokens(ids))))

    def embed_tokens(self, tokens: Int[Array, "B Q"], is_whole: bool = False) -> Stream:
        """The residual stream before the first layer of either stack; `is_whole` as of `jrl.models.layers.Table`."""
        return self._drop(self.embed(tokens, self.dtype, is_whole=is_whole))

    def encode(
        self, tokens: Int[Array, "B C"], mask: Bool[Array, "B C"], is_whole: bool = False
    ) -> Float[Array, "B C D"]:
        """The encoder's output, which the decoder reads: garbage where padded. `is_whole` as of `embed_tokens`."""
        x, columns = self.embed_tokens(tokens, is_whole), jnp.arange(tokens.shape[1])
        bias = None if self.config.bias_in_every_layer else self.encoder_relative_bias(columns, columns)
        visible = jnp.broadcast_to(mask[:, None, :], (*tokens.shape, tokens.shape[1]))

        def call(block: Any, x: Array) -> Any:
            return block(x, visible, bias)

        x = self._run_blocks(self.encoder_layers, EncoderBlock, call, x)
        return self._drop(self.encoder_final_norm(x))

    def read_context(self, encoded: Float[Array, "B C D"]) -> tuple[LayerCache, ...]:
        """Keys and values for the cross-attention of each decoder layer: computed once, used by every token."""
        return tuple(layer.read(encoded) for layer in self.layers)

    def run_layers(
        self,
        x: Stream,
        sources: Float[Array, "B C D"] | tuple[LayerCache, ...],
        rows: Rows,
        start: int,
        stop: int,
        caches: tuple[LayerCache, ...] | None = None,
    ) -> tuple[Stream, tuple[LayerCache, ...]]:
        """Decoder layers `start` to `stop − 1`.

        Args:
          x: The residual stream before them.
          sources: The encoder's output; with caches, `read_context` of it.
          rows: What attention needs to know.
          start: First layer.
          stop: Behind the last one.
          caches: One entry for each layer of the decoder, or None. With them every layer has its own body.
        """
        bias = None
        if not self.config.bias_in_every_layer:
            bias = self.decoder_relative_bias(rows.queries, jnp.arange(rows.mask.shape[2]))
        if caches is None:

            def call(block: Any, x: Array) -> Any:
                return block(x, sources, rows, bias, None)[0]

            return self._run_blocks(self.layers[start:stop], DecoderBlock, call, x), ()
        updated: list[Any] = []
        for index in range(start, stop):
            x, cache = self.layers[index](x, sources[index], rows, bias, caches[index])
            updated.append(cache)
        return x, tuple(updated)

    def _run_blocks(
        self, blocks: Sequence[nn.Module], kind: type[_Block], call: Callable[[Any, Stream], Any], x: Stream
    ) -> Stream:
        def alike(_: int) -> tuple[Hashable, nn.Module]:
            return kind.__name__, kind(self.config, self.dtype, parent=None)

        return run_blocks(blocks, call, x, alike=alike, share=self.share_layers, remat=self.remat)

    def norm(self, x: Stream) -> Stream:
        """Final norm of the stream, which the heads read."""
        return self._drop(self.final_norm(x))

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits; −inf in the columns that only pad the vocabulary."""
        config = self.config
        hidden = constrain_rows(hidden)  # as in the decoder
        if config.logit_scale is not None:
            hidden = hidden * jnp.asarray(config.logit_scale, hidden.dtype)
        tied = config.tie_embeddings
        logits = self.embed.transposed(hidden, self.dtype) if tied else self.lm_head(hidden)
        return hide_padding(logits, config.vocab_size)

    def _drop(self, x: Stream) -> Stream:
        return self.dropout(x, deterministic=not self.has_rng("dropout"))


def init_encoder_decoder(config: Seq2SeqConfig, key: Array) -> dict[str, Any]:
    """Fresh float32 parameters. Rows that pad the vocabulary are 0 and, without gradient, stay so."""
    outer_key, encoder_key, decoder_key = jax.random.split(key, 3)
    params = _init_outer(config, outer_key)
    for index, layer_key in enumerate(jax.random.split(encoder_key, config.num_encoder_layers)):
        params[f"encoder_layers_{index}"] = _init_encoder_block(config, layer_key)
    for index, layer_key in enumerate(jax.random.split(decoder_key, config.num_layers)):
        params[f"layers_{index}"] = _init_decoder_block(config, layer_key)
    return params


# Compiled, and by layer, for the reasons given in `jrl.models.transformer`.
@functools.partial(jax.jit, static_argnums=0)
def _init_encoder_block(config: Seq2SeqConfig, key: Array) -> dict[str, Any]:
    x, mask = jnp.zeros((1, 1, config.width)), jnp.ones((1, 1, 1), bool)
    bias = None if config.bias_in_every_layer else jnp.zeros((1, config.num_heads, 1, 1))
    return dict(EncoderBlock(config, jnp.float32).init(key, x, mask, bias)["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init_decoder_block(config: Seq2SeqConfig, key: Array) -> dict[str, Any]:
    x, mask = jnp.zeros((1, 1, config.width)), jnp.ones((1, 1, 1), bool)
    rows = Rows(mask, jnp.zeros((1,), jnp.int32), mask[0])
    bias = None if config.bias_in_every_layer else jnp.zeros((1, config.num_heads, 1, 1))
    return dict(DecoderBlock(config, jnp.float32).init(key, x, x, rows, bias, None)["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init_outer(config: Seq2SeqConfig, key: Array) -> dict[str, Any]:
    ids = jnp.zeros((1, 1), jnp.int32)
    params: dict[str, Any] = dict(EncoderDecoder(config).init(key, ids, method="outer_parts")["params"])
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    params["embed"] = {"embedding": jnp.where(real[:, None], params["embed"]["embedding"], 0.0)}
    if not config.tie_embeddings:
        params["lm_head"] = {"kernel": jnp.where(real[None, :], params["lm_head"]["kernel"], 0.0)}
    return params
