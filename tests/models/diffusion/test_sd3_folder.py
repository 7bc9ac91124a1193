# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion 3 without torch: what is read, written back and refused; sizes of the published ones."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrl.models.diffusion.clip_config import read_clip_projected_config
from jrl.models.diffusion.clip_projection import ClipProjected
from jrl.models.diffusion.folder import describe_diffusion_model, load_diffusion_model
from jrl.models.diffusion.t5_config import read_t5_config, stored_t5_config
from jrl.models.diffusion.t5_encoder import T5Encoder
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
from tests.models.diffusion.test_sd_sizes import SD_1_CLIP, SD_VAE
from tests.models.diffusion.tiny_folder import change_json
from tests.models.diffusion.tiny_sd3_folder import save_tiny_sd3_folder

# As they stand in the repository of Stable Diffusion 3.5 medium.
CLIP_L = SD_1_CLIP | {"architectures": ["CLIPTextModelWithProjection"], "dtype": "float16"}
CLIP_G = CLIP_L | {
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "projection_dim": 1280,
}
T5_XXL = {
    "architectures": ["T5EncoderModel"],
    "classifier_dropout": 0.0,
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "decoder_start_token_id": 0,
    "dense_act_fn": "gelu_new",
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 24,
    "num_heads": 64,
    "num_layers": 24,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 32128,
}
VAE_3 = SD_VAE | {
    "force_upcast": True,
    "latent_channels": 16,
    "latents_mean": None,
    "latents_std": None,
    "mid_block_add_attention": True,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
REAL: dict[str, Callable[[], Any]] = {
    "clip-l": lambda: ClipProjected(read_clip_projected_config(CLIP_L)),
    "clip-g": lambda: ClipProjected(read_clip_projected_config(CLIP_G)),
    "t5-xxl": lambda: T5Encoder(read_t5_config(T5_XXL)),
    "vae": lambda: VAE(read_vae_config(VAE_3)),
}
COUNTS = {
    "clip-l": 123_650_304,
    "clip-g": 694_659_840,
    "t5-xxl": 4_762_310_656,
    "vae": 83_819_683,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test may change."""
    return save_tiny_sd3_folder(tmp_path_factory.mktemp("sd3") / "tiny")


@pytest.mark.parametrize("part", REAL)
def test_sizes(part: str) -> None:
    network = REAL[part]()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == COUNTS[part]
    assert sum(math.prod(entry.shape) for entry in network.entries()) == COUNTS[part]


def test_a_folder_goes_through_jrl(folder: Path, tmp_path: Path) -> None:
    model = load_diffusion_model(folder)
    assert model.latent_shape() == (8, 8, 16)
    assert model.tokenizer(["a red cat"]).shape == (1, 8 + 8 + 256)
    check_is_written_back(folder, model, tmp_path / "again")


def test_rows_of_another_tokenizer_are_refused(folder: Path) -> None:
    model = load_diffusion_model(folder)
    check_refuses_ids(model, np.zeros((1, 77), np.int32), columns=272)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "T5 without tokenizer": (index_of(tokenizer_3=[None, None]), "names no tokenizer_3"),
    "another T5": (
        index_of(text_encoder_3=["t", "UMT5EncoderModel"]),
        "`text_encoder_3` must be T5EncoderModel",
    ),
    "another CLIP": (
        index_of(text_encoder=["t", "CLIPTextModel"]),
        "`text_encoder` must be CLIPTextModelWithProjection.*Is it Stable Diffusion 3",
    ),
    "no transformer": (index_of(transformer=None), "names no transformer"),
    "another scheduler": (scheduler(_class_name="DDIMScheduler"), "must be FlowMatchEulerDiscreteScheduler"),
    "another spacing": (scheduler(use_karras_sigmas=True), "`use_karras_sigmas` must be false"),
    "an unknown key of the scheduler": (scheduler(shifty=1.0), "unknown key `shifty`"),
    "a narrower T5": (config("text_encoder_3", d_model=20), "`joint_attention_dim` must be 20, the d_model"),
    "another activation of T5": (
        config("text_encoder_3", feed_forward_proj="gated-silu"),
        "`feed_forward_proj` must be 'relu' or 'gated-gelu'",
    ),
    "an activation that is not derived": (
        config("text_encoder_3", dense_act_fn="gelu"),
        "`dense_act_fn` must be 'gelu_new' with `feed_forward_proj` as it is; got 'gelu'",
    ),
    "a decoder": (config("text_encoder_3", is_decoder=True), "`is_decoder` must be False"),
    "an unknown key of T5": (config("text_encoder_3", num_layer=3), "`num_layer` is unknown.*num_layers"),
    "pooled vectors": (
        config("transformer", pooled_projection_dim=12),
        "`pooled_projection_dim` must be 10, the projection_dim of text_encoder and text_encoder_2",
    ),
    "latents": (config("vae", latent_channels=4), "`in_channels` must be 4, the latent_channels of vae"),
    "a shift that is none": (config("vae", shift_factor="x"), "`shift_factor` must be a number, or null"),
    "no end of a text": (config("text_encoder", eos_token_id=[1]), "`eos_token_id` must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, folder: Path, tmp_path: Path) -> None:
    check_is_refused(BAD, case, folder, tmp_path / "copy")


def test_without_t5(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_json(copy / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    model = describe_diffusion_model(copy)
    assert set(model.weights["text_encoder"]) == {"text_encoder", "text_encoder_2"}
    assert model.tokenizer([""]).shape == (1, 16)
    # Wider than what takes them, the two CLIPs would be cut.
    change_json(copy / "transformer/config.json", joint_attention_dim=12)
    with pytest.raises(ValueError, match="`joint_attention_dim` must be at least 20"):
        describe_diffusion_model(copy)


def test_a_stored_config_is_read_again() -> None:
    config = read_t5_config(T5_XXL)
    assert read_t5_config(stored_t5_config(config)) == config
