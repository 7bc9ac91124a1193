# SPDX-License-Identifier: Apache-2.0
"""The multimodal diffusion transformer: published sizes by shapes alone, configs, adapters, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jrl.mesh import abstract_mesh, tree_shardings
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.joined_context import join_context
from jrl.models.diffusion.mmdit import MMDiT
from jrl.models.diffusion.mmdit_config import MMDiTConfig, read_mmdit_config, stored_mmdit_config
from jrl.models.entries_io import flat_tree

# As they stand in the repositories of Stable Diffusion 3 medium, 3.5 medium and 3.5 large.
SD_3: dict[str, Any] = {
    "_class_name": "SD3Transformer2DModel",
    "_diffusers_version": "0.29.0.dev0",
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "sample_size": 128,
}
SD_35_MEDIUM = SD_3 | {
    "dual_attention_layers": list(range(13)),
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
SD_35_LARGE = SD_3 | {
    "caption_projection_dim": 2432,
    "num_attention_heads": 38,
    "num_layers": 38,
    "qk_norm": "rms_norm",
}
TINY = MMDiTConfig(
    sample_size=4,
    in_channels=2,
    num_layers=2,
    attention_head_dim=4,
    num_attention_heads=1,
    joint_attention_dim=6,
    caption_projection_dim=4,
    pooled_projection_dim=5,
    out_channels=2,
    pos_embed_max_size=3,
)


@pytest.mark.parametrize(
    ("config", "learned", "buffer"),
    [
        (SD_3, 2_028_328_000, 192**2 * 1536),
        (SD_35_MEDIUM, 2_243_171_520, 384**2 * 1536),
        (SD_35_LARGE, 8_056_627_520, 192**2 * 2432),
    ],
    ids=["3 medium", "3.5 medium", "3.5 large"],
)
def test_published_sizes(config: dict[str, Any], learned: int, buffer: int) -> None:
    sizes = {entry.name: math.prod(entry.shape) for entry in MMDiT(read_mmdit_config(config)).entries()}
    assert sizes.pop("pos_embed.pos_embed") == buffer
    assert sum(sizes.values()) == learned


@pytest.mark.slow
@pytest.mark.parametrize("config", [SD_35_MEDIUM, SD_35_LARGE], ids=["3.5 medium", "3.5 large"])
def test_memory_at_the_real_size(config: dict[str, Any]) -> None:
    """On (1, 4, 2) each device holds an eighth of what multiplies activations, and norms and biases whole."""
    tree = MMDiT(read_mmdit_config(config)).shapes
    shapes, places = map(flat_tree, (tree, tree_shardings(abstract_mesh(1, 4, 2, num_devices=8), tree)[0]))
    held = sum(math.prod(places[path].shard_shape(leaf.shape)) for path, leaf in shapes.items())

    def size(*ends: str) -> int:
        return sum(leaf.size for path, leaf in shapes.items() if path.endswith(ends))

    # The maps that make shifts and scales are split in four: their results are needed whole.
    in_four = size("norm1/linear/kernel", "norm1_context/linear/kernel", "norm_out/linear/kernel")
    whole = size("pos_embed/position_bias")  # the table of positions, which is no weight
    rest = sum(leaf.size for leaf in shapes.values()) - in_four - whole
    assert held == pytest.approx(rest / 8 + in_four / 4 + whole, rel=0.01)


@pytest.mark.slow
def test_the_parameters_of_3_5_medium_are_the_tensors_of_its_file() -> None:
    model = MMDiT(read_mmdit_config(SD_35_MEDIUM))
    shapes = {path: leaf.shape for path, leaf in flat_tree(model.shapes).items()}
    entries = {path: entry for entry in model.entries() for path in entry.paths}
    assert entries.keys() == shapes.keys()
    assert all(math.prod(entries[path].shape) == math.prod(shape) for path, shape in shapes.items())


class TestConfig:
    def test_a_config_is_written_as_it_was_read(self) -> None:
        config = read_mmdit_config(SD_35_MEDIUM)
        again = stored_mmdit_config(config)
        assert read_mmdit_config(again) == config
        for key, value in SD_35_MEDIUM.items():
            assert key == "_diffusers_version" or again[key] == value

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"qk_norm": "layer_norm"}, "`qk_norm` must be None or 'rms_norm'"),
            ({"caption_projection_dim": 1152}, "`caption_projection_dim` must be"),
            ({"dual_attention_layers": [24]}, "`dual_attention_layers` must be numbers of layers below 24"),
            ({"dual_attention_layers": [True]}, "`dual_attention_layers` must be a list of numbers"),
            ({"pooled_projection_dim": 5000}, "`pooled_projection_dim` must be at most"),
            ({"sample_size": [128, 64]}, "`sample_size` must be a positive whole number"),
            ({"context_pre_only": True}, "`context_pre_only` is unknown"),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_mmdit_config(SD_3 | changes)


class TestCall:
    def context(self) -> jax.Array:
        return join_context(jnp.ones((1, 3, 6)), jnp.ones((1, 5)))

    def test_the_pooled_prompt_is_the_last_row(self) -> None:
        assert self.context().shape == (1, 4, 6) and self.context()[0, 3].tolist() == [1] * 5 + [0]

    @pytest.mark.parametrize(
        ("latents", "rows", "message"),
        [
            ((1, 4, 4, 3), 4, "`latents` must have shape"),
            ((1, 3, 4, 2), 4, "height and width of `latents` must be multiples of 2, at most 6"),
            ((1, 8, 4, 2), 4, "height and width of `latents` must be multiples of 2, at most 6"),
            ((1, 4, 4, 2), 1, "Is the pooled prompt its last row"),
        ],
    )
    def test_wrong_shapes_are_named(self, latents: tuple[int, ...], rows: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MMDiT(TINY).apply(
                {},
                None,
                jnp.zeros(latents),
                jnp.zeros(1),
                self.context()[:, :rows],
                dtype=jnp.float32,
                remat=False,
            )

    def test_an_adapter_is_on_the_joint_attention_by_default(self) -> None:
        lora = MMDiT(TINY).bind_lora(LoraConfig(r=2, lora_alpha=2))
        adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), MMDiT(TINY).shapes))
        # Eight projections in the first block, and seven in the last, which does not write the prompt's stream.
        assert len(adapters) == 8 + 7
        assert all(".attn." in name for name in adapters)
