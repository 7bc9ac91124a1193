# SPDX-License-Identifier: Apache-2.0
"""The autoencoder and the text encoder against stored results of torch, and by what must hold of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.diffusion import clip_entries, vae_entries
from jrl.models.diffusion.clip_config import ClipTextConfig, read_clip_config, stored_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.part_files import PART_FILES, read_part
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import VAEConfig, read_vae_config, stored_vae_config
from jrl.models.safetensors_write import LazyTensor, write_file

GOLDEN = Path(__file__).parents[2] / "golden" / "diffusion_parts.npz"
TOLERANCE = 1e-5
AUTOENCODER = VAE(
    VAEConfig(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8),
        norm_num_groups=2,
    )
)
ENCODER = ClipText(
    ClipTextConfig(
        vocab_size=1000, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as data:
        return dict(data)


def weights(golden: dict[str, np.ndarray], name: str, part: Any, folder: Path) -> Any:
    """A part's stored tensors, through a file and the loader."""
    prefix, filed = f"{name}/", PART_FILES[name]
    tensors = {key.removeprefix(prefix): x for key, x in golden.items() if key.startswith(prefix)}
    path = folder / f"{filed.stem}.safetensors"
    write_file(path, {key: LazyTensor(x.dtype, x.shape, lambda x=x: x) for key, x in tensors.items()})
    return read_part(folder, part, filed, None)


def test_decoder(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    params = weights(golden, "vae", AUTOENCODER, tmp_path)
    decode = jax.jit(lambda params, latents: AUTOENCODER.decode(params, latents, dtype=jnp.float32))
    inside = (golden["decoded"] > 0) & (golden["decoded"] < 1)
    assert 0.2 < inside.mean() < 1, "some values are clipped, and some are not"
    np.testing.assert_allclose(
        decode(params, golden["latents"]), golden["decoded"], atol=TOLERANCE, rtol=TOLERANCE
    )


def test_encoder(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    params = weights(golden, "vae", AUTOENCODER, tmp_path)
    encode = jax.jit(lambda params, images: AUTOENCODER.encode(params, images, dtype=jnp.float32))
    mean, deviation = encode(params, golden["images"])
    np.testing.assert_allclose(mean, golden["mean"], atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(deviation, golden["deviation"], atol=TOLERANCE, rtol=TOLERANCE)


def test_text_encoder(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    params = weights(golden, "text_encoder", ENCODER, tmp_path)
    encode = jax.jit(lambda params, tokens: ENCODER.encode(params, tokens, dtype=jnp.float32))
    context = encode(params, golden["tokens"])
    np.testing.assert_allclose(context, golden["context"], atol=TOLERANCE, rtol=TOLERANCE)
    changed = golden["tokens"].copy()
    changed[:, 5] = 7
    again = encode(params, changed)
    assert np.array_equal(again[:, :5], context[:, :5]), "no position sees what follows it"
    assert not np.isclose(again[:, 5:], context[:, 5:]).all(axis=-1).any()
    changed[0, 8] = 1000
    assert np.isnan(encode(params, changed)[0, 8]).all(), "an id outside the table is seen"


def test_names_of_older_files() -> None:
    old = "decoder.mid_block.attentions.0.proj_attn.weight"
    assert vae_entries.current_name(old) == "decoder.mid_block.attentions.0.to_out.0.weight"
    assert vae_entries.current_name("encoder.mid_block.attentions.0.key.bias").endswith(".to_k.bias")
    assert {vae_entries.current_name(entry.name) for entry in AUTOENCODER.entries()} == {
        entry.name for entry in AUTOENCODER.entries()
    }
    assert clip_entries.current_name("final_layer_norm.bias") == "text_model.final_layer_norm.bias"
    assert clip_entries.is_ignored(clip_entries.current_name("embeddings.position_ids"))
    assert not any(clip_entries.is_ignored(entry.name) for entry in ENCODER.entries())


def test_keys_that_transformers_gives_to_all_models() -> None:
    """And no nearest name for a key that resembles none."""
    keys = {
        "tie_word_embeddings": True,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "return_dict": True,
        "chunk_size_feed_forward": 0,
        "is_encoder_decoder": False,
        "problem_type": None,
        "pruned_heads": {},
        "torchscript": False,
    }
    config = stored_clip_config(ENCODER.config)
    assert read_clip_config(config | keys) == ENCODER.config
    with pytest.raises(ValueError, match=r"`num_hidden_states` is unknown.*implemented\.$"):
        read_clip_config(config | {"num_hidden_states": 2})


def test_longer_than_the_table() -> None:
    with pytest.raises(ValueError, match=r"`tokens` must have at most 77 columns.*got 78"):
        ENCODER.encode({}, jnp.zeros((1, 78), jnp.int32), dtype=jnp.float32)


def test_a_config_is_written_as_it_is_read() -> None:
    config = AUTOENCODER.config
    assert read_vae_config(stored_vae_config(config)) == config
    assert hash(config) == hash(read_vae_config(stored_vae_config(config)))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_out_channels", [4, 9], "multiples of 2 groups"),
        ("block_out_channels", [4, 0], "a list of positive whole numbers"),
        ("down_block_types", ["DownEncoderBlock2D"], "2 names, one for each width"),
        ("latents_mean", [0.0], "None .*not implemented"),
        ("act_fn", "gelu", "'silu' or 'swish'"),
        ("use_quant_conv", 1, "true or false"),
        ("scaling_factor", -1, "a positive number"),
        ("down_block_types", [["DownEncoderBlock2D"]], "a list of 'DownEncoderBlock2D' only"),
        ("layers_per_block", True, "a positive whole number"),
    ],
)
def test_bad_configs(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"VAE config: `{key}` must be .*{expected}"):
        read_vae_config(stored_vae_config(AUTOENCODER.config) | {key: value})
