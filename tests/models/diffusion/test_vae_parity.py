# SPDX-License-Identifier: Apache-2.0
"""The autoencoder and the text encoder against diffusers and transformers (P3, P4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.diffusion.clip_config import read_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.part_files import PART_FILES, read_part
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.models.hub import read_json

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
TOLERANCE = 1e-5
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def random(*shape: int, seed: int = 0, mean: float = 0.0, deviation: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(mean + deviation * values, np.float32)


def first(x: np.ndarray) -> Any:
    """Channels-last to torch's channels-first."""
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def last(x: Any) -> np.ndarray:
    return x.detach().numpy().transpose(0, 2, 3, 1)


def load_vae(folder: Path) -> tuple[VAE, dict[str, Any]]:
    vae = VAE(read_vae_config(read_json(folder / "config.json")))
    return vae, read_part(folder, vae, PART_FILES["vae"], None)


def respell(folder: Path, *, as_convolution: bool) -> None:
    """Rewrites a file of weights with the attention as old diffusers wrote it."""
    from safetensors.torch import load_file, save_file

    path = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".attentions.0.to_" in name]:
        tensor = tensors.pop(name)
        for new, old in OLD_NAMES.items():
            name = name.replace(f".{new}.", f".{old}.")
        is_weight = tensor.ndim == 2
        tensors[name] = tensor[:, :, None, None].contiguous() if as_convolution and is_weight else tensor
    assert any(".proj_attn.weight" in name for name in tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["A", "B"])
def test_vae(kind: str, tmp_path: Path) -> None:
    from tests.models.diffusion.tiny_pipelines import tiny_vae

    theirs = tiny_vae(kind)
    theirs.save_pretrained(tmp_path)
    ours, params = load_vae(tmp_path)
    decode = jax.jit(lambda params, latents: ours.decode(params, latents, dtype=jnp.float32))
    encode = jax.jit(lambda params, images: ours.encode(params, images, dtype=jnp.float32))
    scale = theirs.config.scaling_factor
    # A large mean shows a variance that is computed as a difference; small values show a wrong epsilon.
    for mean, deviation in ((0.0, scale), (3.0 * scale, 5.0 * scale), (0.0, 1e-3)):
        latents = random(2, 6, 10, 4, mean=mean, deviation=deviation)
        with torch.no_grad():
            raw = last(theirs.decode(first(latents) / scale).sample)
        images = decode(params, latents)
        assert images.dtype == jnp.float32
        np.testing.assert_allclose(images, np.clip(raw / 2 + 0.5, 0, 1), atol=TOLERANCE, rtol=TOLERANCE)
        assert (np.abs(raw) < 1).mean() > 0.2, "nearly everything is clipped: nothing would be compared"
    for deviation in (0.3, 1e-3):
        images = random(2, 12, 20, 3, seed=1, mean=0.5, deviation=deviation)
        with torch.no_grad():
            moments = theirs.encode(first(2 * images - 1)).latent_dist
        mean, spread = encode(params, images)
        np.testing.assert_allclose(mean, last(moments.mean) * scale, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(spread, last(moments.std) * scale, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("as_convolution", [False, True])
def test_old_spelling_of_the_attention(as_convolution: bool, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    from tests.models.diffusion.tiny_pipelines import tiny_vae

    tiny_vae("A").save_pretrained(tmp_path / "new")
    tiny_vae("A").save_pretrained(tmp_path / "old")
    respell(tmp_path / "old", as_convolution=as_convolution)
    _, new = load_vae(tmp_path / "new")
    _, old = load_vae(tmp_path / "old")
    for part in ("to_q", "to_k", "to_v", "to_out_0"):
        for half in ("encoder", "decoder"):
            a, b = (tree[half]["mid_block"]["attentions_0"][part]["kernel"] for tree in (new, old))
            assert np.array_equal(a, b)
    if not as_convolution:
        # Theirs reads what the test wrote, so the test wrote what old files hold.
        AutoencoderKL.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_quant_conv": False, "use_post_quant_conv": False},
        {"mid_block_add_attention": False, "layers_per_block": 2},
    ],
)
def test_vae_options(changes: dict[str, Any], tmp_path: Path) -> None:
    from tests.models.diffusion.tiny_pipelines import tiny_vae

    theirs = tiny_vae("A", **changes)
    theirs.save_pretrained(tmp_path)
    ours, params = load_vae(tmp_path)
    latents = random(1, 4, 4, 4)
    with torch.no_grad():
        raw = last(theirs.decode(first(latents) / theirs.config.scaling_factor).sample)
    images = jax.jit(lambda params, latents: ours.decode(params, latents, dtype=jnp.float32))(params, latents)
    np.testing.assert_allclose(images, np.clip(raw / 2 + 0.5, 0, 1), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["A", "B"])
def test_text_encoder(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.models.diffusion.tiny_pipelines import tiny_text_encoder

    theirs = tiny_text_encoder(kind)
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 1000, (3, 77))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).last_hidden_state.numpy()
    ours = ClipText(read_clip_config(read_json(tmp_path / "config.json")))
    encode = jax.jit(lambda params, tokens: ours.encode(params, tokens, dtype=jnp.float32))
    path = tmp_path / "model.safetensors"
    plain = {name.removeprefix("text_model."): tensor for name, tensor in load_file(path).items()}
    positions = torch.arange(77)[None]
    for prefix, extra in (("", {}), ("text_model.", {"text_model.embeddings.position_ids": positions})):
        save_file(
            {f"{prefix}{name}": tensor for name, tensor in plain.items()} | extra, path, {"format": "pt"}
        )
        params = read_part(tmp_path, ours, PART_FILES["text_encoder"], None)
        context = encode(params, tokens.astype(np.int32))
        np.testing.assert_allclose(context, expected, atol=TOLERANCE, rtol=TOLERANCE)
