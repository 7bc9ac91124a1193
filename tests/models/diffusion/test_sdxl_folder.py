# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion XL without torch: what is read, written back and refused; sizes of the published one."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.diffusion.clip_config import read_clip_config, read_clip_projected_config
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.folder import describe_diffusion_model, load_diffusion_model
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from tests.models.diffusion.folder_checks import (
    check_is_refused,
    check_is_written_back,
    check_refuses_ids,
    config,
    index_of,
    scheduler,
)
from tests.models.diffusion.test_sd3_folder import CLIP_G
from tests.models.diffusion.test_sd_sizes import SD_1_CLIP as CLIP_L
from tests.models.diffusion.test_sd_sizes import SD_VAE
from tests.models.diffusion.tiny_folder import change_json
from tests.models.diffusion.tiny_sdxl_folder import save_tiny_sdxl_folder

# As they stand in the repository of Stable Diffusion XL base 1.0.
SDXL_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": "0.19.0.dev0",
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_embed_type_num_heads": 64,
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_dim": 2048,
    "cross_attention_norm": None,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_only_cross_attention": None,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "sample_size": 128,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "upcast_attention": None,
    "use_linear_projection": True,
}
VAE_XL = SD_VAE | {"force_upcast": True, "sample_size": 1024, "scaling_factor": 0.13025}
REAL: dict[str, Callable[[], Any]] = {
    "unet": lambda: UNet(read_unet_config(SDXL_UNET)),
    "vae": lambda: VAE(read_vae_config(VAE_XL)),
    "clip-l": lambda: ClipText(read_clip_config(CLIP_L)),
    "clip-g": lambda: ClipProjected(read_clip_projected_config(CLIP_G)),
}
COUNTS = {
    "unet": 2_567_463_684,
    "vae": 83_653_863,
    "clip-l": 123_060_480,
    "clip-g": 694_659_840,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test may change."""
    return save_tiny_sdxl_folder(tmp_path_factory.mktemp("sdxl") / "tiny")


@pytest.mark.parametrize("part", REAL)
def test_sizes(part: str) -> None:
    network = REAL[part]()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == COUNTS[part]
    assert sum(math.prod(entry.shape) for entry in network.entries()) == COUNTS[part]


def test_a_folder_goes_through_jrl(folder: Path, tmp_path: Path) -> None:
    model = load_diffusion_model(folder)
    assert model.latent_shape() == (8, 8, 4) and model.zero_negative
    assert model.unet.image_factor == model.vae.factor == 2
    assert model.tokenizer(["a red cat"]).shape == (1, 8 + 8)
    again = check_is_written_back(folder, model, tmp_path / "again")
    assert again.zero_negative


def test_inputs_of_another_model_are_refused(folder: Path) -> None:
    model = load_diffusion_model(folder)
    check_refuses_ids(model, np.zeros((1, 77), np.int32), columns=16)
    latents, context = jnp.zeros((1, 8, 8, 4)), jnp.zeros((1, 1, 20))
    with pytest.raises(ValueError, match=r"`context` must have at least 2 rows.*`join_context`.*got 1"):
        model.unet.apply(
            model.weights["unet"], None, latents, jnp.array([1]), context, dtype=jnp.float32, remat=False
        )


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a refiner": (
        index_of(_class_name="StableDiffusionXLImg2ImgPipeline", text_encoder=[None, None]),
        "one of .*Stable Diffusion XL .*got StableDiffusionXLImg2ImgPipeline, which has `text_encoder_2`",
    ),
    "inpainting": (
        index_of(_class_name="StableDiffusionXLInpaintPipeline"),
        "got StableDiffusionXLInpaintPipeline, which has `text_encoder_2`",
    ),
    "no first encoder": (index_of(text_encoder=[None, None]), "names no text_encoder:"),
    "a first encoder with projection": (
        index_of(text_encoder=["t", "CLIPTextModelWithProjection"]),
        "`text_encoder` must be CLIPTextModel, got 'CLIPTextModelWithProjection'. Is it Stable Diffusion XL",
    ),
    "scores of aesthetics": (
        index_of(requires_aesthetics_score=True),
        "model_index.json config: `requires_aesthetics_score` is unknown",
    ),
    "zeros that are no flag": (
        index_of(force_zeros_for_empty_prompt="yes"),
        "`force_zeros_for_empty_prompt` must be true or false; got 'yes'",
    ),
    "a U-Net of Stable Diffusion 2": (
        config(
            "unet",
            addition_embed_type=None,
            addition_time_embed_dim=None,
            projection_class_embeddings_input_dim=None,
        ),
        "`addition_embed_type` must be 'text_time' in Stable Diffusion XL",
    ),
    "pooled vectors": (
        config("unet", projection_class_embeddings_input_dim=43),
        "`projection_class_embeddings_input_dim` must be 42, the projection_dim of text_encoder_2",
    ),
    "a narrower prompt": (
        config("unet", cross_attention_dim=12),
        "`cross_attention_dim` must be 20, the hidden_size of text_encoder and text_encoder_2 together; got 12",
    ),
    "latents": (config("vae", latent_channels=8), "`in_channels` must be 8, the latent_channels of vae"),
    "two kinds of blocks": (
        config("unet", transformer_layers_per_block=[1, 2]),
        "`transformer_layers_per_block` must be one number or 3",
    ),
    "guidance as an input": (config("unet", time_cond_proj_dim=256), "`time_cond_proj_dim` must be None"),
    "shorter rows of the second encoder": (
        config("text_encoder_2", max_position_embeddings=4),
        "text_encoder_2.*`max_position_embeddings` must be at least 8",
    ),
    "latents that are shifted": (config("vae", latents_mean=[0.1]), "`latents_mean` must be None"),
    "a flow": (scheduler(_class_name="FlowMatchEulerDiscreteScheduler"), "must be one of a model with β"),
    "levels told to the network": (
        scheduler(timestep_type="continuous"),
        "`timestep_type` must be 'discrete', got 'continuous'",
    ),
    "levels in the place of timesteps": (
        scheduler(_class_name="EDMDPMSolverMultistepScheduler"),
        "must be one of a model with β",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, folder: Path, tmp_path: Path) -> None:
    check_is_refused(BAD, case, folder, tmp_path / "copy")


def test_settings_of_the_index(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for setting, zero in ((False, False), (None, True)):
        change_json(copy / "model_index.json", force_zeros_for_empty_prompt=setting, add_watermarker=True)
        assert describe_diffusion_model(copy).zero_negative is zero


def test_a_size_that_is_not_said(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_json(copy / "unet/config.json", sample_size=None)
    assert describe_diffusion_model(copy).sample_size == (128, 128)
    change_json(copy / "unet/config.json", sample_size=[8, 12])
    assert describe_diffusion_model(copy).sample_size == (8, 12)
