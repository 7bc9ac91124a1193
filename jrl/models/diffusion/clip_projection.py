# SPDX-License-Identifier: Apache-2.0
"""The text encoder of CLIP with its projection: one vector for each token, and one for the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_config import ClipProjectedConfig, stored_clip_config
from jrl.models.diffusion.clip_entries import clip_projected_entries
from jrl.models.diffusion.clip_text import Embeddings, LayerStack, check_length, stack_norm
from jrl.models.diffusion.layers import linear
from jrl.models.families.base import Entry
from jrl.typing import Params, PRNGKey

_LARGEST_ID = 2
"""Value of `eos_token_id` in old files, which means the largest id of a row."""


class EncodedText(NamedTuple):
    """A text as vectors.

    Attributes:
      tokens: Residual stream before the last block, not normed.
      pooled: Projection of the last token's state.
    """

    tokens: Float[Array, "B Q D"]
    pooled: Float[Array, "B P"]


class ClipProjectedModule(nn.Module):
    """The network; `ClipProjected` is how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms and softmax are float32 always.
    """

    config: ClipProjectedConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "B Q"]) -> EncodedText:
        """Both kinds of vectors."""
        config, dtype = self.config, self.dtype
        x = Embeddings(config, name="embeddings")(tokens).astype(dtype)
        before, x = LayerStack(config, dtype, name="encoder")(x)
        x = stack_norm(config, dtype, "final_layer_norm")(x)
        is_end = tokens if config.eos_token_id == _LARGEST_ID else tokens == config.eos_token_id
        end = jnp.argmax(is_end, axis=1)
        last = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
        project = linear(
            config.hidden_size, config.projection_dim, dtype, use_bias=False, name="text_projection"
        )
        return EncodedText(before, project(last))


@dataclass(frozen=True)
class ClipProjected:
    """A text encoder with projection, without weights.

    Attributes:
      config: The architecture.
    """

    config: ClipProjectedConfig

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters."""
        init = jax.jit(ClipProjectedModule(self.config).init)
        return dict(init(key, jnp.zeros((1, 1), jnp.int32))["params"])

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> EncodedText:
        """Encodes texts.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          tokens: Ids, padded as the encoder was trained with; one outside the vocabulary makes NaN.
          dtype: Of the computation.
        Raises:
          ValueError: If a row is longer than the table of positions.
        """
        check_length(self.config, tokens)
        encoded: Any = ClipProjectedModule(self.config, dtype).apply({"params": params}, tokens)
        return encoded

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return clip_projected_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as transformers reads it."""
        return stored_clip_config(self.config)
