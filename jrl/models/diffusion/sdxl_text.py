# SPDX-License-Identifier: Apache-2.0
"""The prompt as Stable Diffusion XL reads it (Podell et al. 2023, arXiv:2307.01952): two CLIPs side by side.

A row of ids is the rows of both encoders, end to end. The states before the last block of both are joined to one
vector for each position; the second one's pooled vector is the last row of the context, from `join_context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.joined_context import FIRST, SECOND, check_ids, join_context
from jrl.typing import Params, PRNGKey


@dataclass(frozen=True)
class SDXLText:
    """Both text encoders as one, without weights.

    Attributes:
      first: The smaller CLIP of the published models.
      second: The larger one, with a projection.
      clip_length: Ids of a prompt that each of them reads.
    """

    first: ClipText
    second: ClipProjected
    clip_length: int

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, by encoder."""
        first_key, second_key = jax.random.split(key)
        return {FIRST: self.first.init(first_key), SECOND: self.second.init(second_key)}

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q2 D"]:
        """Encodes prompts to the context that the denoiser reads, in `dtype`.

        Args:
          params: Weights, by encoder.
          tokens: Ids, the rows of both encoders end to end.
          dtype: Of the computation.
        Raises:
          ValueError: If a row is not as long as the encoders' together.
        """
        length = self.clip_length
        check_ids(tokens, 2 * length, of="both")
        first = self.first.states(params[FIRST], tokens[:, :length], dtype=dtype)
        second = self.second.encode(params[SECOND], tokens[:, length:], dtype=dtype)
        return join_context(jnp.concatenate([first.penultimate, second.tokens], axis=-1), second.pooled)
