# SPDX-License-Identifier: Apache-2.0
"""Text-to-image diffusion models, Stable Diffusion and FLUX.1, and their folders."""

from jrl.models.diffusion.flux import (
    Flux,
)
from jrl.models.diffusion.flux_config import (
    FluxConfig,
    read_flux_config,
)
from jrl.models.diffusion.folder import (
    describe_diffusion_model,
    load_diffusion_model,
)
from jrl.models.diffusion.joined_context import (
    join_context,
)
from jrl.models.diffusion.lora_files import (
    has_lora,
    read_lora,
)
from jrl.models.diffusion.mmdit import (
    MMDiT,
)
from jrl.models.diffusion.mmdit_config import (
    MMDiTConfig,
    read_mmdit_config,
)
from jrl.models.diffusion.pipeline import (
    LORA,
    UNET,
    DiffusionModel,
)
from jrl.models.diffusion.saving import (
    DIFFUSERS_STEM,
)
from jrl.models.diffusion.unet import (
    UNet,
)
from jrl.models.diffusion.unet_config import (
    UNetConfig,
)

__all__ = [
    "DIFFUSERS_STEM",
    "LORA",
    "UNET",
    "DiffusionModel",
    "Flux",
    "FluxConfig",
    "MMDiT",
    "MMDiTConfig",
    "UNet",
    "UNetConfig",
    "describe_diffusion_model",
    "has_lora",
    "join_context",
    "load_diffusion_model",
    "read_flux_config",
    "read_lora",
    "read_mmdit_config",
]
