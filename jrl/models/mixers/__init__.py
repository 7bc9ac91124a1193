# SPDX-License-Identifier: Apache-2.0
"""Mixers of the tokens of a row, by kind: a module for each, and the entry of the cache that goes with it.

Attention is `jrl.models.attention`; each other kind has a file here. Blocks and caches ask this table alone.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn

from jrl.models.attention import Attention
from jrl.models.cache import (
    AttentionStateCache,
    LayerEntry,
    StateCache,
    empty_latents,
    empty_layer_cache,
)
from jrl.models.config import (
    AttentionBesideMamba2,
    GatedDelta,
    LatentAttention,
    LayerConfig,
    Mamba1,
    Mamba2,
    ShortConvolution,
    TransformerConfig,
)
from jrl.models.mixers.attention_beside_mamba2 import AttentionBesideMamba2Mixer
from jrl.models.mixers.gated_delta import GatedDeltaMixer, empty_delta
from jrl.models.mixers.latent import LatentMixer
from jrl.models.mixers.mamba1 import Mamba1Mixer, empty_mamba1
from jrl.models.mixers.mamba2 import Mamba2Mixer, empty_mamba2
from jrl.models.mixers.short_convolution import ShortConvolutionMixer, empty_convolution


def make_mixer(config: TransformerConfig, layer: LayerConfig, dtype: Any) -> nn.Module:
    """The module of a layer, called with `(x, context, cache entry or None)`."""
    match layer.mixer:
        case None:
            return Attention(config.for_layer(layer), layer, dtype)
        case LatentAttention() as sizes:
            return LatentMixer(config, layer, sizes, dtype)
        case GatedDelta() as sizes:
            return GatedDeltaMixer(config, sizes, dtype)
        case ShortConvolution() as sizes:
            return ShortConvolutionMixer(config, sizes, dtype)
        case Mamba1() as sizes:
            return Mamba1Mixer(config, sizes, dtype)
        case Mamba2() as sizes:
            return Mamba2Mixer(config, sizes, dtype)
        case AttentionBesideMamba2() as sizes:
            return AttentionBesideMamba2Mixer(config, layer, sizes, dtype)


def empty_entry(
    config: TransformerConfig,
    layer: LayerConfig,
    batch_size: int,
    length: int,
    dtype: Any,
    *,
    in_one: bool = False,
) -> LayerEntry:
    """The cache's entry of a layer before the first token, with `length` columns where it has any.

    Those of attention lie `in_one` buffer, or as products read them best.
    """
    if layer.only == "feed_forward" or layer.keys_of is not None:
        return StateCache(())
    match layer.mixer:
        case None:
            return empty_layer_cache(config.for_layer(layer), batch_size, length, dtype, in_one=in_one)
        case LatentAttention() as sizes:
            shape = (batch_size, 1, length, sizes.rank + sizes.rope_dim)
            return empty_latents(shape, config.num_heads, dtype)
        case GatedDelta() as sizes:
            return empty_delta(sizes, batch_size, dtype)
        case ShortConvolution() as sizes:
            return empty_convolution(config, sizes, batch_size, dtype)
        case Mamba1() as sizes:
            return empty_mamba1(sizes, batch_size, dtype)
        case Mamba2() as sizes:
            return empty_mamba2(sizes, batch_size, dtype)
        case AttentionBesideMamba2() as sizes:
            return AttentionStateCache(
                empty_layer_cache(config, batch_size, length, dtype, in_one=in_one),
                empty_mamba2(sizes.mamba, batch_size, dtype),
            )
