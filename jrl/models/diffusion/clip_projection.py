# SPDX-License-Identifier: Apache-2.0
"""The text encoder of CLIP with its projection: one vector for each token, and one for the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jrl.models.diffusion.clip_config import ClipProjectedConfig
from jrl.models.diffusion.clip_text import ClipEncoder
from jrl.typing import Params


class EncodedText(NamedTuple):
    """A text as vectors.

    Attributes:
      tokens: Residual stream before the last block, not normed.
      pooled: Projection of the last token's state.
    """

    tokens: Float[Array, "B Q D"]
    pooled: Float[Array, "B P"]


@dataclass(frozen=True)
class ClipProjected(ClipEncoder):
    """A text encoder with projection, without weights.

    Attributes:
      config: The architecture.
    """

    config: ClipProjectedConfig

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> EncodedText:
        """Encodes texts; arguments and errors of `states`."""
        states = self.states(params, tokens, dtype=dtype)
        assert states.pooled is not None  # by the kind of its config
        return EncodedText(states.penultimate, states.pooled)
