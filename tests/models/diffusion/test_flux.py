# SPDX-License-Identifier: Apache-2.0
"""The transformer of FLUX.1: published sizes by shapes alone, configs, adapters, guidance, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.flux import Flux, pack, patch_rotation, unpack
from jrl.models.diffusion.flux_config import FluxConfig, read_flux_config, stored_flux_config
from jrl.models.diffusion.joined_context import join_context
from jrl.models.entries_io import flat_tree
from tests.models.diffusion.tiny_folder import random_weights

# As they stand in the repositories of FLUX.1-dev and FLUX.1-schnell.
FLUX_DEV: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "_diffusers_version": "0.30.0.dev0",
    "_name_or_path": "../checkpoints/flux-dev/transformer",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
FLUX_SCHNELL = FLUX_DEV | {"guidance_embeds": False}
TINY = FluxConfig(
    in_channels=8,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=6,
    num_attention_heads=1,
    joint_attention_dim=6,
    pooled_projection_dim=5,
    guidance_embeds=True,
    axes_dims_rope=(2, 2, 2),
)


@pytest.mark.parametrize(
    ("config", "count"),
    [(FLUX_DEV, 11_901_408_320), (FLUX_SCHNELL, 11_891_178_560)],
    ids=["dev", "schnell"],
)
def test_published_sizes(config: dict[str, Any], count: int) -> None:
    assert sum(math.prod(entry.shape) for entry in Flux(read_flux_config(config)).entries()) == count


@pytest.mark.slow
def test_the_parameters_of_dev_are_the_tensors_of_its_file() -> None:
    model = Flux(read_flux_config(FLUX_DEV))
    shapes = {path: leaf.shape for path, leaf in flat_tree(model.shapes).items()}
    entries = {path: entry for entry in model.entries() for path in entry.paths}
    assert entries.keys() == shapes.keys()
    assert all(math.prod(entries[path].shape) == math.prod(shape) for path, shape in shapes.items())


class TestConfig:
    def test_a_config_is_written_as_it_was_read(self) -> None:
        config = read_flux_config(FLUX_DEV)
        again = stored_flux_config(config)
        assert read_flux_config(again) == config
        for key, value in FLUX_DEV.items():
            assert key in ("_diffusers_version", "_name_or_path") or again[key] == value

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"patch_size": 2}, "`patch_size` must be 1 "),
            # Those of Fill and of Control read an image beside the latents.
            ({"in_channels": 384, "out_channels": 64}, "`out_channels` must be 384"),
            ({"in_channels": 66}, "`in_channels` must be a multiple of 4"),
            ({"pooled_projection_dim": 5000}, "`pooled_projection_dim` must be at most"),
            ({"axes_dims_rope": [16, 56]}, "`axes_dims_rope` must be three even numbers"),
            ({"axes_dims_rope": [15, 57, 56]}, "`axes_dims_rope` must be three even numbers"),
            ({"axes_dims_rope": [16, 56, 54]}, "128 in sum as `attention_head_dim`"),
            ({"num_layers": 0}, "`num_layers` must be a positive whole number"),
            ({"guidance_embeds": 1}, "`guidance_embeds` must be true or false"),
            ({"qk_norm": "rms_norm"}, "`qk_norm` is unknown"),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_flux_config(FLUX_DEV | changes)


def test_a_patch_is_two_by_two_latents_by_channel() -> None:
    latents = jnp.arange(2 * 4 * 2, dtype=jnp.float32).reshape(1, 2, 4, 2)
    packed = pack(latents)
    # Channel 0 of rows 0 and 1 in columns 0 and 1, then channel 1 of the same.
    assert packed[0, 0].tolist() == [0, 2, 8, 10, 1, 3, 9, 11]
    np.testing.assert_array_equal(unpack(packed, 2, 4), latents)


def test_patches_are_turned_by_row_and_column_and_tokens_are_not() -> None:
    rotation = patch_rotation(TINY, 2, 3, num_tokens=2)
    angles = np.arctan2(rotation.sin[0], rotation.cos[0])
    assert np.allclose(angles, [[0, y, x] for y in range(2) for x in range(3)] + [[0, 0, 0]] * 2)


class TestCall:
    def context(self) -> jax.Array:
        return join_context(jnp.ones((1, 3, 6)), jnp.ones((1, 5)))

    @pytest.mark.parametrize(
        ("latents", "rows", "message"),
        [
            ((1, 4, 4, 3), 4, "`latents` must have shape"),
            ((1, 3, 4, 2), 4, "height and width of `latents` must be multiples of 2"),
            ((1, 4, 4, 2), 1, "Is the pooled prompt its last row"),
            ((1, 4, 4, 2), 4, "`guidance` must be a number.*Call `at_guidance` first"),
        ],
    )
    def test_what_is_wrong_is_named(self, latents: tuple[int, ...], rows: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Flux(TINY).apply(
                {},
                None,
                jnp.zeros(latents),
                jnp.zeros(1),
                self.context()[:, :rows],
                dtype=jnp.float32,
                remat=False,
            )

    def test_guidance_changes_the_output_and_needs_no_second_pass(self) -> None:
        model = Flux(TINY)
        data = random_weights(model), None, jnp.ones((1, 4, 4, 2)), jnp.full(1, 500.0), self.context()

        def differ(*data: Any) -> jax.Array:
            one, other = (
                model.at_guidance(scale).apply(*data, dtype=jnp.float32, remat=False) for scale in (1.0, 3.5)
            )
            return jnp.abs(one - other).max()

        assert jax.jit(differ)(*data) > 1e-3

    def test_who_knows_of_no_guidance_refuses_it(self) -> None:
        model = Flux(read_flux_config(FLUX_SCHNELL))
        assert model.at_guidance(1.0) is model and model.at_guidance(0.0) is model
        with pytest.raises(ValueError, match=r"`guidance_scale` must be at most 1, got 3\.5"):
            model.at_guidance(3.5)

    def test_an_adapter_is_on_all_attention_by_default(self) -> None:
        lora = Flux(TINY).bind_lora(LoraConfig(r=2, lora_alpha=2))
        adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), Flux(TINY).shapes))
        # Eight projections of a block over two streams, and three of one over both as one.
        assert len(adapters) == 8 + 3
        assert all(".attn." in name for name in adapters)
