# SPDX-License-Identifier: Apache-2.0
"""The multimodal diffusion transformer that denoises latents under a prompt (Esser et al. 2024, arXiv:2403.03206).

Stable Diffusion 3 and 3.5 are configs of it. Patches of the image and tokens of the prompt are two streams with weights
of their own, which attend together; the timestep and the pooled prompt shift, scale and gate every layer. Left out:
adapters of images, residuals of ControlNet, and layers that are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import constrain, constrain_rows
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.denoiser import bind_denoiser_lora, check_latents, run_denoiser
from jrl.models.diffusion.layers import (
    LONGEST_PERIOD,
    Conv,
    TimestepEmbedding,
    fan_in_range,
    linear,
    sinusoids,
)
from jrl.models.diffusion.mmdit_config import CLASS_NAME, MMDiTConfig, stored_mmdit_config
from jrl.models.diffusion.mmdit_entries import TIME_CHANNELS, mmdit_entries
from jrl.models.diffusion.transformer import attend
from jrl.models.entries_io import initial_shapes
from jrl.models.families.base import Entry
from jrl.models.layers import Norm, Projection
from jrl.typing import Params, PRNGKey

EPSILON = 1e-6
LORA_TARGETS = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)
"""The projections of the joint attention: what an adapter adapts where its configuration names nothing."""


def join_context(tokens: Float[Array, "B Q D"], pooled: Float[Array, "B P"]) -> Float[Array, "B Q2 D"]:
    """The context that the transformer reads: a prompt's embedding, and its pooled one as one more row behind it.

    Args:
      tokens: One vector a token.
      pooled: At most as wide; the row is filled up with zeros.
    """
    row = jnp.pad(pooled.astype(tokens.dtype), ((0, 0), (0, tokens.shape[-1] - pooled.shape[-1])))
    return jnp.concatenate([tokens, row[:, None]], axis=1)


def positions(config: MMDiTConfig) -> Float[Array, "1 M D"]:
    """Sines and cosines of the column and then of the row of every patch of the largest image, as a fresh model has."""
    edge, quarter = config.pos_embed_max_size, config.width // 4
    places = jnp.arange(edge, dtype=jnp.float32) / (edge / (config.sample_size // config.patch_size))
    angles = places[:, None] * LONGEST_PERIOD ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)[None]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    columns = jnp.broadcast_to(waves[None], (edge, edge, 2 * quarter))
    rows = jnp.broadcast_to(waves[:, None], (edge, edge, 2 * quarter))
    return jnp.concatenate([columns, rows], axis=-1).reshape(1, edge * edge, config.width)


class PatchEmbedding(nn.Module):
    """Patches as tokens, with their positions added.

    Attributes:
      config: The whole network's.
      dtype: Of the computation.
    """

    config: MMDiTConfig
    dtype: Any

    @nn.compact
    def __call__(self, latents: Float[Array, "B Y X C"]) -> Float[Array, "B P D"]:
        """(B, Y, X, C) to (B, patches, width), row by row."""
        config, size = self.config, self.config.patch_size
        edge = config.pos_embed_max_size
        patches = Conv(config.width, size, self.dtype, stride=size, padding=((0, 0), (0, 0)), name="proj")(
            latents
        )
        batch, height, width, channels = patches.shape
        table = self.param("position_bias", lambda key: positions(config))
        # It is a part of the checkpoint, but was never learned.
        square = jax.lax.stop_gradient(table).astype(self.dtype).reshape(1, edge, edge, channels)
        top, left = (edge - height) // 2, (edge - width) // 2
        crop = square[:, top : top + height, left : left + width]
        return (patches + jnp.broadcast_to(crop, patches.shape)).reshape(batch, height * width, channels)


class Modulation(nn.Module):
    """Shifts, scales and gates of a layer, from the embedded timestep.

    Attributes:
      count: Vectors made.
      dtype: Of the linear map.
    """

    count: int
    dtype: Any

    @nn.compact
    def __call__(self, time: Float[Array, "B D"]) -> list[Float[Array, "B 1 D"]]:
        """(B, D) to `count` vectors of each row, (B, 1, D)."""
        width = time.shape[-1]
        found = linear(width, self.count * width, self.dtype, name="linear")(nn.silu(time))
        return jnp.split(found[:, None], self.count, axis=-1)


def modulated(
    x: Float[Array, "B P D"], shift: Float[Array, "B 1 D"], scale: Float[Array, "B 1 D"]
) -> Float[Array, "B P D"]:
    """LayerNorm without weights of its own, then (1 + scale)·x + shift; the norm is float32.

    Args:
      x: A residual stream.
      shift: Of each row.
      scale: Likewise.
    """
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + EPSILON)
    return wide.astype(x.dtype) * (1.0 + scale) + shift


class JointAttention(nn.Module):
    """Attention of the image's tokens, and the prompt's where they are given, to all of them.

    Attributes:
      config: The whole network's.
      makes_context: The prompt's tokens are written, too; in the last block they are only read.
      dtype: Of the projections.
    """

    config: MMDiTConfig
    makes_context: bool
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], context: Float[Array, "B Q D"] | None
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B Q D"] | None]:
        """Attends, and returns what both streams gain before their gates; None for a prompt that is not written."""
        names = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
        queries, keys, values = self._heads(x, *names)
        if context is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")
            parts = zip((queries, keys, values), self._heads(context, *names), strict=True)
            queries, keys, values = (jnp.concatenate(pair, axis=1) for pair in parts)
        y = constrain(attend(queries, keys, values), "batch", None, "heads", None)
        made = self._out(y[:, : x.shape[1]], "to_out_0")
        if context is None or not self.makes_context:
            return made, None
        return made, self._out(y[:, x.shape[1] :], "to_add_out")

    def _heads(
        self, x: Float[Array, "B P D"], projections: tuple[str, ...], norms: tuple[str, ...]
    ) -> list[Float[Array, "B P N H"]]:
        """Queries, keys and values of a stream."""
        config, width = self.config, self.config.width
        shape = (config.num_attention_heads, config.attention_head_dim)
        found = []
        for name in projections:
            y = Projection((width,), shape, True, fan_in_range(width), self.dtype, name=name)(x)
            found.append(constrain(y, "batch", None, "heads", None))
        if config.qk_norm is not None:
            for index, name in enumerate(norms):
                found[index] = Norm("rms", EPSILON, shape[1:], self.dtype, name=name)(found[index])
        return found

    def _out(self, y: Float[Array, "B P N H"], name: str) -> Float[Array, "B P D"]:
        width = self.config.width
        return Projection(y.shape[2:], (width,), True, fan_in_range(width), self.dtype, name=name)(y)


class Gelu(nn.Module):
    """A linear map and GELU by its tanh formula.

    Attributes:
      width: Of the result.
      dtype: Of the linear map.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P E"]:
        """(B, P, D) to (B, P, width)."""
        y = constrain(linear(x.shape[-1], self.width, self.dtype, name="proj")(x), "batch", None, "mlp")
        return nn.gelu(y, approximate=True)


class FeedForward(nn.Module):
    """A layer four times as wide as its input, and a linear map back.

    Attributes:
      dtype: Of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        """Output of the MLP, before its gate."""
        width = x.shape[-1]
        return linear(4 * width, width, self.dtype, name="net_2")(
            Gelu(4 * width, self.dtype, name="net_0")(x)
        )


class JointBlock(nn.Module):
    """Joint attention and a feed-forward layer for each stream, all shifted, scaled and gated by the timestep.

    Attributes:
      config: The whole network's.
      index: Which of its blocks: the last one does not write the prompt's stream.
      dtype: Of the computation.
    """

    config: MMDiTConfig
    index: int
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], context: Float[Array, "B Q D"], time: Float[Array, "B D"]
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B Q D"]]:
        """Both streams behind the block."""
        is_dual = self.index in self.config.dual_attention_layers
        is_last = self.index == self.config.num_layers - 1
        shift, scale, gate, late_shift, late_scale, late_gate, *dual = Modulation(
            9 if is_dual else 6, self.dtype, name="norm1"
        )(time)
        of_context = Modulation(2 if is_last else 6, self.dtype, name="norm1_context")(time)
        # The norm at an end is written with its scale first.
        context_shift, context_scale = of_context[:2][::-1] if is_last else of_context[:2]
        attention = JointAttention(self.config, not is_last, self.dtype, name="attn")
        made, written = attention(
            modulated(x, shift, scale), modulated(context, context_shift, context_scale)
        )
        after = x + gate * made
        if is_dual:
            second = JointAttention(self.config, False, self.dtype, name="attn2")
            after += dual[2] * second(modulated(x, dual[0], dual[1]), None)[0]
        ff = FeedForward(self.dtype, name="ff")
        x = constrain_rows(after + late_gate * ff(modulated(after, late_shift, late_scale)))
        if written is None:
            return x, context
        _, _, gate, late_shift, late_scale, late_gate = of_context
        context = context + gate * written
        ff = FeedForward(self.dtype, name="ff_context")
        return x, constrain_rows(context + late_gate * ff(modulated(context, late_shift, late_scale)))


class TimeTextEmbedding(nn.Module):
    """The timestep and the pooled prompt as one vector.

    Attributes:
      width: Of the result.
      dtype: Of the computation.
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, timesteps: Num[Array, "B"], pooled: Float[Array, "B P"]) -> Float[Array, "B D"]:
        """(B,) and (B, P) to (B, width)."""
        waves = sinusoids(timesteps, TIME_CHANNELS, cosine_first=True, freq_shift=0)
        time = TimestepEmbedding(self.width, self.dtype, name="timestep_embedder")(waves)
        return time + TimestepEmbedding(self.width, self.dtype, name="text_embedder")(pooled)


class MMDiTModule(nn.Module):
    """The network; `MMDiT` is how it is called.

    Attributes:
      config: The architecture.
      dtype: Of the computation; norms, softmax, sinusoids and the last linear map are float32 always.
      remat: Keeps the input of each block, and computes the rest anew in the backward pass.
    """

    config: MMDiTConfig
    dtype: Any = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(
        self, latents: Float[Array, "B Y X C"], timesteps: Num[Array, "B"], context: Float[Array, "B Q D"]
    ) -> Float[Array, "B Y X C2"]:
        """The raw output, float32."""
        config, size = self.config, self.config.patch_size
        make = nn.remat(JointBlock) if self.remat else JointBlock
        prompt, pooled = jnp.split(context, [context.shape[1] - 1], axis=1)
        pooled = pooled[:, 0, : config.pooled_projection_dim]
        time = TimeTextEmbedding(config.width, self.dtype, name="time_text_embed")(timesteps, pooled)
        embedder = linear(config.joint_attention_dim, config.width, self.dtype, name="context_embedder")
        tokens = constrain_rows(embedder(prompt))
        x = constrain_rows(PatchEmbedding(config, self.dtype, name="pos_embed")(latents))
        for index in range(config.num_layers):
            x, tokens = make(config, index, self.dtype, name=f"transformer_blocks_{index}")(x, tokens, time)
        scale, shift = Modulation(2, self.dtype, name="norm_out")(time)
        made = config.channels_made
        # In float32: guidance multiplies what is rounded here by its scale.
        x = linear(config.width, size**2 * made, jnp.float32, name="proj_out")(modulated(x, shift, scale))
        batch, height, width, _ = latents.shape
        squares = x.reshape(batch, height // size, width // size, size, size, made)
        return squares.swapaxes(2, 3).reshape(batch, height, width, made)


@dataclass(frozen=True)
class MMDiT:
    """A multimodal diffusion transformer without weights.

    Attributes:
      config: The architecture.
    """

    config: MMDiTConfig

    @property
    def folder_name(self) -> str:
        """Name of the folder in a pipeline."""
        return "transformer"

    @property
    def patch_size(self) -> int:
        """Latents along the edge of a patch."""
        return self.config.patch_size

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the parameters, nested as they are."""
        return dict(initial_shapes(self.init))

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, as large as torch's are: no layer starts at 0 but biases."""
        config = self.config
        latents = jnp.zeros((1, config.patch_size, config.patch_size, config.in_channels))
        context = jnp.zeros((1, 2, config.joint_attention_dim))
        init = jax.jit(MMDiTModule(config).init)
        return dict(init(key, latents, jnp.zeros(1), context)["params"])

    def apply(
        self,
        params: Params,
        lora: Params | None,
        latents: Float[Array, "B Y X C"],
        timesteps: Num[Array, "*B"],
        context: Float[Array, "B Q D"],
        *,
        dtype: Any,
        remat: bool,
    ) -> Float[Array, "B Y X C2"]:
        """The raw output, float32: a velocity, as the model was trained.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          lora: The collection that `Lora.variables` gives; None: the base model.
          latents: Noisy latents.
          timesteps: σ times the timesteps of training: one for each row, or one for all.
          context: Of the prompts, from `join_context`.
          dtype: Of the computation.
          remat: Keeps the input of each block only, and computes the rest anew in the backward pass.
        Raises:
          ValueError: If latents or context have another width than the network reads, or the image is too large.
        """
        config = self.config
        check_latents(latents, config.in_channels)
        largest = config.pos_embed_max_size * config.patch_size
        if any(edge % config.patch_size or edge > largest for edge in latents.shape[1:3]):
            raise ValueError(
                f"height and width of `latents` must be multiples of {config.patch_size}, at most {largest}, got "
                f"{latents.shape[1:3]}."
            )
        if context.ndim != 3 or context.shape[-1] != config.joint_attention_dim or context.shape[1] < 2:
            raise ValueError(
                f"`context` must have shape (rows, tokens + 1, {config.joint_attention_dim}), got {context.shape}. "
                "Is the pooled prompt its last row, as `join_context` makes it?"
            )
        return run_denoiser(MMDiTModule(config, dtype, remat), params, lora, latents, timesteps, context)

    def bind_lora(self, config: LoraConfig) -> Lora:
        """The adapter that a configuration makes of this network; by default of its joint attention (`LORA_TARGETS`).

        Raises:
          ValueError: If it matches nothing, or the embedding of patches: only linear maps are adapted.
        """
        return bind_denoiser_lora(config, self.shapes, self.entries(), CLASS_NAME, targets=LORA_TARGETS)

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        return mmdit_entries(self.config)

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as diffusers reads it."""
        return stored_mmdit_config(self.config)
