# SPDX-License-Identifier: Apache-2.0
"""Text encoders of CLIP (Radford et al. 2021, arXiv:2103.00020), of which a denoiser reads every position.

A causal transformer with learned positions and no padding mask: what pads a prompt is read like anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain, constrain_rows
from jrl.models.diffusion.clip_config import (
    ClipPooledConfig,
    ClipProjectedConfig,
    ClipTextConfig,
    ClipTowerConfig,
    stored_clip_config,
)
from jrl.models.diffusion.clip_entries import clip_entries
from jrl.models.diffusion.layers import fan_in_range, linear
from jrl.models.families.base import Entry
from jrl.models.layers import Norm, Projection, Table
from jrl.typing import Params, PRNGKey

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
_INIT_RANGE = 0.02
_LARGEST_ID = 2
"""Value of `eos_token_id` in old files, which means the largest id of a row."""


class ClipAttention(nn.Module):
    """Self-attention; softmax in float32.

    Attributes:
      num_heads: N.
      is_causal: Each position reads itself and those before it, as in texts; else all positions.
      dtype: Of the projections.
    """

    num_heads: int
    is_causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Output of attention, to be added to the residual stream."""
        width = x.shape[-1]
        heads = (self.num_heads, width // self.num_heads)

        def project(name: str) -> Float[Array, "B Q N H"]:
            y = Projection((width,), heads, True, fan_in_range(width), self.dtype, name=name)(x)
            return constrain(y, "batch", None, "heads", None)

        y = jax.nn.dot_product_attention(
            project("q_proj"), project("k_proj"), project("v_proj"), is_causal=self.is_causal
        )
        return Projection(heads, (width,), True, fan_in_range(width), self.dtype, name="out_proj")(y)


class FeedForward(nn.Module):
    """Two linear maps with an activation between them.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
    """

    config: ClipTowerConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Output of the MLP, to be added to the residual stream."""
        width, inner = self.config.hidden_size, self.config.intermediate_size
        x = ACTIVATIONS[self.config.hidden_act](linear(width, inner, self.dtype, name="fc1")(x))
        return linear(inner, width, self.dtype, name="fc2")(x)


class Layer(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside the identity.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
      is_causal: See `ClipAttention`.
    """

    config: ClipTowerConfig
    dtype: Any
    is_causal: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """The residual stream behind the block."""
        h = stack_norm(self.config, self.dtype, "layer_norm1")(x)
        heads = self.config.num_attention_heads
        x = x + ClipAttention(heads, self.is_causal, self.dtype, name="self_attn")(h)
        h = stack_norm(self.config, self.dtype, "layer_norm2")(x)
        return constrain_rows(x + FeedForward(self.config, self.dtype, name="mlp")(h))


class Embeddings(nn.Module):
    """Tokens and positions as vectors.

    Attributes:
      config: The whole network's.
    """

    config: ClipTextConfig

    def setup(self) -> None:
        """Names the tables."""
        config = self.config
        self.token_embedding = Table(config.vocab_size, config.hidden_size, _INIT_RANGE, None)
        self.position_embedding = Table(config.max_position_embeddings, config.hidden_size, _INIT_RANGE, None)

    def __call__(self, tokens: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
        """Sum of the embeddings of token and position."""
        positions = jnp.arange(tokens.shape[1])[None]
        # No row of `jrl.mesh.PARAMETER_AXES` is of these tables: every device has them whole.
        found = self.token_embedding(tokens, is_whole=True)
        return found + self.position_embedding(positions, is_whole=True)


class LayerStack(nn.Module):
    """Stack of the blocks.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
      is_causal: See `ClipAttention`.
    """

    config: ClipTowerConfig
    dtype: Any
    is_causal: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> tuple[Float[Array, "B Q D"], Float[Array, "B Q D"]]:
        """The residual stream before the last of them, and behind it."""
        before = x
        for index in range(self.config.num_hidden_layers):
            before, x = x, Layer(self.config, self.dtype, self.is_causal, name=f"layers_{index}")(x)
        return before, x


class TextStates(NamedTuple):
    """Hidden states of a text.

    Attributes:
      penultimate: Residual stream before the last block, not normed.
      last: Behind it, normed.
      end: Of `last`, where the text ends; None: the encoder's config does not say where.
      pooled: Projection of `end`; None: the encoder has no projection.
    """

    penultimate: Float[Array, "B Q D"]
    last: Float[Array, "B Q D"]
    end: Float[Array, "B D"] | None
    pooled: Float[Array, "B P"] | None


class ClipTextModule(nn.Module):
    """The network; `ClipText` and `ClipProjected` are how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms and softmax are float32 always.
    """

    config: ClipTextConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "B Q"]) -> TextStates:
        """All states that anything reads; what nobody reads is not computed in a compiled call."""
        config, dtype = self.config, self.dtype
        x = Embeddings(config, name="embeddings")(tokens).astype(dtype)
        penultimate, x = LayerStack(config, dtype, name="encoder")(x)
        last = stack_norm(config, dtype, "final_layer_norm")(x)
        if not isinstance(config, (ClipPooledConfig, ClipProjectedConfig)):
            return TextStates(penultimate, last, None, None)
        is_end = tokens if config.eos_token_id == _LARGEST_ID else tokens == config.eos_token_id
        place = jnp.argmax(is_end, axis=1)
        end = jnp.take_along_axis(last, place[:, None, None], axis=1)[:, 0]
        if isinstance(config, ClipPooledConfig):
            return TextStates(penultimate, last, end, None)
        project = linear(
            config.hidden_size, config.projection_dim, dtype, use_bias=False, name="text_projection"
        )
        return TextStates(penultimate, last, end, project(end))


@dataclass(frozen=True)
class ClipEncoder:
    """Base class of text encoders, without weights.

    Attributes:
      config: The architecture.
    """

    config: ClipTextConfig

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters."""
        init = jax.jit(ClipTextModule(self.config).init)
        return dict(init(key, jnp.zeros((1, 1), jnp.int32))["params"])

    def states(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> TextStates:
        """Hidden states of texts, in `dtype`.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          tokens: Ids, padded as the denoiser was trained with; one outside the vocabulary makes NaN.
          dtype: Of the computation.
        Raises:
          ValueError: If a row is longer than the table of positions.
        """
        check_length(self.config, tokens)
        states: Any = ClipTextModule(self.config, dtype).apply({"params": params}, tokens)
        return states

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return clip_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as transformers reads it."""
        return stored_clip_config(self.config)


@dataclass(frozen=True)
class ClipText(ClipEncoder):
    """A text encoder whose last states are the context, without weights."""

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q D"]:
        """Encodes prompts to the context that a denoiser reads, in `dtype`; arguments and errors of `states`."""
        return self.states(params, tokens, dtype=dtype).last


def check_length(config: ClipTextConfig, tokens: Int[Array, "B Q"]) -> None:
    """Refuses rows that are longer than the table of positions.

    Raises:
      ValueError: Naming the limit.
    """
    limit = config.max_position_embeddings
    if tokens.shape[1] > limit:
        raise ValueError(
            f"`tokens` must have at most {limit} columns, the positions of the text encoder, got "
            f"{tokens.shape[1]}. Does the tokenizer belong to it?"
        )


def stack_norm(config: ClipTowerConfig, dtype: Any, name: str) -> Norm:
    """A norm over the residual stream."""
    return Norm("layer", config.layer_norm_eps, (config.hidden_size,), dtype, name=name)
