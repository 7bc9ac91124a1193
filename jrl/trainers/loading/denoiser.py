# SPDX-License-Identifier: Apache-2.0
"""A diffusion model that trains: what of it does, and how it computes."""

from __future__ import annotations

import warnings
from typing import Any

from jrl.learners.diffusion_config import DiffusionConfig
from jrl.models.adapters.config import LoraConfig, read_adapter_config
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.fused_attention import require_einsum
from jrl.trainers.config.sections import ModelConfig
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import COMPUTE_DTYPES, compute_dtype
from jrl.typing import DenoiserFns, PRNGKey


def check_denoiser(section: ModelConfig) -> None:
    """Refuses what a diffusion model has not.

    Args:
      section: Of the run's configuration.
    Raises:
      ValueError: If it asks for some layers, or for a kernel of attention.
    """
    if section.num_layers_unfrozen != -1:
        raise ValueError(
            "`model.num_layers_unfrozen` must be -1 for a diffusion model: either all of its UNet trains or an "
            f"adapter (`model.peft_config`), got {section.num_layers_unfrozen}."
        )
    require_einsum(section.attn_implementation, "a diffusion model has its own attention")


def bind_denoiser(model: DiffusionModel, given: Any) -> Lora | None:
    """The adapter that `model.peft_config` asks for; the one that came with the model trains on in its place.

    Args:
      model: The model.
      given: The configuration's field.
    Raises:
      ValueError: If it is no low-rank one.
    """
    if given is None:
        return None
    config = read_adapter_config(given)
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"`model.peft_config.peft_type` must be LORA for a diffusion model, got {type(config).__name__}."
        )
    if model.found_lora is None:
        return model.unet.bind_lora(config)
    found = model.found_lora.lora
    if (found.config.r, found.config.lora_alpha) != (config.r, config.lora_alpha):
        warnings.warn(
            f"{model.name} comes with an adapter, which trains on with its own rank {found.config.r} and alpha "
            f"{found.config.lora_alpha:g}, in place of {config.r} and {config.lora_alpha:g}.",
            stacklevel=5,
        )
    return found


def make_denoiser(config: TRLConfig, model: DiffusionModel, lora: Lora | None) -> DenoiserFns:
    """The model as algorithms see it, computed as a run's configuration asks for.

    Raises:
      ValueError: If it cannot be guided as the configuration asks for.
    """
    dtype, method = COMPUTE_DTYPES[compute_dtype(config)], config.method
    found = model.functions(compute_dtype=dtype, remat=config.train.remat, lora=lora)
    assert isinstance(method, DiffusionConfig), "the trainer saw to it"
    check_guidance(
        found,
        scale=method.sample_guidance_scale,
        rescale=method.guidance_rescale,
        has_negative=bool(method.negative_prompts),
    )
    return found


def check_guidance(denoiser: DenoiserFns, *, scale: float, rescale: float, has_negative: bool) -> None:
    """Refuses guidance that a model distilled under guidance has not: it makes no second pass.

    Args:
      denoiser: The model as algorithms see it.
      scale: w.
      rescale: φ.
      has_negative: Whether there is a negative prompt other than the empty one.
    Raises:
      ValueError: If it knows of no guidance and w is above 1, or what is asked for is of the second pass.
    """
    if denoiser.told is None:
        return
    denoiser.told(scale)
    for name, given in (("`guidance_rescale`", rescale), ("the negative prompt", has_negative)):
        if given:
            raise ValueError(
                f"{name} must be left at its default: the model was distilled under guidance and makes no second "
                "pass under a negative prompt, which diffusers calls `true_cfg_scale`, and jrl has none for it."
            )


def split_denoiser(
    config: TRLConfig, model: DiffusionModel, lora: Lora | None, *, key: PRNGKey, with_reference: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what trains, what does not).

    Args:
      config: The run's configuration.
      model: With weights.
      lora: What trains beside the denoiser; None: all of it trains.
      key: For a fresh adapter.
      with_reference: Whether the denoiser as it is now is kept, to be held against.
    """
    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    return model.split(lora=lora, key=key, compute_dtype=dtype, with_reference=with_reference)
