# SPDX-License-Identifier: Apache-2.0
"""A bidirectional encoder that classifies a text: BERT and its kin (Devlin et al. 2018, arXiv:1810.04805).

Its blocks are those of the decoder (`jrl.models.blocks`, kind "post_norm") under a mask that lets every token read
every real one. The head reads the first real token, so padding may stand on either side and be of any length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.attention import AttentionContext
from jrl.models.blocks import equal_layers, make_block
from jrl.models.config import TransformerConfig
from jrl.models.layer_loop import run_blocks
from jrl.models.layers import Norm, Projection, Table
from jrl.models.positions import token_positions
from jrl.models.transformer import init_decoder
from jrl.typing import PRNGKey

POOLERS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


@dataclass(frozen=True)
class EncoderConfig:
    """Description of an encoder with its classifier. Hashable, so it can be a static argument.

    Attributes:
      body: Embedding and blocks, in the decoder's terms: learned positions, a norm after the embedding, blocks of kind
        "post_norm", no final norm.
      num_token_types: Rows of the table of token types, of which a single text uses the first; 0: no such table.
      pooler: Activation between the two layers of the head.
      num_labels: Scores of a text.
      head_dropout: Rate on what the last layer of the head reads; the body's rates are in `body`. RoBERTa has a second
        one, before the head's first layer, which is left out.
    """

    body: TransformerConfig
    num_token_types: int
    pooler: Literal["tanh", "relu"]
    num_labels: int
    head_dropout: float = 0.0

    @property
    def vocab_size(self) -> int:
        """Real entries of the vocabulary."""
        return self.body.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        return self.body.max_positions


class Encoder(nn.Module):
    """The encoder. Call its methods through `apply`, with the parameters that the method touches.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms, softmax and head are float32 always.
      remat: Recompute each layer's activations in the backward pass instead of keeping them.
      share_layers: Equal layers share one body of the program; None: where that is the platform's form.
      first_trained: Layers below it are frozen; they share no body with others.
    """

    config: EncoderConfig
    dtype: Any = jnp.float32
    remat: bool = False
    share_layers: bool | None = None
    first_trained: int = 0

    def setup(self) -> None:
        """Names the parts."""
        body, width = self.config.body, self.config.body.width
        self.embed = Table(body.padded_vocab_size, width, body.init_range, "vocab")
        self.position = Table(body.max_positions + body.position_offset, width, body.init_range, None)
        if self.config.num_token_types:
            self.token_type = Table(self.config.num_token_types, width, body.init_range, None)
        self.embed_norm = Norm(body.norm, body.norm_epsilon, (width,), self.dtype)
        self.layers = [make_block(body, layer, self.dtype, remat=self.remat) for layer in body.layers]
        self.pooler, self.classifier = (
            Projection((width,), (size,), True, body.init_range, jnp.float32)
            for size in (width, self.config.num_labels)
        )
        self.dropout, self.head_dropout = (
            nn.Dropout(body.embedding_dropout),
            nn.Dropout(self.config.head_dropout),
        )

    def __call__(
        self, tokens: Int[Array, "B L"], attention_mask: Bool[Array, "B L"]
    ) -> Float[Array, "B labels"]:
        """Scores of each row, float32. Dropout acts where a key of that name is given."""
        x = self.embed_tokens(tokens, token_positions(attention_mask))
        x = self.run_layers(x, attention_mask, 0, self.config.body.num_layers)
        pooled = self.head_dropout(self.pool(x, attention_mask), deterministic=not self.has_rng("dropout"))
        return self.classifier(pooled)

    def without_body(
        self, x: Float[Array, "B L D"], attention_mask: Bool[Array, "B L"]
    ) -> Float[Array, "B labels"]:
        """Touches every part that a decoder lacks, which is what `init` needs."""
        if self.config.num_token_types:
            x = x + self.token_type(jnp.zeros(attention_mask.shape, jnp.int32))
        return self.classifier(self.pool(x, attention_mask))

    def embed_tokens(self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Embeddings of the tokens, the input of the first block."""
        x = self.embed(tokens) + self.position(positions + self.config.body.position_offset)
        if self.config.num_token_types:
            x = x + self.token_type(jnp.zeros_like(tokens))
        x = self.dropout(self.embed_norm(x), deterministic=not self.has_rng("dropout"))
        return constrain(x, "batch", None, None)

    def run_layers(
        self, x: Float[Array, "B L D"], attention_mask: Bool[Array, "B L"], start: int, stop: int
    ) -> Float[Array, "B L D"]:
        """Blocks `start` to `stop − 1`."""
        length = attention_mask.shape[1]
        everywhere = jnp.broadcast_to(attention_mask[:, None, :], (attention_mask.shape[0], length, length))
        context = AttentionContext(masks=(everywhere,), rotations=())

        def call(block: Any, x: Array) -> Any:
            return block(x, context, None)[0]

        layers, share = self.layers[start:stop], self.share_layers
        alike = equal_layers(self.config.body, start, self.dtype, self.first_trained)
        return run_blocks(layers, call, x, alike=alike, share=share, remat=self.remat)

    def pool(self, x: Float[Array, "B L D"], attention_mask: Bool[Array, "B L"]) -> Float[Array, "B D"]:
        """The first real token's vector after the head's first layer."""
        first = jnp.argmax(attention_mask, axis=1)
        first_token = jnp.take_along_axis(x, first[:, None, None], axis=1)[:, 0]
        return POOLERS[self.config.pooler](self.pooler(first_token))


def init_encoder(config: EncoderConfig, key: PRNGKey) -> dict[str, Any]:
    """Fresh float32 parameters. Rows that pad the vocabulary are 0 and, without gradient, stay so."""
    body_key, head_key = jax.random.split(key)
    return init_decoder(config.body, body_key) | init_encoder_head(config, head_key)


@functools.partial(jax.jit, static_argnums=0)
def init_encoder_head(config: EncoderConfig, key: PRNGKey) -> dict[str, Any]:
    """Fresh float32 parameters of what a decoder lacks: the head, and the table of token types where there is one."""
    x = jnp.zeros((1, 1, config.body.width))
    return dict(Encoder(config).init(key, x, jnp.ones((1, 1), bool), method="without_body")["params"])
