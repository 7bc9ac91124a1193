# SPDX-License-Identifier: Apache-2.0
"""Folders of FLUX.1 without torch: what is read, written back and refused; sizes of the published parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ddpo_config import DDPOConfig
from jrl.mesh import make_mesh
from jrl.models.diffusion.clip_config import read_clip_pooled_config, stored_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.folder import describe_diffusion_model, load_diffusion_model
from jrl.models.diffusion.t5_config import read_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.trainers.diffusion.ddpo_sampling import Sampler
from tests.models.diffusion.folder_checks import (
    check_is_refused,
    check_is_written_back,
    check_refuses_ids,
    config,
    index_of,
    scheduler,
)
from tests.models.diffusion.pipeline_pair import KEY
from tests.models.diffusion.test_sd3_folder import T5_XXL, VAE_3
from tests.models.diffusion.test_sd_sizes import SD_1_CLIP
from tests.models.diffusion.tiny_flux_folder import save_tiny_flux_folder

# As they stand in the repository of FLUX.1-dev.
CLIP_L = SD_1_CLIP | {"torch_dtype": "bfloat16"}
VAE_FLUX = VAE_3 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
REAL: dict[str, Callable[[], Any]] = {
    "clip-l": lambda: ClipText(read_clip_pooled_config(CLIP_L)),
    "t5-xxl": lambda: T5Encoder(read_t5_config(T5_XXL)),
    "vae": lambda: VAE(read_vae_config(VAE_FLUX)),
}
COUNTS = {"clip-l": 123_060_480, "t5-xxl": 4_762_310_656, "vae": 83_819_683}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test may change."""
    return save_tiny_flux_folder(tmp_path_factory.mktemp("flux") / "tiny")


@pytest.mark.parametrize("part", REAL)
def test_sizes(part: str) -> None:
    network = REAL[part]()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == COUNTS[part]


def test_a_folder_goes_through_jrl(folder: Path, tmp_path: Path) -> None:
    model = load_diffusion_model(folder)
    assert model.latent_shape() == (128, 128, 16)
    assert model.latent_shape(16, 24) == (8, 12, 16)
    with pytest.raises(ValueError, match="`height` must be a positive multiple of 4"):
        model.latent_shape(18, 24)  # nine latents: no whole number of patches
    assert model.tokenizer(["a red cat"]).shape == (1, 8 + 512)
    check_is_written_back(folder, model, tmp_path / "again")


def test_the_shift_follows_from_the_patches_of_the_image(folder: Path) -> None:
    model = describe_diffusion_model(folder)
    # 64 × 64 latents are 32 × 32 patches: μ = 0.5 + (1024 − 256)·(1.15 − 0.5)/(4096 − 256).
    assert model.at_size((64, 64, 16)).schedule.resolution_shift == pytest.approx(0.5 + 768 * 0.65 / 3840)
    assert model.schedule.spacing == "uniform"


def test_guidance_is_an_input_and_no_second_pass(folder: Path, tmp_path: Path) -> None:
    functions = describe_diffusion_model(folder).functions(compute_dtype=jnp.float32)
    told, scale = functions.at_guidance(3.5)
    assert scale == 1.0 and told.predict is not functions.predict
    schnell = save_tiny_flux_folder(tmp_path / "schnell", kind="schnell")
    functions = describe_diffusion_model(schnell).functions(compute_dtype=jnp.float32)
    assert functions.at_guidance(1.0)[1] == 1.0
    with pytest.raises(ValueError, match="`guidance_scale` must be at most 1, got 5"):
        functions.at_guidance(5.0)


def test_nothing_is_encoded_for_a_second_pass_that_there_is_not(folder: Path) -> None:
    model = load_diffusion_model(folder).at_size((4, 4, 16))
    functions = model.functions(compute_dtype=jnp.float32)
    _, frozen = model.split(lora=None, key=KEY, compute_dtype=jnp.float32, with_reference=False)
    sampler = Sampler(
        functions,
        model.schedule,
        model.tokenizer,
        DDPOConfig(),
        mesh=make_mesh(1, devices=jax.devices()[:1]),
        latent_shape=(4, 4, 16),
        rows=1,
    )
    negative = sampler.negative(frozen)
    assert negative.shape == (1, 512 + 1, model.unet.config.joint_attention_dim) and not np.any(negative)


def test_rows_of_another_tokenizer_are_refused(folder: Path) -> None:
    model = load_diffusion_model(folder)
    check_refuses_ids(model, np.zeros((1, 77), np.int32), columns=520)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    **{
        name: (index_of(_class_name=name), f"of Flux, FLUX.1 from text to image is read.*got {name}")
        for name in (
            "FluxFillPipeline",
            "FluxControlPipeline",
            "FluxKontextPipeline",
            "FluxPriorReduxPipeline",
            "FluxImg2ImgPipeline",
            "Flux2Pipeline",
        )
    },
    "the transformer of Fill": (
        config("transformer", in_channels=384, out_channels=64),
        "`out_channels` must be 384",
    ),
    "the transformer of Control": (
        config("transformer", in_channels=128),
        "`in_channels` must be 64, the 4 . latent_channels of vae; got 128. Is it a model for text to image",
    ),
    "another kind of patch": (config("transformer", patch_size=2), "`patch_size` must be 1 "),
    "an unknown key": (config("transformer", pooled_dim=1), "`pooled_dim` is unknown"),
    "no T5": (index_of(text_encoder_2=[None, None]), "names no text_encoder_2"),
    "another T5": (
        index_of(text_encoder_2=["t", "UMT5EncoderModel"]),
        "`text_encoder_2` must be T5EncoderModel.*Is it FLUX.1",
    ),
    "another CLIP": (
        index_of(text_encoder=["t", "CLIPTextModelWithProjection"]),
        "`text_encoder` must be CLIPTextModel, got 'CLIPTextModelWithProjection'",
    ),
    "no transformer": (index_of(transformer=None), "names no transformer"),
    "another scheduler": (scheduler(_class_name="DDIMScheduler"), "must be FlowMatchEulerDiscreteScheduler"),
    "another spacing": (scheduler(use_karras_sigmas=True), "`use_karras_sigmas` must be false"),
    "an unknown key of the scheduler": (scheduler(use_flow_sigmas=True), "unknown key `use_flow_sigmas`"),
    "a narrower T5": (config("text_encoder_2", d_model=20), "`joint_attention_dim` must be 20, the d_model"),
    "a wider CLIP": (
        config("text_encoder", hidden_size=10),
        "`pooled_projection_dim` must be 10, the hidden_size of text_encoder",
    ),
    "latents": (
        config("vae", latent_channels=4),
        "`in_channels` must be 16, the 4 . latent_channels of vae; got 64",
    ),
    "no end of a text": (config("text_encoder", eos_token_id=[1]), "`eos_token_id` must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, folder: Path, tmp_path: Path) -> None:
    check_is_refused(BAD, case, folder, tmp_path / "copy")


def test_the_end_of_a_text_is_written_as_it_was_read() -> None:
    config = read_clip_pooled_config(CLIP_L)
    stored = stored_clip_config(config)
    assert stored["architectures"] == ["CLIPTextModel"] and stored["eos_token_id"] == 2
    assert read_clip_pooled_config(stored) == config
