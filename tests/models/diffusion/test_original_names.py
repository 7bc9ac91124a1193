# SPDX-License-Identifier: Apache-2.0
"""Names of the published code: those of Stable Diffusion XL and FLUX.1, written down from their checkpoints."""

from __future__ import annotations

import pytest

from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.flux_config import read_flux_config
from jrl.models.diffusion.original_names import original_modules
from jrl.models.diffusion.parts import Denoiser
from jrl.models.diffusion.unet import UNet
from tests.models.diffusion.test_flux import FLUX_DEV
from tests.models.diffusion.test_unet_config import SD15, SDXL

XL = {
    "input_blocks.0.0": "conv_in",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks.4.0.skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks.4.1.proj_in": "down_blocks.1.attentions.0.proj_in",
    "input_blocks.5.1.transformer_blocks.0.attn1.to_q": (
        "down_blocks.1.attentions.1.transformer_blocks.0.attn1.to_q"
    ),
    "input_blocks.8.1.transformer_blocks.9.ff.net.0.proj": (
        "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj"
    ),
    "middle_block.1.transformer_blocks.0.attn2.to_out.0": (
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0"
    ),
    "middle_block.2.out_layers.3": "mid_block.resnets.1.conv2",
    "output_blocks.2.1.norm": "up_blocks.0.attentions.2.norm",
    "output_blocks.2.2.conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks.3.1.proj_out": "up_blocks.1.attentions.0.proj_out",
    "output_blocks.7.0.emb_layers.1": "up_blocks.2.resnets.1.time_emb_proj",
    "out.2": "conv_out",
}
# A level without attention, as the coarsest of Stable Diffusion 1 is.
SD1 = {
    "input_blocks.11.0.in_layers.2": "down_blocks.3.resnets.1.conv1",
    "output_blocks.2.1.conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks.5.2.conv": "up_blocks.1.upsamplers.0.conv",
    "output_blocks.11.1.proj_in": "up_blocks.3.attentions.2.proj_in",
}


def modules(denoiser: Denoiser) -> list[str]:
    names = (entry.name for entry in denoiser.entries())
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


@pytest.mark.parametrize(("config", "names"), [(SDXL, XL), (SD15, SD1)], ids=["XL", "1.5"])
def test_every_module_of_a_unet_has_a_name(config: object, names: dict[str, str]) -> None:
    known = modules(UNet(config))
    found = original_modules(known)
    assert sorted(name for (name,) in found.values()) == sorted(known)
    assert {original: (name,) for original, name in names.items()}.items() <= found.items()


def test_flux_joins_maps() -> None:
    known = modules(Flux(read_flux_config(FLUX_DEV)))
    found = original_modules(known)
    attention = "single_transformer_blocks.37.attn"
    assert found["single_blocks.37.linear1"] == (
        *(f"{attention}.to_{part}" for part in "qkv"),
        "single_transformer_blocks.37.proj_mlp",
    )
    assert found["double_blocks.18.txt_attn.qkv"] == tuple(
        f"transformer_blocks.18.attn.add_{part}_proj" for part in "qkv"
    )
    assert found["guidance_in.out_layer"] == ("time_text_embed.guidance_embedder.linear_2",)
    named = [name for names in found.values() for name in names]
    assert len(set(named)) == len(named)
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    assert {name for name in known if not name.endswith(norms)} - set(named) == {"norm_out.linear"}


def test_another_network_has_none() -> None:
    assert original_modules(["transformer_blocks.0.attn.to_q", "pos_embed.proj"]) == {}
