# SPDX-License-Identifier: Apache-2.0
"""Folders of FLUX.1 against diffusers' pipeline: prompts, one call, a whole image, files both ways."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
import torch
from diffusers import FluxPipeline
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.flux_config import read_flux_config
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.lora_files import read_lora
from jrl.models.diffusion.original_names import original_modules
from tests.models.diffusion.pipeline_pair import KEY, PipelinePair, digests, noise, reread_half_precision
from tests.models.diffusion.test_flux import FLUX_DEV
from tests.models.diffusion.test_flux_folder import CLIP_L, REAL, VAE_FLUX
from tests.models.diffusion.test_folder_parity import plain
from tests.models.diffusion.test_lora_files import in_original_names, module_names, random_adapters, save
from tests.models.diffusion.test_sd3_folder import T5_XXL
from tests.models.diffusion.tiny_flux import tiny_flux
from tests.models.diffusion.torch_unets import nchw, nhwc

pytestmark = pytest.mark.parity
F32 = jnp.float32
PROMPTS = ["a red cat", "the blue dog " * 40]
STEPS, GUIDANCE = 4, 3.5
# Pixels of the images, of which a latent is two by two and a patch four by four.
HEIGHT, WIDTH = 16, 24


class Pair(PipelinePair):
    """With the contexts that a pipeline makes of the prompts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, tiny_flux(folder, **options))
        self.guidance = GUIDANCE if self.theirs.transformer.config.guidance_embeds else 1.0

    def context(self) -> jax.Array:
        return jax.jit(self.functions.encode)(self.frozen, self.ours.tokenizer(PROMPTS))

    def call(self, pipeline: FluxPipeline, latents: np.ndarray, timestep: float) -> np.ndarray:
        """The transformer as the pipeline calls it."""
        rows, height, width, channels = latents.shape
        with torch.no_grad():
            tokens, pooled, text_ids = pipeline.encode_prompt(PROMPTS, device="cpu")
            found = pipeline.transformer(
                hidden_states=pipeline._pack_latents(nchw(latents), rows, channels, height, width),
                timestep=torch.full((rows,), timestep) / 1000,
                guidance=torch.full((rows,), GUIDANCE) if self.guidance > 1 else None,
                pooled_projections=pooled,
                encoder_hidden_states=tokens,
                txt_ids=text_ids,
                img_ids=pipeline._prepare_latent_image_ids(
                    rows, height // 2, width // 2, "cpu", torch.float32
                ),
            ).sample
        return nhwc(pipeline._unpack_latents(found, 2 * height, 2 * width, 2))


CASES: dict[str, dict[str, Any]] = {
    "dev": {},
    "schnell": {"kind": "schnell"},
    # Sizes at which the shift is far from its ends, and an end of the text that is told by its id.
    "dev, another shift": {
        "base_image_seq_len": 4,
        "max_image_seq_len": 64,
        "time_shift_type": "linear",
        "clip": {"eos_token_id": 525},
    },
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("flux") / "folder", **CASES[request.param])


def test_ids(pair: Pair) -> None:
    wanted = [
        pair.theirs.tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True),
        pair.theirs.tokenizer_2(PROMPTS, padding="max_length", max_length=512, truncation=True),
    ]
    found = pair.ours.tokenizer(PROMPTS)
    assert found.tolist() == np.concatenate([x["input_ids"] for x in wanted], axis=1).tolist()


def test_prompt_embeddings(pair: Pair) -> None:
    with torch.no_grad():
        tokens, pooled, _ = pair.theirs.encode_prompt(PROMPTS, device="cpu")
    context = pair.context()
    assert context.shape == (2, 512 + 1, 24)
    np.testing.assert_allclose(context[:, :-1], tokens.numpy(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(context[:, -1, :8], pooled.numpy(), atol=1e-5, rtol=1e-5)
    assert not np.any(context[:, -1, 8:])
    assert np.abs(pooled.numpy()[0] - pooled.numpy()[1]).max() > 0.05


def test_a_call(pair: Pair) -> None:
    latents = noise(2, 8, 12, 16)
    wanted = pair.call(pair.theirs, latents, 750.0)
    model, outer = pair.functions.at_guidance(pair.guidance)
    assert outer == 1.0
    found = jax.jit(model.predict)(
        pair.params, pair.frozen, jnp.asarray(latents), jnp.full(2, 750.0), pair.context()
    )
    assert wanted.std() > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


def test_levels_of_noise(pair: Pair) -> None:
    theirs = pair.theirs.scheduler
    config = theirs.config
    num_patches = (HEIGHT // 4) * (WIDTH // 4)
    mu = calculate_shift(
        num_patches,
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / STEPS, STEPS), mu=mu)
    model = pair.ours.at_size(pair.ours.latent_shape(HEIGHT, WIDTH))
    np.testing.assert_allclose(model.schedule.sigmas(STEPS), theirs.sigmas, atol=1e-6)
    np.testing.assert_allclose(model.schedule.steps(STEPS, 0.7).timesteps, theirs.timesteps, rtol=1e-6)


def test_a_whole_image(pair: Pair) -> None:
    initial = noise(2, HEIGHT // 2, WIDTH // 2, 16)
    packed = pair.theirs._pack_latents(nchw(initial), 2, 16, HEIGHT // 2, WIDTH // 2)
    options = {
        "prompt": PROMPTS,
        "num_inference_steps": STEPS,
        "guidance_scale": pair.guidance,
        "height": HEIGHT,
        "width": WIDTH,
    }
    latents = pair.theirs(**options, latents=packed, output_type="latent").images
    images = pair.theirs(**options, latents=packed, output_type="pt").images
    context = pair.context()
    found_latents, found = pair.images(
        initial, (context, context[:1]), num_steps=STEPS, guidance_scale=pair.guidance
    )
    wanted = nhwc(pair.theirs._unpack_latents(latents, HEIGHT, WIDTH, 2))
    np.testing.assert_allclose(found_latents, wanted, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found, nhwc(images), atol=1e-4)
    assert images.std() > 0.05


def test_a_folder_is_written_back(pair: Pair, tmp_path: Path) -> None:
    params = jax.tree.map(lambda x: x + np.float32(0.125), pair.params)
    pair.ours.trained(params, None).save(tmp_path / "again")
    again = FluxPipeline.from_pretrained(tmp_path / "again")
    for part in ("vae", "text_encoder", "text_encoder_2"):
        before, after = (getattr(x, part).state_dict() for x in (pair.theirs, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
    before, after = (x.transformer.state_dict() for x in (pair.theirs, again))
    assert all(torch.equal(after[name], before[name] + 0.125) for name in before)
    for part in ("transformer", "vae", "scheduler"):
        assert plain(getattr(again, part).config) == plain(getattr(pair.theirs, part).config)
    for name in ("tokenizer", "tokenizer_2"):
        before, after = getattr(pair.theirs, name), getattr(again, name)
        assert before(PROMPTS).input_ids == after(PROMPTS).input_ids
    from safetensors.numpy import load_file

    # CLIP's tensors have the names here that every transformers reads.
    for name in ("text_encoder_2/model", "vae/diffusion_pytorch_model"):
        one, other = (
            load_file(folder / f"{name}.safetensors") for folder in (pair.folder, tmp_path / "again")
        )
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)
    assert load_diffusion_model(tmp_path / "again").architecture == pair.ours.architecture
    pair.ours.save(tmp_path / "unchanged")
    assert digests(load_diffusion_model(tmp_path / "unchanged")) == digests(pair.ours)


def test_an_adapter_goes_with_the_folder(pair: Pair, tmp_path: Path) -> None:
    lora = pair.ours.unet.bind_lora(LoraConfig(r=2, lora_alpha=4))
    adapters = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape) / 10, lora.init(KEY, {}))
    pair.ours.trained({"lora": adapters}, lora).save(tmp_path / "adapted")
    theirs = FluxPipeline.from_pretrained(tmp_path / "adapted")
    theirs.load_lora_weights(tmp_path / "adapted")
    again = load_diffusion_model(tmp_path / "adapted")
    assert again.found_lora is not None
    latents = noise(2, 8, 8, 16)
    wanted = pair.call(theirs, latents, 500.0)
    functions, _ = again.functions(compute_dtype=F32, lora=again.found_lora.lora).at_guidance(pair.guidance)
    params, frozen = again.split(lora=again.found_lora.lora, key=KEY, compute_dtype=F32, with_reference=False)
    data = (jnp.asarray(latents), jnp.full(2, 500.0), pair.context())
    found = jax.jit(functions.predict)(params, frozen, *data)
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)
    base = jax.jit(pair.functions.at_guidance(pair.guidance)[0].predict)(pair.params, pair.frozen, *data)
    assert np.abs(base - found).max() > 0.05


def shared(adapters: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    """The same with one A for the maps that are one in the published code."""
    for names in original_modules(modules).values():
        for name in names[1:]:
            if name in adapters:
                adapters[name]["A"] = adapters[names[0]]["A"]
    return adapters


def test_an_adapter_with_names_of_the_published_code(pair: Pair, tmp_path: Path) -> None:
    # Of single blocks diffusers knows the published widths alone: they are the next test's.
    modules = [name for name in module_names(pair.ours.unet) if not name.startswith("single_")]
    maps = [name for name in modules if name.startswith("transformer_blocks.") and "norm_" not in name]
    lora = pair.ours.unet.bind_lora(LoraConfig(r=2, target_modules=tuple(maps)))
    adapters = shared(jax.tree.map(lambda x: 0.1 * x, random_adapters(lora)), module_names(pair.ours.unet))
    tensors = in_original_names(adapters, module_names(pair.ours.unet))
    assert any("txt_attn_qkv" in name for name in tensors) and not any("single" in name for name in tensors)
    save(tmp_path, tensors)
    theirs = FluxPipeline.from_pretrained(pair.folder)
    theirs.load_lora_weights(tmp_path)
    found = read_lora(tmp_path, pair.ours.unet)
    assert {module.scale for module in found.lora.modules} == {3.0} and found.adapters.keys() == {*maps}
    latents = noise(2, 8, 8, 16)
    functions, _ = pair.ours.functions(compute_dtype=F32, lora=found.lora).at_guidance(pair.guidance)
    model = replace(pair.ours, found_lora=found)
    params, frozen = model.split(lora=found.lora, key=KEY, compute_dtype=F32, with_reference=False)
    data = (jnp.asarray(latents), jnp.full(2, 500.0), pair.context())
    ours = jax.jit(functions.predict)(params, frozen, *data)
    base = jax.jit(pair.functions.at_guidance(pair.guidance)[0].predict)(pair.params, pair.frozen, *data)
    assert np.abs(base - ours).max() > 0.05
    np.testing.assert_allclose(ours, pair.call(theirs, latents, 500.0), atol=1e-4, rtol=2e-5)


def test_single_blocks_of_the_published_size_are_cut_as_diffusers_cuts_them(tmp_path: Path) -> None:
    flux = Flux(read_flux_config(FLUX_DEV | {"num_layers": 1, "num_single_layers": 1}))
    maps = [name for name in module_names(flux) if name.startswith("single_") and "attn.norm" not in name]
    lora = flux.bind_lora(LoraConfig(r=2, target_modules=tuple(maps)))
    tensors = in_original_names(shared(random_adapters(lora), module_names(flux)), module_names(flux))
    assert {name.split("_0_")[1].split(".")[0] for name in tensors} == {
        "linear1",
        "linear2",
        "modulation_lin",
    }
    save(tmp_path, tensors)
    theirs = _convert_kohya_flux_lora_to_diffusers({name: torch.tensor(x) for name, x in tensors.items()})
    found = read_lora(tmp_path, flux)
    assert len(theirs) == 2 * len(found.adapters) == 2 * len(maps)
    for module in found.lora.modules:
        # diffusers multiplies the scale into A.
        for leaf, scale in (("A", module.scale), ("B", 1.0)):
            wanted = theirs[f"transformer.{module.name}.lora_{leaf}.weight"]
            np.testing.assert_allclose(scale * found.adapters[module.name][leaf], wanted, rtol=1e-6)


def test_half_precision_files(tmp_path: Path) -> None:
    kinds, index = reread_half_precision(tiny_flux, tmp_path)
    # transformers keeps one of T5's maps in float32, in which it does not overflow.
    assert kinds <= {"float16", "float32"} and "float16" in kinds
    assert index["_class_name"] == "FluxPipeline"
    assert index["text_encoder_2"] == ["transformers", "T5EncoderModel"]


@pytest.mark.slow
def test_parameters_at_real_size() -> None:
    """Of all parts of FLUX.1-dev, as torch counts them without allocating any."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    def own(config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if not key.startswith("_")}

    with torch.device("meta"):
        theirs = {
            "clip-l": CLIPTextModel(CLIPTextConfig(**CLIP_L)),
            "t5-xxl": T5EncoderModel(T5Config(**T5_XXL)),
            "vae": AutoencoderKL(**own(VAE_FLUX)),
            "transformer": FluxTransformer2DModel(**own(FLUX_DEV)),
        }
    transformer = Flux(read_flux_config(FLUX_DEV))
    ours = {name: make() for name, make in REAL.items()} | {"transformer": transformer}
    for name, network in ours.items():
        shapes = jax.tree.leaves(jax.eval_shape(network.init, KEY))
        count = sum(parameter.numel() for parameter in theirs[name].parameters())
        assert sum(math.prod(leaf.shape) for leaf in shapes) == count, name
