# SPDX-License-Identifier: Apache-2.0
"""The decoder, as parts that can each be applied with only their own parameters.

Every family of `jrl.models.families` is this module under some `TransformerConfig`. Master parameters are
float32; `dtype` is that of the computation; norms, softmax and logits are float32 whatever it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain
from jrl.models.attention import (
    Attention,
    AttentionContext,
    LayerCache,
    Projection,
    residual_init_range,
    rotations,
)
from jrl.models.config import TransformerConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, in float32.

    Attributes:
      config: The decoder: kind, epsilon and width.
      dtype: Of the result.
    """

    config: TransformerConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises, then applies scale and, for LayerNorm, bias."""
        config = self.config
        x = x.astype(jnp.float32)
        if config.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        scale = self.param("scale", nn.initializers.ones_init(), (config.width,), jnp.float32)
        x = x * _as_row(scale, x.ndim)
        if config.norm == "layer":
            bias = self.param("bias", nn.initializers.zeros_init(), (config.width,), jnp.float32)
            x = x + _as_row(bias, x.ndim)
        return x.astype(self.dtype)


def _as_row(vector: Array, ndim: int) -> Array:
    # Rank promotion is an error in the tests: shapes that only happen to broadcast hide mistakes.
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


class Mlp(nn.Module):
    """The feed-forward half of a block, gated or not."""

    config: TransformerConfig
    dtype: Any

    def setup(self) -> None:
        """Names the projections."""
        config = self.config
        wide = ((config.width,), (config.mlp_width,), config.mlp_bias, config.init_range, self.dtype)
        self.up = Projection(*wide)
        if config.gated_mlp:
            self.gate = Projection(*wide)
        self.down = Projection(
            (config.mlp_width,), (config.width,), config.mlp_bias, residual_init_range(config), self.dtype
        )

    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """What the MLP adds to the residual stream."""
        activation = ACTIVATIONS[self.config.activation]
        y = activation(self.gate(x)) * self.up(x) if self.config.gated_mlp else activation(self.up(x))
        return self.down(constrain(y, "batch", None, "mlp"))


class Block(nn.Module):
    """One layer: attention and MLP, each behind its norm."""

    config: TransformerConfig
    dtype: Any

    def setup(self) -> None:
        """Names the parts."""
        self.attn_norm = Norm(self.config, self.dtype)
        self.attn = Attention(self.config, self.dtype)
        self.mlp_norm = Norm(self.config, self.dtype)
        self.mlp = Mlp(self.config, self.dtype)
        self.dropout = nn.Dropout(self.config.residual_dropout)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: LayerCache | None
    ) -> tuple[Float[Array, "B Q D"], LayerCache | None]:
        """The residual stream after this layer, and its cache."""
        deterministic = not self.has_rng("dropout")
        y, cache = self.attn(self.attn_norm(x), context, cache)
        x = constrain(x + self.dropout(y, deterministic=deterministic), "batch", None, None)
        y = self.mlp(self.mlp_norm(x))
        return constrain(x + self.dropout(y, deterministic=deterministic), "batch", None, None), cache


class Table(nn.Module):
    """A table of vectors looked up by id.

    Attributes:
      num_rows: Number of ids.
      width: D.
      init_range: Standard deviation of fresh vectors.
      rows: Logical name of the row axis, as in `jrl.mesh`; None where it is never split.
    """

    num_rows: int
    width: int
    init_range: float
    rows: str | None

    def setup(self) -> None:
        """Declares the table."""
        init = nn.initializers.normal(self.init_range)
        self.embedding = self.param("embedding", init, (self.num_rows, self.width), jnp.float32)

    def __call__(self, ids: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
        """The rows of these ids; NaN outside the table, so that a bad id is seen and not clipped."""
        # Whole rows on every device of the fsdp axis: a lookup in split rows would move the batch instead.
        table = constrain(self.embedding, self.rows, None)
        return constrain(jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan), "batch", None, None)

    def transposed(self, hidden: Float[Array, "*rows D"], dtype: Any) -> Float[Array, "*rows V"]:
        """Products with every row of the table, accumulated and returned in float32."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden.astype(dtype),
            self.embedding.astype(dtype),
            preferred_element_type=jnp.float32,
        )


class Head(nn.Module):
    """A head of its own, for models that do not tie it to the embedding."""

    config: TransformerConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits over the padded vocabulary, accumulated and returned in float32."""
        config = self.config
        init = nn.initializers.normal(config.init_range)
        kernel = self.param("kernel", init, (config.width, config.padded_vocab_size), jnp.float32)
        return jnp.einsum(
            "...d,dv->...v",
            hidden.astype(self.dtype),
            kernel.astype(self.dtype),
            preferred_element_type=jnp.float32,
        )


class Decoder(nn.Module):
    """The decoder. Call its methods through `apply`, with the parameters that the method touches.

    Attributes:
      config: The architecture.
      dtype: Of the computation.
      remat: Recompute each layer's activations in the backward pass instead of keeping them.
    """

    config: TransformerConfig
    dtype: Any = jnp.float32
    remat: bool = False

    def setup(self) -> None:
        """Names the parts; what a method does not touch needs no parameters."""
        config = self.config
        self.embed = Table(config.padded_vocab_size, config.width, config.init_range, "vocab")
        if config.rope is None:
            self.position = Table(config.max_positions, config.width, config.init_range, None)
        block = nn.remat(Block) if self.remat else Block
        self.layers = [block(config, self.dtype) for _ in range(config.num_layers)]
        self.final_norm = Norm(config, self.dtype)
        if not config.tie_embeddings:
            self.lm_head = Head(config, self.dtype)
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

    def embed_tokens(self, tokens: Int[Array, "B Q"], positions: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
        """The residual stream before the first layer."""
        x = self.embed(tokens)
        if self.config.rope is None:
            x = x + self.position(positions)
        return self.dropout(x.astype(self.dtype), deterministic=not self.has_rng("dropout"))

    def run_layers(
        self,
        x: Float[Array, "B Q D"],
        context: AttentionContext,
        start: int,
        stop: int,
        caches: tuple[LayerCache, ...] | None = None,
    ) -> tuple[Float[Array, "B Q D"], tuple[LayerCache, ...]]:
        """Layers `start` to `stop − 1`; `caches` has one entry for each of them, or is None."""
        updated = []
        for index, layer in enumerate(self.layers[start:stop]):
            x, cache = layer(x, context, None if caches is None else caches[index])
            if cache is not None:
                updated.append(cache)
        return x, tuple(updated)

    def norm(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """The last hidden states, after the final norm."""
        return self.final_norm(x)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits; −inf in the columns that only pad the vocabulary."""
        config = self.config
        tied = config.tie_embeddings
        logits = self.embed.transposed(hidden, self.dtype) if tied else self.lm_head(hidden)
        real = jnp.arange(config.padded_vocab_size) < config.vocab_size
        return jnp.where(real.reshape((1,) * (logits.ndim - 1) + (-1,)), logits, -jnp.inf)


def init_decoder(config: TransformerConfig, key: Array) -> dict[str, Any]:
    """Fresh float32 parameters. Rows that pad the vocabulary are 0 and, without gradient, stay so."""
    outer_key, *layer_keys = jax.random.split(key, 1 + config.num_layers)
    layers = {f"layers_{index}": _init_block(config, layer_keys[index]) for index in range(config.num_layers)}
    return _init_outer(config, outer_key) | layers


# Compiled, because op by op even a tiny model takes seconds; and by layer, because one program for all of them would
# take as many times longer to compile.
@functools.partial(jax.jit, static_argnums=0)
def _init_block(config: TransformerConfig, key: Array) -> dict[str, Any]:
    ids = jnp.zeros((1, 1), jnp.int32)
    context = AttentionContext(jnp.ones((1, 1, 1), bool), *rotations(config, ids))
    variables = Block(config, jnp.float32).init(key, jnp.zeros((1, 1, config.width)), context, None)
    return dict(variables["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init_outer(config: TransformerConfig, key: Array) -> dict[str, Any]:
    ids = jnp.zeros((1, 1), jnp.int32)
    params: dict[str, Any] = dict(Decoder(config).init(key, ids, ids, method="without_layers")["params"])
    real = jnp.arange(config.padded_vocab_size) < config.vocab_size
    params["embed"] = {"embedding": jnp.where(real[:, None], params["embed"]["embedding"], 0.0)}
    if not config.tie_embeddings:
        params["lm_head"] = {"kernel": jnp.where(real[None, :], params["lm_head"]["kernel"], 0.0)}
    return params
