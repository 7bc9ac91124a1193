# SPDX-License-Identifier: Apache-2.0
"""The decoder, as parts that can each be applied with only their own parameters.

Every causal family of `jrl.models.families` is this module under some `TransformerConfig`. Master parameters are
float32; `dtype` is that of the computation; norms, softmax and logits are float32 whatever it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain_rows
from jrl.models.attention import AttentionContext, full_context
from jrl.models.blocks import equal_layers, make_block, stream_norm
from jrl.models.cache import LayerCache, LayerEntry, PartEntry, empty_layer_cache
from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.layer_loop import gathering_again, run_blocks
from jrl.models.layers import (
    OUTPUTS,
    Norm,
    Projection,
    Table,
    add_adapter,
    as_row,
    hide_padding,
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


class Carried(NamedTuple):
    """The residual stream, and what else goes from layer to layer.

    Attributes:
      x: The residual stream.
      lent: Keys and values that layers to come read of earlier ones, by the number of the layer that lends them.
      inputs: What each of the layers to come reads of the tokens beside the stream; () where they read nothing else.
    """

    x: Float[Array, "B Q D"]
    lent: dict[int, LayerCache]
    inputs: tuple[Float[Array, "B Q P"], ...]

    def given(self, count: int) -> list[tuple[Float[Array, "B Q P"], ...]]:
        """Further arguments of each of the next `count` layers."""
        return [(own,) for own in self.inputs[:count]] if self.inputs else [()] * count


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
        if config.layer_input_width is not None and config.layer_input_rows is not None:
            each = config.num_layers, config.layer_input_width
            self.layer_embed = Table(config.layer_input_rows, math.prod(each), config.init_range, "vocab")
            self.layer_embed_in = Projection((config.width,), each, False, config.init_range, self.dtype)
            self.layer_embed_norm = Norm(config.norm, config.norm_epsilon, each[1:], self.dtype)
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
        after, _ = self.run_layers(self.embed_tokens(tokens, positions), context, 0, self.config.num_layers)
        return self.logits(self.norm(after.x))

    def without_layers(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"]
    ) -> Float[Array, "B L V"]:
        """Touches every part but the layers, which is what `init` needs."""
        return self.logits(self.norm(self.embed_tokens(tokens, positions).x))

    def embed_tokens(
        self,
        tokens: Int[Array, "B Q"],
        positions: Int[Array, "B Q"],
        noise: Float[Array, "B Q W"] | None = None,
        is_whole: bool = False,
    ) -> Carried:
        """Input of the first layer; `noise` is added to the embeddings.

        `is_whole` as of `jrl.models.layers.Table`.
        """
        dtype = self.dtype if noise is None and self.config.rounds_embeddings else None
        x = self.embed(tokens, dtype, is_whole=is_whole)
        if noise is not None:
            x = x + noise
        if self.config.embedding_scale is not None:
            # Rounded to the compute dtype first, as in the torch implementations.
            x = x.astype(self.dtype) * jnp.asarray(self.config.embedding_scale, self.dtype)
        x = self.embed_vectors(x, positions, is_whole)
        return Carried(x, {}, self._layer_inputs(tokens, x, is_whole))

    def _layer_inputs(
        self, tokens: Int[Array, "B Q"], x: Float[Array, "B Q D"], is_whole: bool
    ) -> tuple[Float[Array, "B Q P"], ...]:
        """(norm(projection(x)) + √P · row of the token) / √2 for each layer."""
        width = self.config.layer_input_width
        if width is None:
            return ()
        read = self.layer_embed_norm(self.layer_embed_in(x) * jnp.asarray(x.shape[-1] ** -0.5, self.dtype))
        rows = self.layer_embed(tokens, self.dtype, is_whole=is_whole) * jnp.asarray(width**0.5, self.dtype)
        both = (read + rows.reshape(read.shape)) * jnp.asarray(2**-0.5, self.dtype)
        return tuple(both[:, :, index] for index in range(self.config.num_layers))

    def embed_vectors(
        self, x: Float[Array, "B Q W"], positions: Int[Array, "B Q"], is_whole: bool = False
    ) -> Float[Array, "B Q D"]:
        """Embeds vectors: embeddings that are already scaled, or vectors that stand in their place."""
        config = self.config
        if config.embedding_width is not None:
            x = self.embed_in(x)
        if config.learned_positions:
            x = x + self.position(positions + config.position_offset, is_whole=is_whole).astype(x.dtype)
        if config.embedding_norm:
            x = self.embed_norm(x)
        return self.dropout(x.astype(self.dtype), deterministic=not self.has_rng("dropout"))

    def run_layers(
        self,
        carried: Carried,
        context: AttentionContext,
        start: int,
        stop: int,
        caches: tuple[LayerEntry | PartEntry, ...] | None = None,
    ) -> tuple[Carried, tuple[LayerEntry, ...]]:
        """Layers `start` to `stop − 1`; `caches` has one entry for each of them, or is None.

        With caches every layer has its own body: so each cache is written in place, token by token.

        Of prompts that go through a kernel, or are a part of the rows, a layer waits for the cache of the one before.
        XLA for GPUs would write those of all layers behind the last, in one kernel, and hold the keys and values of all
        prompts until then.
        """
        if caches is None:

            def call(block: Any, x: Array, context: AttentionContext, *own: Array) -> Any:
                return block(x, context, None, *own)

            x, lent = self._run_rows(call, carried.x, carried, context, start, stop)
            return self._handed_on(x, lent, carried, start, stop), ()
        x, lent, updated = carried.x, dict(carried.lent), []
        given = carried.given(stop - start)
        for index, cache, own in zip(range(start, stop), caches, given, strict=True):
            before = cache.own if isinstance(cache, PartEntry) else cache
            x, entry = self.layers[index](x, context._replace(lent=lent), before, *own)
            if self.config.layers[index].lends_keys:
                lent[index] = entry
            if isinstance(cache, PartEntry):
                entry = cache.put(entry)
            if before is not cache or context.fused is not None:
                x, entry = jax.lax.optimization_barrier((x, entry))
            updated.append(entry)
        return self._handed_on(x, lent, carried, start, stop), tuple(updated)

    def run_layers_counted(
        self,
        carried: Carried,
        context: AttentionContext,
        start: int,
        stop: int,
        mask: Bool[Array, "B Q"],
    ) -> tuple[Carried, ExpertLoad]:
        """Layers `start` to `stop − 1` of whole rows, and the load of their experts by the tokens of a mask."""

        def call(block: Any, counted: Any, context: AttentionContext, *own: Array) -> Any:
            x, load = counted
            module, variables = block.unbind()
            rngs = {"dropout": block.make_rng("dropout")} if block.has_rng("dropout") else {}
            (x, entry), routed = module.apply(variables, x, context, None, *own, rngs=rngs, mutable=[ROUTED])
            return (x, jax.tree.map(jnp.add, load, load_of(routed, mask, self.config))), entry

        counted = carried.x, no_load(self.config, carried.x.shape[0])
        (x, load), lent = self._run_rows(call, counted, carried, context, start, stop)
        return self._handed_on(x, lent, carried, start, stop), load

    def _handed_on(
        self, x: Float[Array, "B Q D"], lent: dict[int, LayerCache], carried: Carried, start: int, stop: int
    ) -> Carried:
        """What the layers from `stop` on read: of what is lent, only what one of them does."""
        read = {layer.keys_of for layer in self.config.layers[stop:]}
        kept = {index: entry for index, entry in lent.items() if index in read}
        return Carried(x, kept, carried.inputs[stop - start :])

    def _run_rows(
        self,
        call: Callable[..., Any],
        x: Any,
        carried: Carried,
        context: AttentionContext,
        start: int,
        stop: int,
    ) -> tuple[Any, dict[int, LayerCache]]:
        """What the layers make of x, and the keys and values that are lent after them; layers that lend stand alone."""
        lent, given = dict(carried.lent), carried.given(stop - start)
        lenders = [index for index in range(start, stop) if self.config.layers[index].lends_keys]
        for first, lender in zip([start, *(index + 1 for index in lenders)], [*lenders, None], strict=True):
            last = stop if lender is None else lender
            own_context = context._replace(lent=lent or None)

            def step(block: Any, x: Any, *own: Array, context: AttentionContext = own_context) -> Any:
                return call(block, x, context, *own)[0]

            x = run_blocks(
                self.layers[first:last],
                step,
                x,
                alike=equal_layers(self.config, first, self.dtype, self.first_trained),
                share=self.share_layers,
                remat=self.remat,
                num_frozen=max(self.first_trained - first, 0),
                given=given[first - start : last - start],
            )
            if lender is not None:
                x, entry = gathering_again(call, remat=self.remat)(
                    self.layers[lender], x, own_context, *given[lender - start]
                )
                lent = {**lent, lender: entry}
        return x, lent

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
    if layer.keys_of is not None:
        keys = empty_layer_cache(config.for_layer(layer), 1, 1, jnp.float32)
        context = context._replace(lent={layer.keys_of: keys})
    block, own = make_block(config, layer, jnp.float32), config.layer_input_width
    given = () if own is None else (jnp.zeros((1, 1, own)),)
    variables = block.init(key, jnp.zeros((1, 1, config.width)), context, None, *given)
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
