# SPDX-License-Identifier: Apache-2.0
"""The prompt as FLUX.1 reads it: every vector of a T5, and of a CLIP the state at the text's end.

A row of ids is the rows of both encoders, end to end. What they make of it is one context, from `join_context`: T5's
vectors, and CLIP's state as the last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.mmdit import join_context
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.typing import Params, PRNGKey

FIRST, SECOND = "text_encoder", "text_encoder_2"
T5_LENGTH = 512
"""Ids of a prompt that T5 reads: diffusers' default."""
_LARGEST_ID = 2
"""Value of `eos_token_id` in old files, which means the largest id of a row."""


@dataclass(frozen=True)
class FluxText:
    """Both text encoders as one, without weights.

    Attributes:
      clip: Its pooled state is read.
      end: Id of the token that ends a text for it, as its config has it.
      t5: Its vectors are read.
      clip_length: Ids of a prompt that CLIP reads.
    """

    clip: ClipText
    end: int
    t5: T5Encoder
    clip_length: int

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, by encoder."""
        first, second = jax.random.split(key)
        return {FIRST: self.clip.init(first), SECOND: self.t5.init(second)}

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q2 D"]:
        """Encodes prompts to the context that the denoiser reads, in `dtype`.

        Args:
          params: Weights, by encoder.
          tokens: Ids, the rows of both encoders end to end.
          dtype: Of the computation; T5 computes in float32 where it is float16, in which it overflows.
        Raises:
          ValueError: If a row is not as long as the encoders' together.
        """
        length = self.clip_length
        if tokens.shape[1] != length + T5_LENGTH:
            raise ValueError(
                f"`tokens` must have {length + T5_LENGTH} columns, the rows of both text encoders end to end, got "
                f"{tokens.shape[1]}. Do they come from the model's own tokenizer?"
            )
        ids = tokens[:, :length]
        states = self.clip.encode(params[FIRST], ids, dtype=dtype)
        end = jnp.argmax(ids if self.end == _LARGEST_ID else ids == self.end, axis=1)
        pooled = jnp.take_along_axis(states, end[:, None, None], axis=1)[:, 0]
        wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
        vectors = self.t5.encode(params[SECOND], tokens[:, length:], dtype=wide).astype(dtype)
        return join_context(vectors, pooled)
