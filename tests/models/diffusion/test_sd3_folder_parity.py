# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion 3 against diffusers' pipeline: prompts, one call, a whole image, files both ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
import torch
from diffusers import StableDiffusion3Pipeline

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.mmdit import MMDiT
from jrl.models.diffusion.mmdit_config import read_mmdit_config
from jrl.ops.denoising import guided_output
from tests.models.diffusion.pipeline_pair import KEY, PipelinePair, digests, noise, reread_half_precision
from tests.models.diffusion.test_folder_parity import plain
from tests.models.diffusion.test_mmdit import SD_35_MEDIUM
from tests.models.diffusion.test_sd3_folder import CLIP_G, CLIP_L, REAL, T5_XXL, VAE_3
from tests.models.diffusion.tiny_sd3 import tiny_sd3
from tests.models.diffusion.torch_unets import nchw, nhwc

pytestmark = pytest.mark.parity
F32 = jnp.float32
PROMPTS = ["a red cat", "the blue dog " * 40]
STEPS, GUIDANCE = 4, 4.5


class Pair(PipelinePair):
    """With the contexts that a pipeline makes of the prompts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, tiny_sd3(folder, **options))

    def contexts(self) -> tuple[jax.Array, jax.Array]:
        encode = jax.jit(self.functions.encode)
        return tuple(encode(self.frozen, self.ours.tokenizer(texts)) for texts in (PROMPTS, [""]))

    def reread(self, folder: Path) -> StableDiffusion3Pipeline:
        """diffusers' reading of a folder; it must be told of what is absent."""
        absent = {
            name: None for name in ("text_encoder_3", "tokenizer_3") if getattr(self.theirs, name) is None
        }
        return StableDiffusion3Pipeline.from_pretrained(folder, **absent)

    def their_contexts(self) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return self.theirs.encode_prompt(PROMPTS, None, None, device="cpu", negative_prompt=["", ""])


CASES: dict[str, dict[str, Any]] = {
    "three encoders": {},
    "without T5": {"with_t5": False},
    "a shift by size": {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("sd3") / "folder", **CASES[request.param])


def test_ids(pair: Pair) -> None:
    wanted = [
        pair.theirs.tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True),
        pair.theirs.tokenizer_2(PROMPTS, padding="max_length", max_length=77, truncation=True),
    ]
    if pair.theirs.tokenizer_3 is not None:
        wanted.append(pair.theirs.tokenizer_3(PROMPTS, padding="max_length", max_length=256, truncation=True))
    found = pair.ours.tokenizer(PROMPTS)
    assert found.tolist() == np.concatenate([x["input_ids"] for x in wanted], axis=1).tolist()


def test_prompt_embeddings(pair: Pair) -> None:
    tokens, negative_tokens, pooled, negative_pooled = pair.their_contexts()
    context, negative = pair.contexts()
    for found, wanted, wanted_pooled in (
        (context, tokens, pooled),
        (negative, negative_tokens[:1], negative_pooled[:1]),
    ):
        assert found.shape[1] == 77 + 256 + 1
        np.testing.assert_allclose(found[:, :-1], wanted.numpy(), atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(found[:, -1, :10], wanted_pooled.numpy(), atol=1e-5, rtol=1e-5)
        assert not np.any(found[:, -1, 10:])
    assert np.abs(pooled.numpy()[0] - pooled.numpy()[1]).max() > 0.05


def test_a_guided_call(pair: Pair) -> None:
    latents = noise(2, 8, 8, 16)
    tokens, negative_tokens, pooled, negative_pooled = pair.their_contexts()
    with torch.no_grad():
        away, towards = pair.theirs.transformer(
            hidden_states=torch.cat([nchw(latents)] * 2),
            timestep=torch.full((4,), 750.0),
            encoder_hidden_states=torch.cat([negative_tokens, tokens]),
            pooled_projections=torch.cat([negative_pooled, pooled]),
        ).sample.chunk(2)
    context, negative = pair.contexts()

    def predict(latents: Any, timesteps: Any, context: Any) -> Any:
        return pair.functions.predict(pair.params, pair.frozen, latents, timesteps, context)

    found = jax.jit(lambda *data: guided_output(predict, *data, guidance_scale=GUIDANCE))(
        jnp.asarray(latents), jnp.full(2, 750.0), context, negative
    )
    np.testing.assert_allclose(found, nhwc(away + GUIDANCE * (towards - away)), atol=5e-5, rtol=1e-5)


def test_a_whole_image(pair: Pair) -> None:
    initial = noise(2, 8, 8, 16)
    options = {
        "prompt": PROMPTS,
        "negative_prompt": ["", ""],
        "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE,
        "height": 16,
        "width": 16,
    }
    latents = pair.theirs(**options, latents=nchw(initial), output_type="latent").images
    images = pair.theirs(**options, latents=nchw(initial), output_type="pt").images
    found_latents, found = pair.images(initial, pair.contexts(), num_steps=STEPS, guidance_scale=GUIDANCE)
    np.testing.assert_allclose(found_latents, nhwc(latents), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found, nhwc(images), atol=1e-4)
    assert images.std() > 0.05


def test_decoding(pair: Pair) -> None:
    latents, vae = 2 * noise(2, 8, 8, 16), pair.theirs.vae
    with torch.no_grad():
        code = nchw(latents) / vae.config.scaling_factor + vae.config.shift_factor
        wanted = nhwc(vae.decode(code).sample)
        moments = vae.encode(2 * nchw(np.clip(wanted / 2 + 0.5, 0, 1)) - 1).latent_dist
    found = pair.functions.decode(pair.frozen, jnp.asarray(latents))
    np.testing.assert_allclose(found, np.clip(wanted / 2 + 0.5, 0, 1), atol=1e-5)
    encoded = pair.ours.vae.encode(pair.frozen["vae"], found, dtype=F32)
    mean = (moments.mean - vae.config.shift_factor) * vae.config.scaling_factor
    np.testing.assert_allclose(encoded.mean, nhwc(mean), atol=1e-4, rtol=1e-4)


def test_a_folder_is_written_back(pair: Pair, tmp_path: Path) -> None:
    params = jax.tree.map(lambda x: x + np.float32(0.125), pair.params)
    pair.ours.trained(params, None).save(tmp_path / "again")
    again = pair.reread(tmp_path / "again")
    for part in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        before, after = getattr(pair.theirs, part), getattr(again, part)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.state_dict().keys() == after.state_dict().keys()
            assert all(torch.equal(x, after.state_dict()[name]) for name, x in before.state_dict().items())
    before, after = (x.transformer.state_dict() for x in (pair.theirs, again))
    assert all(torch.equal(after[name], before[name] + 0.125) for name in before)
    for part in ("transformer", "vae", "scheduler"):
        assert plain(getattr(again, part).config) == plain(getattr(pair.theirs, part).config)
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        before, after = getattr(pair.theirs, name), getattr(again, name)
        assert before is None or before(PROMPTS).input_ids == after(PROMPTS).input_ids
    files = ("text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors")
    from safetensors.numpy import load_file

    for name in files:
        one, other = (load_file(folder / name) for folder in (pair.folder, tmp_path / "again"))
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)
    reread = load_diffusion_model(tmp_path / "again")
    assert reread.architecture == pair.ours.architecture
    pair.ours.save(tmp_path / "unchanged")
    assert digests(load_diffusion_model(tmp_path / "unchanged")) == digests(pair.ours)


def test_an_adapter_goes_with_the_folder(pair: Pair, tmp_path: Path) -> None:
    lora = pair.ours.unet.bind_lora(LoraConfig(r=2, lora_alpha=4))
    adapters = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape) / 3, lora.init(KEY, {}))
    pair.ours.trained({"lora": adapters}, lora).save(tmp_path / "adapted")
    theirs = pair.reread(tmp_path / "adapted")
    theirs.load_lora_weights(tmp_path / "adapted")
    again = load_diffusion_model(tmp_path / "adapted")
    assert again.found_lora is not None
    latents = noise(2, 8, 8, 16)
    tokens, _, pooled, _ = pair.their_contexts()
    with torch.no_grad():
        wanted = theirs.transformer(nchw(latents), tokens, pooled, torch.full((2,), 500.0)).sample
    context, _ = pair.contexts()
    variables = again.found_lora.lora.variables(again.found_lora.adapters)
    data = (jnp.asarray(latents), jnp.full(2, 500.0), context)
    apply = jax.jit(lambda *data: again.unet.apply(*data, dtype=F32, remat=False))
    found = apply(again.weights["unet"], variables, *data)
    np.testing.assert_allclose(found, nhwc(wanted), atol=5e-5, rtol=2e-5)
    base = apply(again.weights["unet"], None, *data)
    assert np.abs(base - found).max() > 0.05


def test_half_precision_files(tmp_path: Path) -> None:
    kinds, index = reread_half_precision(tiny_sd3, tmp_path)
    # transformers keeps one of T5's maps in float32, in which it does not overflow.
    assert kinds <= {"float16", "float32"} and "float16" in kinds
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert index["text_encoder_3"] == ["transformers", "T5EncoderModel"]


def test_parameters_at_real_size() -> None:
    """Of all parts of Stable Diffusion 3.5 medium, as torch counts them without allocating any."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    with torch.device("meta"):
        theirs = {
            "clip-l": CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_L)),
            "clip-g": CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G)),
            "t5-xxl": T5EncoderModel(T5Config(**T5_XXL)),
            "vae": AutoencoderKL(**{k: v for k, v in VAE_3.items() if not k.startswith("_")}),
            "transformer": SD3Transformer2DModel(
                **{k: v for k, v in SD_35_MEDIUM.items() if not k.startswith("_")}
            ),
        }
    transformer = MMDiT(read_mmdit_config(SD_35_MEDIUM))
    ours = {name: make() for name, make in REAL.items()} | {"transformer": transformer}
    for name, network in ours.items():
        shapes = jax.tree.leaves(jax.eval_shape(network.init, KEY))
        # The table of positions is a buffer in torch, and a parameter that does not move here.
        buffer = math.prod(transformer.shapes["pos_embed"]["position_bias"].shape)
        extra = buffer if name == "transformer" else 0
        count = sum(parameter.numel() for parameter in theirs[name].parameters())
        assert sum(math.prod(leaf.shape) for leaf in shapes) == count + extra, name
