# SPDX-License-Identifier: Apache-2.0
"""The decoder, as parts that can each be applied with only their own parameters.

Every causal family of `jrl.models.families` is this module under some `TransformerConfig`. Master parameters are
float32; `dtype` is that of the computation; norms, softmax and logits are float32 whatever it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain_rows
from jrl.models.attention import AttentionContext, full_context
from jrl.models.blocks import equal_layers, make_block, stream_norm
from jrl.models.cache import LayerEntry
from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.layer_loop import run_blocks
from jrl.models.layers import (
    OUTPUTS,
    Projection,
    Table,
    add_adapter,
    as_row,
    stored_kernel,
    with_token_logits,
)
from jrl.models.products import contract
from jrl.models.routing import ROUTED, load_of, no_load
from jrl.typing import ExpertLoad


class Head(nn.Module):
    """A head of its own, for models that do not tie it to the embedding.

    Attributes:
      width: D of what it reads.
      vocab_size: Columns, the padding of the vocabulary included.
      use_bias: Adds a bias.
      init_range: Standard deviation of a fresh kernel.
      dtype: Of the computation.
    """

    width: int
    vocab_size: int
    use_bias: bool
    init_range: float
    dtype: Any

    @nn.compact
    def __call__(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits over the padded vocabulary, accumulated and returned in float32."""
        hidden = hidden.astype(self.dtype)
        kernel = stored_kernel(self, (self.width, self.vocab_size), self.init_range)
        logits = add_adapter(self, hidden, kernel, contract(hidden, kernel, 1, jnp.float32))
        own: Mapping[str, Array] = self.get_variable("lora", OUTPUTS, {})
        if "rows" in own:
            logits = with_token_logits(logits, hidden, own, kernel.astype(jnp.float32)[:, own["ids"]].T)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (self.vocab_size,), jnp.float32)
            logits += as_row(bias.astype(jnp.float32), logits.ndim)
        return logits


def hide_padding(logits: Float[Array, "*rows V"], vocab_size: int) -> Float[Array, "*rows V"]:
    """−inf in the columns that only pad the vocabulary."""
    real = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(as_row(real, logits.ndim), logits, -jnp.inf)


class Decoder(nn.Module):
    """The decoder. Call its methods through `apply`, with the parameters that the method touches.

    Attributes:
      config: The architecture.
      dtype: Of the computation.
      remat: Recompute each layer's activations in the backward pass instead of keeping them.
      share_layers: Equal layers share one body of the program; None: where that is the platform's form.
      first_trained: Layers below it are frozen, but for adapters. A body that they shared with others would compute
        gradients for them.
    """

    config: TransformerConfig
    dtype: Any = jnp.float32
    remat: bool = False
    share_layers: bool | None = None
    first_trained: int = 0

    def setup(self) -> None:
        """Names the parts; what a method does not touch needs no parameters."""
        config = self.config
        width = config.embedding_width or config.width
        self.embed = Table(config.padded_vocab_size, width, config.init_range, "vocab")
        if config.embedding_width is not None:
            self.embed_in, self.embed_out = (
                Projection((size_in,), (size_out,), False, config.init_range, self.dtype)
                for size_in, size_out in ((width, config.width), (config.width, width))
            )
        if config.embedding_norm:
            self.embed_norm = stream_norm(config, self.dtype)
        if config.learned_positions:
            rows = config.max_positions + config.position_offset
            self.position = Table(rows, config.width, config.init_range, None)
        self.layers = [make_block(config, layer, self.dtype, remat=self.remat) for layer in config.layers]
        if config.final_norm:
            self.final_norm = stream_norm(config, self.dtype)
        if not config.tie_embeddings:
            self.lm_head = Head(
                config.feature_width,
                config.padded_vocab_size,
                config.head_bias,
                config.init_range,
                self.dtype,
            )
        self.dropout = nn.Dropout(config.embedding_dropout)

    def __call__(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], context: AttentionContext
    ) -> Float[Array, "B L V"]:
        """Logits of whole rows, over the padded vocabulary."""
        x = self.embed_tokens(tokens, positions)
        x, _ = self.run_layers(x, context, 0, self.config.num_layers)
        return self.logits(self.norm(x))

    def without_layers(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"]
    ) -> Float[Array, "B L V"]:
        """Touches every part but the layers, which is what `init` needs."""
        return self.logits(self.norm(self.embed_tokens(tokens, positions)))

    def embed_tokens(
        self,
        tokens: Int[Array, "B Q"],
        positions: Int[Array, "B Q"],
        noise: Float[Array, "B Q W"] | None = None,
    ) -> Float[Array, "B Q D"]:
        """The residual stream before the first layer; `noise` is added to the embeddings."""
        x = self.embed(tokens, self.dtype if noise is None and self.config.rounds_embeddings else None)
        if noise is not None:
            x = x + noise
        if self.config.embedding_scale is not None:
            # Rounded to the compute dtype first, as in the torch implementations.
            x = x.astype(self.dtype) * jnp.asarray(self.config.embedding_scale, self.dtype)
        return self.embed_vectors(x, positions)

    def embed_vectors(self, x: Float[Array, "B Q W"], positions: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
        """Embeds vectors: embeddings that are already scaled, or vectors that stand in their place."""
        config = self.config
        if config.embedding_width is not None:
            x = self.embed_in(x)
        if config.learned_positions:
            x = x + self.position(positions + config.position_offset).astype(x.dtype)
        if config.embedding_norm:
            x = self.embed_norm(x)
        return self.dropout(x.astype(self.dtype), deterministic=not self.has_rng("dropout"))

    def run_layers(
        self,
        x: Float[Array, "B Q D"],
        context: AttentionContext,
        start: int,
        stop: int,
        caches: tuple[LayerEntry, ...] | None = None,
    ) -> tuple[Float[Array, "B Q D"], tuple[LayerEntry, ...]]:
        """Layers `start` to `stop − 1`; `caches` has one entry for each of them, or is None.

        With caches every layer has its own body: so each cache is written in place, token by token.
        """
        if caches is None:

            def call(block: Any, x: Array) -> Any:
                return block(x, context, None)[0]

            alike = equal_layers(self.config, start, self.dtype, self.first_trained)
            layers, share = self.layers[start:stop], self.share_layers
            frozen = max(self.first_trained - start, 0)
            return run_blocks(
                layers, call, x, alike=alike, share=share, remat=self.remat, num_frozen=frozen
            ), ()
        updated = []
        for layer, cache in zip(self.layers[start:stop], caches, strict=True):
            x, cache = layer(x, context, cache)
            updated.append(cache)
        return x, tuple(updated)

    def run_layers_counted(
        self,
        x: Float[Array, "B Q D"],
        context: AttentionContext,
        start: int,
        stop: int,
        mask: Bool[Array, "B Q"],
    ) -> tuple[Float[Array, "B Q D"], ExpertLoad]:
        """Layers `start` to `stop − 1` of whole rows, and the load of their experts by the tokens of a mask."""

        def call(block: Any, carried: Any) -> Any:
            x, load = carried
            module, variables = block.unbind()
            rngs = {"dropout": block.make_rng("dropout")} if block.has_rng("dropout") else {}
            (x, _), routed = module.apply(variables, x, context, None, rngs=rngs, mutable=[ROUTED])
            return x, jax.tree.map(jnp.add, load, load_of(routed, mask, self.config))

        alike = equal_layers(self.config, start, self.dtype, self.first_trained)
        carried: Any = x, no_load(self.config, x.shape[0])
        found: Any = run_blocks(
            self.layers[start:stop],
            call,
            carried,
            alike=alike,
            share=self.share_layers,
            remat=self.remat,
            num_frozen=max(self.first_trained - start, 0),
        )
        return found

    def norm(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Final norm of the stream, in the embedding's width, which the heads read."""
        if self.config.final_norm:
            x = self.final_norm(x)
        return x if self.config.embedding_width is None else self.embed_out(x)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits; −inf in the columns that only pad the vocabulary."""
        config = self.config
        # Whole states on whichever device has the row: the gradient's product with the head would otherwise be cut by
        # the width, and for that every device would gather the logits' gradient of all rows.
        hidden = constrain_rows(hidden)
        tied = config.tie_embeddings
        logits = self.embed.transposed(hidden, self.dtype) if tied else self.lm_head(hidden)
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return hide_padding(logits, config.vocab_size)


def init_decoder(config: TransformerConfig, key: Array) -> dict[str, Any]:
    """Fresh float32 parameters. Rows that pad the vocabulary are 0 and, without gradient, stay so."""
    outer_key, *layer_keys = jax.random.split(key, 1 + config.num_layers)
    layers = {
        f"layers_{index}": _init_block(config, layer, layer_keys[index])
        for index, layer in enumerate(config.layers)
    }
    return _init_outer(config, outer_key) | layers


# Compiled, because op by op even a tiny model takes seconds; and by layer, because one program for all of them would
# take as many times longer to compile.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_block(config: TransformerConfig, layer: LayerConfig, key: Array) -> dict[str, Any]:
    ids = jnp.zeros((1, 1), jnp.int32)
    context = full_context(config, jnp.ones((1, 1), bool), ids)
    block = make_block(config, layer, jnp.float32)
    variables = block.init(key, jnp.zeros((1, 1, config.width)), context, None)
    return dict(variables["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init_outer(config: TransformerConfig, key: Array) -> dict[str, Any]:
    ids = jnp.zeros((1, 1), jnp.int32)
    params: dict[str, Any] = dict(Decoder(config).init(key, ids, ids, method="without_layers")["params"])
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    params["embed"] = {"embedding": jnp.where(real[:, None], params["embed"]["embedding"], 0.0)}
    if not config.tie_embeddings:
        head = params["lm_head"]
        params["lm_head"] = head | {"kernel": jnp.where(real[None, :], head["kernel"], 0.0)}
    return params
