# SPDX-License-Identifier: Apache-2.0
"""Attention and a state space side by side in one layer, as in Falcon-H1 (arXiv:2507.22448)."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from jrl.models.attention import Attention, AttentionContext
from jrl.models.cache import AttentionStateCache, LayerCache
from jrl.models.config import AttentionBesideMamba2, LayerConfig, TransformerConfig
from jrl.models.mixers.mamba2 import Mamba2Mixer


class AttentionBesideMamba2Mixer(nn.Module):
    """Both read the same input; what they add to the stream is summed.

    Attributes:
      config: The decoder.
      layer: Scale, window and rotary positions of attention.
      sizes: Of the state space, and the scales around attention.
      dtype: Of the computation.
    """

    config: TransformerConfig
    layer: LayerConfig
    sizes: AttentionBesideMamba2
    dtype: Any

    def setup(self) -> None:
        """Names the two."""
        self.attn = Attention(self.config, self.layer, self.dtype)
        self.mamba = Mamba2Mixer(self.config, self.sizes.mamba, self.dtype)

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: AttentionStateCache | None
    ) -> tuple[Float[Array, "B Q D"], AttentionStateCache | None]:
        """Answers for every token, to be added to the residual stream, and the cache's entry after them."""
        keys, state = (None, None) if cache is None else cache
        recurred, state = self.mamba(x, context, state)
        attended, entry = self.attn(x * self.sizes.attention_in_scale, context, keys)
        after = None
        if isinstance(entry, LayerCache) and state is not None:
            after = AttentionStateCache(entry, state)
        return recurred + attended * self.sizes.attention_out_scale, after
