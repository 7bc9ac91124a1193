# SPDX-License-Identifier: Apache-2.0
"""`DiffusionModel`: what trains, what does not, and what is written. Nothing is compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion import pipeline
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.lora_files import LORA_FILE, read_lora
from jrl.models.diffusion.pipeline import DiffusionModel, FoundLora

KEY = jax.random.key(0)


def test_latent_shapes(tiny_model: DiffusionModel) -> None:
    assert tiny_model.latent_shape(6, 10) == (3, 5, 4)
    assert tiny_model.latent_shape(width=10) == (8, 5, 4)
    for name, height, width in (("height", 7, 10), ("width", 6, 0)):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive multiple of 2"):
            tiny_model.latent_shape(height, width)


def test_an_adapter_trains(tiny_model: DiffusionModel) -> None:
    lora = tiny_model.unet.bind_lora(LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian"))
    params, frozen = tiny_model.split(lora=lora, key=KEY, compute_dtype=jnp.bfloat16, with_reference=True)
    assert params.keys() == {"lora"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert not any(np.any(leaves["B"]) for leaves in params["lora"].values())
    assert frozen.keys() == {"unet", "vae", "text_encoder"}, "the base is the reference"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_whole_denoiser_trains(with_reference: bool, tiny_model: DiffusionModel) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), tiny_model.weights)
    model = replace(tiny_model, weights=half)
    params, frozen = model.split(lora=None, key=KEY, compute_dtype=jnp.float16, with_reference=with_reference)
    assert params.keys() == {"unet"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}, "masters"
    assert frozen.keys() == {"vae", "text_encoder", *(["reference"] if with_reference else [])}
    # In float16 the decoder overflows.
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen["vae"])} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen["text_encoder"])} == {"float16"}


def test_what_trains_may_be_donated(tiny_model: DiffusionModel) -> None:
    """And is where the weights are: a mesh may hold what its first device does not."""
    on_device = replace(tiny_model, weights=jax.tree.map(jnp.asarray, tiny_model.weights))
    for model, kind in ((tiny_model, np.ndarray), (on_device, jax.Array)):
        params, _ = model.split(lora=None, key=KEY, compute_dtype=jnp.float32, with_reference=True)
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(params))
        weights, taken = (jax.tree.leaves(tree) for tree in (model.weights["unet"], params))
        assert not set(map(address, taken)) & set(map(address, weights))
        placed = jax.device_put(params)
        jax.tree.map(lambda leaf: leaf.delete(), placed)
        assert np.isfinite(model.weights["unet"]["conv_in"]["bias"]).all()


def address(leaf: Any) -> int:
    return int(leaf.unsafe_buffer_pointer() if isinstance(leaf, jax.Array) else leaf.ctypes.data)


@pytest.mark.parametrize("with_lora", [False, True])
def test_the_functions_keep_no_weights_alive(with_lora: bool, tiny_model: DiffusionModel) -> None:
    model = replace(tiny_model, weights=jax.tree.map(np.array, tiny_model.weights))
    kept = [weakref.ref(leaf) for leaf in jax.tree.leaves(model.weights)]
    lora = model.unet.bind_lora(LoraConfig(r=2)) if with_lora else None
    functions = model.functions(compute_dtype=jnp.float32, lora=lora)
    del model
    assert functions is not None and not any(leaf() is not None for leaf in kept)


def test_what_came_from_a_device_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a view of its memory, or the caller's own, is."""
    fetched = {"gpu": np.ones(3), "cpu": np.ones(3)[:]}
    leaves = {name: jnp.zeros(3) for name in fetched}
    names = {id(leaf): name for name, leaf in leaves.items()}
    monkeypatch.setattr(
        jax, "device_get", lambda leaf: fetched[names[id(leaf)]] if id(leaf) in names else leaf
    )
    own = np.ones(3)
    host = pipeline._on_host(leaves | {"own": own})
    assert host["gpu"] is fetched["gpu"]
    assert not np.shares_memory(host["cpu"], fetched["cpu"]) and not np.shares_memory(host["own"], own)


def test_a_reference_that_was_not_kept(tiny_model: DiffusionModel) -> None:
    functions = tiny_model.functions(compute_dtype=jnp.float32)
    with pytest.raises(ValueError, match="with_reference=True"):
        functions.reference({}, jnp.zeros((1, 2, 2, 4)), jnp.zeros(1, jnp.int32), jnp.zeros((1, 3, 8)))


def test_a_found_adapter_is_what_trains(tiny_model: DiffusionModel) -> None:
    lora = tiny_model.unet.bind_lora(LoraConfig(r=2, lora_alpha=2))
    found = jax.tree.map(lambda x: np.asarray(x) + 1, lora.init(KEY, {}))
    model = replace(tiny_model, found_lora=FoundLora(lora, found))
    params, _ = model.split(lora=lora, key=KEY, compute_dtype=jnp.float32, with_reference=False)
    name = lora.modules[0].name
    assert np.array_equal(params["lora"][name]["B"], found[name]["B"])
    for other in (None, tiny_model.unet.bind_lora(LoraConfig(r=2))):
        with pytest.raises(ValueError, match=r"comes with an adapter, which must be what trains"):
            model.split(lora=other, key=KEY, compute_dtype=jnp.float32, with_reference=False)
    merged = model.merged()
    assert merged.found_lora is None
    attention = ("mid_block", "attentions_0", "transformer_blocks_0", "attn1", "to_v", "kernel")
    before, after = tiny_model.weights["unet"], merged.weights["unet"]
    for step in attention:
        before, after = before[step], after[step]
    update = found["mid_block.attentions.0.transformer_blocks.0.attn1.to_v"]
    expected = before.reshape(8, 8) + (update["B"] @ update["A"]).T
    np.testing.assert_allclose(after.reshape(8, 8), expected, rtol=1e-6, atol=1e-6)


def test_the_reference_keeps_an_adapter_that_was_found(
    tiny_model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = tiny_model.unet.bind_lora(LoraConfig(r=2, lora_alpha=2))
    found = jax.tree.map(lambda x: np.asarray(x) + 1, lora.init(KEY, {}))
    model = replace(tiny_model, found_lora=FoundLora(lora, found))
    seen = []
    monkeypatch.setattr(
        type(tiny_model.unet), "apply", lambda self, base, adapter, *_, **__: seen.append(adapter)
    )
    functions = model.functions(compute_dtype=jnp.float32, lora=lora)
    inputs = jnp.zeros((1, 2, 2, 4)), jnp.zeros(1, jnp.int32), jnp.zeros((1, 3, 8))
    params, frozen = model.split(lora=lora, key=KEY, compute_dtype=jnp.float32, with_reference=True)
    functions.predict(params, frozen, *inputs)
    functions.reference(frozen, *inputs)
    jax.tree.map(np.testing.assert_array_equal, *seen)
    _, frozen = model.split(lora=lora, key=KEY, compute_dtype=jnp.float32, with_reference=False)
    with pytest.raises(ValueError, match="with_reference=True"):
        functions.reference(frozen, *inputs)


def test_the_writer_keeps_what_it_was_given(tiny_model: DiffusionModel, tmp_path: Path) -> None:
    lora = tiny_model.unet.bind_lora(LoraConfig(r=2, lora_alpha=2))
    params = {"lora": jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 1), lora.init(KEY, {}))}
    name = lora.modules[0].name
    kept = np.array(params["lora"][name]["B"])
    write = tiny_model.writer(params, lora)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    write(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LORA_FILE]
    assert np.array_equal(read_lora(tmp_path / "out", tiny_model.unet).adapters[name]["B"], kept)


def test_a_trained_denoiser_is_written(
    tiny_model: DiffusionModel, changed_folder: Callable[[], Path], tmp_path: Path
) -> None:
    params, _ = tiny_model.split(lora=None, key=KEY, compute_dtype=jnp.float32, with_reference=False)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + 1), params)
    folder = changed_folder()
    tiny_model.writer(params, None)(folder)
    whole = tmp_path / "whole"
    tiny_model.trained(params, None).save(whole)
    for found in (load_diffusion_model(folder), load_diffusion_model(whole)):
        pairs = zip(jax.tree.leaves(found.weights["unet"]), jax.tree.leaves(params["unet"]), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
        assert np.array_equal(
            found.weights["vae"]["quant_conv"]["bias"], tiny_model.weights["vae"]["quant_conv"]["bias"]
        )


def test_what_came_from_no_folder_is_not_saved_whole(tiny_model: DiffusionModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="came from no folder"):
        replace(tiny_model, files=None).save(tmp_path / "x")


def test_weights_do_not_change_the_architecture(tiny_model: DiffusionModel) -> None:
    zeros = jax.tree.map(np.zeros_like, tiny_model.weights)
    assert replace(tiny_model, weights=zeros).architecture == tiny_model.architecture
    wider = replace(tiny_model, schedule=replace(tiny_model.schedule, beta_end=0.013))
    assert wider.architecture != tiny_model.architecture


def test_a_model_that_an_older_version_knew_has_the_architecture_that_it_had(
    tiny_model: DiffusionModel,
) -> None:
    """A run that an older version began is resumed only by a model of the same text."""
    found = tiny_model.architecture
    assert found["vae"] == (
        "VAE(config=VAEConfig(in_channels=3, out_channels=3, "
        "down_block_types=('DownEncoderBlock2D', 'DownEncoderBlock2D'), "
        "up_block_types=('UpDecoderBlock2D', 'UpDecoderBlock2D'), block_out_channels=(4, 8), layers_per_block=1, "
        "latent_channels=4, norm_num_groups=2, sample_size=32, scaling_factor=0.18215, force_upcast=True, "
        "use_quant_conv=True, use_post_quant_conv=True, mid_block_add_attention=True))"
    )
    assert found["text_encoder"] == (
        "ClipText(config=ClipTextConfig(vocab_size=600, hidden_size=8, intermediate_size=16, num_hidden_layers=2, "
        "num_attention_heads=2, max_position_embeddings=16, hidden_act='quick_gelu', layer_norm_eps=1e-05))"
    )
    shifted = replace(tiny_model.vae, config=replace(tiny_model.vae.config, shift_factor=0.1))
    assert replace(tiny_model, vae=shifted).architecture != found
