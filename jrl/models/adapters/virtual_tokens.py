# SPDX-License-Identifier: Apache-2.0
"""Prefix and prompt tuning: columns before every row that stand for no token and are trained.

Both are a cache that already holds V columns when the first token comes, the same for all rows. Prefix tuning trains
their keys and values; prompt tuning trains embeddings, and the model computes keys and values from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.adapters.config import PrefixConfig, PromptConfig
from jrl.models.config import TransformerConfig
from jrl.typing import Params, PRNGKey

PREFIX, PROMPT = "prefix", "prompt"


@dataclass(frozen=True)
class VirtualTokens:
    """A prefix or prompt configuration, bound to one model.

    Attributes:
      config: The configuration.
      model: The architecture.
    """

    config: PrefixConfig | PromptConfig
    model: TransformerConfig

    @property
    def name(self) -> str:
        """Name of its entry among the trainable parameters."""
        return PREFIX if isinstance(self.config, PrefixConfig) else PROMPT

    @property
    def count(self) -> int:
        """V, number of virtual columns."""
        return self.config.num_virtual_tokens

    @property
    def prefix_width(self) -> int:
        """Keys and values of all layers, for one column."""
        return 2 * self.model.num_layers * self.model.num_kv_heads * self.model.head_dim

    @property
    def saved_width(self) -> int:
        """Numbers that PEFT's file holds for one column."""
        return self.prefix_width if self.name == PREFIX else self.model.feature_width

    def init(self, key: PRNGKey, params: Params) -> dict[str, Any]:
        """Fresh parameters, float32.

        Args:
          key: For what starts at random.
          params: The base model, whose embeddings a prompt may start as.
        """
        config = self.config
        if isinstance(config, PrefixConfig):
            return self._init_prefix(config, key)
        table = params["embed"]["embedding"]
        if config.prompt_tuning_init == "RANDOM":
            return {"embedding": jax.random.normal(key, (self.count, table.shape[1]))}
        if config.prompt_tuning_init == "TEXT":
            ids = jnp.resize(jnp.asarray(config.text_ids), (self.count,))
        else:
            ids = jax.random.randint(key, (self.count,), 0, self.model.vocab_size)
        # As the model reads them: a prompt stands for embeddings that are scaled already.
        return {"embedding": table[ids].astype(jnp.float32) * (self.model.embedding_scale or 1.0)}

    def _init_prefix(self, config: PrefixConfig, key: PRNGKey) -> dict[str, Any]:
        zero = config.init_weights == "zero"
        if not config.prefix_projection:
            shape = (self.count, self.prefix_width)
            return {"embedding": jnp.zeros(shape) if zero else jax.random.normal(key, shape)}
        width = self.model.num_kv_heads * self.model.head_dim
        inner = config.encoder_hidden_size or self.model.width
        embedding_key, in_key, in_bias_key, out_key, out_bias_key = jax.random.split(key, 5)

        def uniform(key: PRNGKey, size_in: int, *shape: int) -> Array:
            return jax.random.uniform(key, shape, minval=-(size_in**-0.5), maxval=size_in**-0.5)

        last = {
            "kernel": uniform(out_key, inner, inner, self.prefix_width),
            "bias": uniform(out_bias_key, inner, self.prefix_width),
        }
        return {
            "embedding": jax.random.normal(embedding_key, (self.count, width)),
            "in": {
                "kernel": uniform(in_key, width, width, inner),
                "bias": uniform(in_bias_key, width, inner),
            },
            "out": jax.tree.map(jnp.zeros_like, last) if zero else last,
        }

    def prefix(self, params: Params) -> Float[Array, "V W"]:
        """Keys and values of all layers, as PEFT stores them: of layer i the key at 2i and the value at 2i + 1."""
        if "in" not in params:
            return params["embedding"]
        first, last = params["in"], params["out"]
        hidden = jnp.tanh(params["embedding"] @ first["kernel"] + first["bias"][None])
        return hidden @ last["kernel"] + last["bias"][None]

    def keys_and_values(
        self, params: Params
    ) -> list[tuple[Float[Array, "1 V K H"], Float[Array, "1 V K H"]]]:
        """Keys and values of the prefix, a pair for each layer."""
        model = self.model
        shape = (1, self.count, model.num_layers, 2, model.num_kv_heads, model.head_dim)
        both = self.prefix(params).reshape(shape)
        return [(both[:, :, index, 0], both[:, :, index, 1]) for index in range(model.num_layers)]

    def saved(self, params: Params) -> dict[str, Any]:
        """Tensors of PEFT's file. An MLP is applied once and left behind: PEFT does not store it either."""
        return {"embedding": self.prefix(params) if self.name == PREFIX else params["embedding"]}
