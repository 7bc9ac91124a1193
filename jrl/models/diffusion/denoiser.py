# SPDX-License-Identifier: Apache-2.0
"""Denoisers around their Flax modules: latents are checked, the module is called, an adapter is bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Num

from jrl.mesh import path_name
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.targets import bind_lora, check_maps_alone
from jrl.models.families.base import Entry
from jrl.typing import Params


def check_latents(latents: Float[Array, "B Y X C"], channels: int) -> None:
    """Refuses latents that the network does not read.

    Raises:
      ValueError: If they have other channels, or stand in another order.
    """
    if latents.ndim != 4 or latents.shape[-1] != channels:
        raise ValueError(
            f"`latents` must have shape (rows, height, width, {channels}), got {latents.shape}. Are the channels first?"
        )


def run_denoiser(
    module: nn.Module,
    params: Params,
    lora: Params | None,
    latents: Float[Array, "B Y X C"],
    timesteps: Num[Array, "*B"],
    context: Float[Array, "B Q D"],
) -> Float[Array, "B Y X C2"]:
    """The raw output of a network, at one timestep a row, or one for all."""
    variables = {"params": params} if lora is None else {"params": params, "lora": lora}
    output: Any = module.apply(variables, latents, jnp.broadcast_to(timesteps, latents.shape[:1]), context)
    return output


def bind_denoiser_lora(
    config: LoraConfig,
    shapes: Mapping[str, Any],
    entries: Sequence[Entry],
    class_name: str,
    *,
    targets: tuple[str, ...],
) -> Lora:
    """The adapter that a configuration makes of a network.

    Args:
      config: Of the adapter.
      shapes: Of the network's parameters, nested as they are.
      entries: Every tensor of its file.
      class_name: Of the network, for errors.
      targets: What is adapted where the configuration does not say.
    Raises:
      ValueError: If it matches nothing, or what is no linear map.
    """
    check_maps_alone(config, f"{class_name} of a diffusion model")
    if config.target_modules is None:
        config = replace(config, target_modules=targets)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return bind_lora(config, entries, {path_name(path): leaf.shape for path, leaf in leaves}, class_name)
