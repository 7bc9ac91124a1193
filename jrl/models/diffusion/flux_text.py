# SPDX-License-Identifier: Apache-2.0
"""The prompt as FLUX.1 reads it: every vector of a T5, and of a CLIP the state at the text's end.

A row of ids is the rows of both encoders, end to end. What they make of it is one context, from `join_context`: T5's
vectors, and CLIP's state as the last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.joined_context import FIRST, SECOND, check_ids, join_context
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.typing import Params, PRNGKey

T5_LENGTH = 512
"""Ids of a prompt that T5 reads: diffusers' default."""


@dataclass(frozen=True)
class FluxText:
    """Both text encoders as one, without weights.

    Attributes:
      clip: Its state at the end of a text is read.
      t5: Its vectors are read.
      clip_length: Ids of a prompt that CLIP reads.
    """

    clip: ClipText
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
        check_ids(tokens, length + T5_LENGTH, of="both")
        states = self.clip.states(params[FIRST], tokens[:, :length], dtype=dtype)
        assert states.end is not None  # by the kind of its config
        vectors = self.t5.encode(params[SECOND], tokens[:, length:], dtype=dtype)
        return join_context(vectors, states.end)
