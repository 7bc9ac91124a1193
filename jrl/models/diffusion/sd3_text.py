# SPDX-License-Identifier: Apache-2.0
"""The prompt as Stable Diffusion 3 reads it (Esser et al. 2024, arXiv:2403.03206): two CLIPs side by side, then a T5.

A row of ids is the rows of all encoders, end to end. What they make of it is one context, from `join_context`:
vectors of both CLIPs joined and filled up to the width of T5's, T5's own behind them, the pooled vectors as last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.joined_context import FIRST, SECOND, THIRD, check_ids, join_context
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.typing import Params, PRNGKey

T5_LENGTH = 256
"""Ids of a prompt that T5 reads, or zeros in their place where there is no T5: diffusers' default."""


@dataclass(frozen=True)
class SD3Text:
    """All text encoders as one, without weights.

    Attributes:
      first: The smaller CLIP of the published models.
      second: The larger one.
      third: T5; None: zeros stand for what it would make.
      clip_length: Ids of a prompt that each CLIP reads.
      width: Of the context.
    """

    first: ClipProjected
    second: ClipProjected
    third: T5Encoder | None
    clip_length: int
    width: int

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, by encoder."""
        parts: dict[str, Any] = {FIRST: self.first, SECOND: self.second}
        if self.third is not None:
            parts[THIRD] = self.third
        keys = jax.random.split(key, len(parts))
        return {name: part.init(one) for (name, part), one in zip(parts.items(), keys, strict=True)}

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q2 D"]:
        """Encodes prompts to the context that the denoiser reads, in `dtype`.

        Args:
          params: Weights, by encoder.
          tokens: Ids, the rows of all encoders end to end.
          dtype: Of the computation; T5 computes in float32 where it is float16, in which it overflows.
        Raises:
          ValueError: If a row is not as long as the encoders' together.
        """
        length = self.clip_length
        expected = 2 * length + (0 if self.third is None else T5_LENGTH)
        check_ids(tokens, expected, of="all")
        first = self.first.encode(params[FIRST], tokens[:, :length], dtype=dtype)
        second = self.second.encode(params[SECOND], tokens[:, length : 2 * length], dtype=dtype)
        clip = jnp.concatenate([first.tokens, second.tokens], axis=-1)
        clip = jnp.pad(clip, ((0, 0), (0, 0), (0, self.width - clip.shape[-1])))
        if self.third is None:
            third = jnp.zeros((tokens.shape[0], T5_LENGTH, self.width), dtype)
        else:
            third = self.third.encode(params[THIRD], tokens[:, 2 * length :], dtype=dtype)
        pooled = jnp.concatenate([first.pooled, second.pooled], axis=-1)
        return join_context(jnp.concatenate([clip, third], axis=1), pooled)
