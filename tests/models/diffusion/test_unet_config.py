# SPDX-License-Identifier: Apache-2.0
"""The config of a U-Net: every key read, nothing ignored; and the tensors that follow from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jrl.models.diffusion.entries import as_stored, conv_entries, linear_entries, path_of
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig, read_unet_config, stored_unet_config
from jrl.models.diffusion.unet_entries import unet_entries

SD15 = UNetConfig(sample_size=64, cross_attention_dim=768)
SD21 = UNetConfig(
    sample_size=96,
    cross_attention_dim=1024,
    attention_head_dim=(5, 10, 20, 20),
    use_linear_projection=True,
    upcast_attention=True,
)
SDXL = read_unet_config(
    {
        "sample_size": 128,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280],
        "cross_attention_dim": 2048,
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
)
# A value of each key of the table that asks for what is not implemented.
UNSUPPORTED = {
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
    "up_block_types": ["SimpleCrossAttnUpBlock2D"] * 4,
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "only_cross_attention": [True, False, False, False],
    "layers_per_block": [2, 2, 2, 3],
    "downsample_padding": 0,
    "act_fn": "mish",
    "norm_num_groups": None,
    "cross_attention_dim": [768, 768, 768, 1024],
    "transformer_layers_per_block": [[1, 1], [2, 2], [10, 10], [10, 10]],
    "num_attention_heads": 8,
    "dual_cross_attention": True,
    "resnet_time_scale_shift": "scale_shift",
    "resnet_skip_time_act": True,
    "resnet_out_scale_factor": 1.4,
    "time_embedding_type": "fourier",
    "time_embedding_dim": 256,
    "time_embedding_act_fn": "silu",
    "timestep_post_act": "silu",
    "time_cond_proj_dim": 256,
    "conv_in_kernel": 1,
    "conv_out_kernel": 1,
    "class_embed_type": "timestep",
    "num_class_embeds": 10,
    "class_embeddings_concat": True,
    "flip_sin_to_cos": 1,
    "projection_class_embeddings_input_dim": 10,
    "addition_embed_type": "text",
    "addition_time_embed_dim": 256,
    "addition_embed_type_num_heads": 32,
    "encoder_hid_dim": 1024,
    "encoder_hid_dim_type": "text_proj",
    "reverse_transformer_layers_per_block": [1, 1, 1, 1],
    "mid_block_only_cross_attention": True,
    "cross_attention_norm": "group_norm",
    "attention_type": "gated",
}


ADDED = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def test_missing_keys_have_the_defaults_of_diffusers() -> None:
    config = read_unet_config({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0"})
    assert config == UNetConfig()
    assert config.block_out_channels == (320, 640, 1280, 1280) and config.heads == (8, 8, 8, 8)
    assert (config.cross_attention_dim, config.norm_eps, config.layers_per_block) == (1280, 1e-5, 2)


@pytest.mark.parametrize("config", [SD15, SD21, SDXL], ids=["1.5", "2.1", "XL"])
def test_what_is_stored_reads_back(config: UNetConfig) -> None:
    stored = stored_unet_config(config)
    assert read_unet_config(stored) == config
    assert set(UNSUPPORTED) < set(stored) and stored["dropout"] == 0.0


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"U-Net config: `{key}` must be") as caught:
        read_unet_config({**stored_unet_config(SD15), key: UNSUPPORTED[key]})
    assert "\n" not in str(caught.value)


def test_other_values_that_mean_the_same_pass() -> None:
    same: dict[str, Any] = {
        "act_fn": "swish",
        "only_cross_attention": [False] * 4,
        "mid_block_only_cross_attention": False,
        "_name_or_path": "somewhere",
    }
    assert read_unet_config({**stored_unet_config(SD21), **same}) == SD21
    with pytest.warns(UserWarning, match="`dropout` is not applied"):
        read_unet_config({"dropout": 0.1})


def test_what_a_converter_of_single_files_writes() -> None:
    """Flags that nobody set are null, and numbers are given for each level."""
    config = {
        **stored_unet_config(SD15),
        "upcast_attention": None,
        "use_linear_projection": None,
        "center_input_sample": None,
        "dual_cross_attention": None,
        "resnet_skip_time_act": None,
        "class_embeddings_concat": None,
        "layers_per_block": [2] * 4,
        "cross_attention_dim": [768] * 4,
        "transformer_layers_per_block": [1] * 4,
    }
    assert read_unet_config(config) == SD15
    with pytest.raises(ValueError, match="`layers_per_block` must be one number or 4, one for each width"):
        read_unet_config(config | {"layers_per_block": [2] * 3})


def test_unknown_keys_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"`atention_head_dim` is unknown.*Did you mean `attention_head_dim`"
    ):
        read_unet_config({"atention_head_dim": 8})
    with pytest.raises(ValueError, match=r"`head_dimension` is unknown.*implemented\.$"):
        read_unet_config({"head_dimension": 8})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_out_channels": [320, 640]}, "`down_block_types` must be 2 names"),
        ({"attention_head_dim": [8, 8]}, "`attention_head_dim` must be one number or 4"),
        ({"attention_head_dim": 7}, "`attention_head_dim` must be divisors of the widths"),
        (
            {"transformer_layers_per_block": [1, 2, 10]},
            "`transformer_layers_per_block` must be one number or 4",
        ),
        ({"addition_embed_type": "text_time"}, "`addition_time_embed_dim` must be even with .*; got None"),
        ({**ADDED, "addition_time_embed_dim": 255}, "`addition_time_embed_dim` must be even with"),
        (
            {**ADDED, "projection_class_embeddings_input_dim": 1536},
            "`projection_class_embeddings_input_dim` must be above 1536, .* by at most .* = 1280; got 1536",
        ),
        (
            {**ADDED, "projection_class_embeddings_input_dim": 2817},
            "`projection_class_embeddings_input_dim` must be above 1536, .* by at most .* = 1280; got 2817",
        ),
        (
            {"addition_time_embed_dim": 256},
            "`addition_time_embed_dim` must be null where `addition_embed_type` is",
        ),
        ({"norm_num_groups": 33}, "`block_out_channels` must be multiples of 33 groups"),
        ({"norm_num_groups": 5, "block_out_channels": [5, 5, 5, 5]}, "even at first"),
        ({"in_channels": True}, "`in_channels` must be a positive whole number; got True"),
        ({"freq_shift": 160}, "`freq_shift` must be below 160, half the first width; got 160"),
        ({"norm_eps": float("inf")}, "`norm_eps` must be a positive number; got inf"),
        ({"mid_block_scale_factor": 10**400}, "`mid_block_scale_factor` must be a positive number"),
        ({"block_out_channels": [[320]]}, "`block_out_channels` must be a list of positive whole numbers"),
        ({"layers_per_block": [[2], [2]]}, "`layers_per_block` must be a positive whole number, or the same"),
        ({"sample_size": [64]}, "`sample_size` must be a positive whole number, or two, or null"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_unet_config(changes)


def test_heads_need_not_divide_a_width_that_nothing_attends_at() -> None:
    tiny = {
        "block_out_channels": [4, 8],
        "norm_num_groups": 2,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    }
    assert read_unet_config(tiny).heads == (8, 8)


@pytest.mark.parametrize(("config", "count"), [(SD15, 859_520_964), (SD21, 865_910_724)], ids=["1.5", "2.1"])
def test_tensors_of_stable_diffusion(config: UNetConfig, count: int) -> None:
    entries = unet_entries(config)
    assert len(entries) == len({entry.name for entry in entries}) == 686
    assert sum(math.prod(entry.shape) for entry in entries) == count
    shapes = {entry.name: entry.shape for entry in entries}
    # The skips of the level below meet at the first block, those of the level itself after it.
    assert shapes["up_blocks.3.resnets.0.conv1.weight"] == (320, 960, 3, 3)
    assert shapes["up_blocks.2.resnets.0.conv1.weight"] == (640, 1920, 3, 3)
    points = () if config.use_linear_projection else (1, 1)
    assert shapes["mid_block.attentions.0.proj_in.weight"] == (1280, 1280, *points)
    assert shapes["down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k.weight"][1] in (768, 1024)


def test_tensors_of_stable_diffusion_xl() -> None:
    entries = unet_entries(SDXL)
    assert len(entries) == len({entry.name for entry in entries}) == 1680
    assert sum(math.prod(entry.shape) for entry in entries) == 2_567_463_684
    shapes = {entry.name: entry.shape for entry in entries}
    assert shapes["add_embedding.linear_1.weight"] == (1280, 2816)
    # Each level has its own depth, on the way up as on the way down; the middle has that of the coarsest.
    for place, depth in (
        ("down_blocks.1", 2),
        ("down_blocks.2", 10),
        ("up_blocks.0", 10),
        ("up_blocks.1", 2),
    ):
        block = f"{place}.attentions.0.transformer_blocks.{{}}.norm1.weight"
        assert block.format(depth - 1) in shapes and block.format(depth) not in shapes
    assert "mid_block.attentions.0.transformer_blocks.9.norm1.weight" in shapes
    assert "down_blocks.0.attentions.0.norm.weight" not in shapes


def test_what_a_resumed_run_knows_its_model_by() -> None:
    """Fields of later models leave the fingerprints of earlier ones as they were."""
    assert repr(SD15).endswith("use_linear_projection=False, upcast_attention=False)")
    assert "transformer_layers_per_block=1, " in repr(SD15)
    assert repr(UNet(SD15)) == f"UNet(config={SD15!r})"
    assert "addition_embed_type='text_time'" in repr(SDXL)
    assert repr(UNet(SD15, image_factor=4)) == f"UNet(config={SD15!r}, image_factor=4)"


def test_paths() -> None:
    assert path_of("down_blocks.0.attentions.1.ff.net.0.proj") == "down_blocks_0/attentions_1/ff/net_0/proj"
    assert path_of("time_embedding.linear_1") == "time_embedding/linear_1"
    assert path_of("a.to_out.0") == "a/to_out_0"


def test_linear_maps_stored_as_convolutions_and_the_reverse() -> None:
    """What the parameter is decides; other differences are left to be complained about."""
    entries = [*linear_entries("line", 3, 2), *conv_entries("point", 3, 2, 1), *conv_entries("wide", 3, 2, 3)]
    stored = {"line.weight": (2, 3, 1, 1), "point.weight": (2, 3), "wide.weight": (2, 3), "line.bias": (2, 1)}
    fitted = {entry.name: entry for entry in as_stored(entries, stored)}
    assert fitted["line.weight"].shape == (2, 3, 1, 1) and fitted["point.weight"].shape == (2, 3)
    assert fitted["wide.weight"].shape == (2, 3, 3, 3) and fitted["line.bias"].shape == (2,)
    weight = np.arange(6.0).reshape(2, 3)
    (kernel,) = fitted["line.weight"].transform.load(weight[:, :, None, None], [(3, 2)])
    np.testing.assert_array_equal(kernel, weight.T)
    (kernel,) = fitted["point.weight"].transform.load(weight, [(1, 1, 3, 2)])
    np.testing.assert_array_equal(kernel, weight.T[None, None])
    # Written, they have the shapes of their kind again.
    plain = {entry.name: entry for entry in entries}
    assert plain["point.weight"].transform.save([kernel], 0).shape == plain["point.weight"].shape
