# SPDX-License-Identifier: Apache-2.0
"""What must hold of DDPO's programs on H100, at the widths of Stable Diffusion 1.5 with two levels of its U-Net."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jrl
from jrl.bench.diffusion_counts import unet_counts
from jrl.mesh import abstract_mesh
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import stored_unet_config
from jrl.trainers.plan.hlo import collectives, largest_arrays, num_flops
from tests.aot.conftest import compile_recipe
from tests.models.diffusion.test_sd_sizes import SD_1_CLIP, SD_VAE
from tests.models.diffusion.test_unet_config import SD15
from tests.models.diffusion.tiny_folder import INDEX, SCHEDULER
from tests.models.diffusion.toy_tokenizer import save_toy_tokenizer

pytestmark = pytest.mark.aot

MESH = {"data": 2, "fsdp": 4, "tensor": 1}
DEVICES, STEPS, SAMPLES, MICROBATCH = 8, 20, 128, 32
SCORES_BYTES = 256 << 20
UNET = replace(
    SD15,
    block_out_channels=(320, 640),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("aot")
    save_toy_tokenizer(folder / "model" / "tokenizer")
    for name, content in {
        "unet/config.json": stored_unet_config(UNET),
        "vae/config.json": SD_VAE,
        "text_encoder/config.json": SD_1_CLIP,
        "scheduler/scheduler_config.json": SCHEDULER,
        "model_index.json": INDEX,
    }.items():
        path: Path = folder / "model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    config = jrl.default_ddpo_config().evolve(
        model={"model_path": str(folder / "model")},
        method={
            "sample_num_steps": STEPS,
            "sample_batch_size": SAMPLES // 2,
            "sample_num_batches_per_epoch": 2,
        },
        train={"batch_size": SAMPLES // 2, "minibatch_size": MICROBATCH, "epochs": 1},
    )
    mesh = ",".join(f"{axis}={size}" for axis, size in MESH.items())
    return compile_recipe(config, folder, f"gpu:h100x{DEVICES}", mesh, ["sample", "update"])


def test_no_weight_is_gathered_for_a_denoising_step(programs: dict[str, str]) -> None:
    """All are once a call, and as bfloat16."""
    found = collectives(programs["sample"], abstract_mesh(**MESH, num_devices=DEVICES))
    gathers = [one for one in found if one.kind == "all-gather" and one.num_bytes > 1024]
    assert {one.place for one in gathers} == {()}
    kernels = [leaf for leaf in jax.tree.leaves(UNet(UNET).shapes) if leaf.ndim > 1 and leaf.size > 1 << 16]
    num_bytes = 2 * sum(leaf.size for leaf in kernels)
    # With the U-Net the decoder of images, 49 M weights. The text encoder, a CLIP, is whole on every device.
    assert num_bytes < sum(one.num_bytes for one in gathers) < num_bytes + 2 * 50_000_000


@pytest.mark.parametrize("name", ["sample", "update"])
def test_no_array_of_all_scores(name: str, programs: dict[str, str]) -> None:
    """Whole or in part, an array of scores has the keys as an axis."""
    for kind, shape, size in largest_arrays(programs[name], 60):
        assert not (kind == "f32" and 64 * 64 in shape and size > SCORES_BYTES), shape


def test_gradients_of_an_adapter_are_summed_once_a_step(programs: dict[str, str]) -> None:
    """What meets for each microbatch are its samples, as they lie on the devices that drew them."""
    mesh = abstract_mesh(**MESH, num_devices=DEVICES)
    rows = MICROBATCH // DEVICES
    in_steps, in_microbatches = (
        {
            array.shape
            for one in collectives(programs["update"], mesh)
            for array in one.arrays
            if "data" in one.axes and len(one.place) == loops and math.prod(array.shape) > 1024
        }
        for loops in (1, 2)
    )
    assert in_microbatches == {(rows, 64, 64, 4), (rows, 77, 768)}
    assert in_steps


def test_the_update_computes_what_the_model_needs(programs: dict[str, str]) -> None:
    """At most 1.1 times: two passes for guidance, forward and backward, for each sample and step."""
    counts = unet_counts(UNET, latent_shape=(64, 64), context_length=77)
    needed = SAMPLES * STEPS * 2 * (counts.forward + counts.backward(full=False))
    assert needed < DEVICES * num_flops(programs["update"], rounds=1) < 1.1 * needed
