# SPDX-License-Identifier: Apache-2.0
"""Folders of Stable Diffusion XL against diffusers' pipeline: prompts, one call, a whole image, files both ways."""

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
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionXLPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig as PeftConfig
from peft.utils import get_peft_model_state_dict
from safetensors.numpy import load_file

from jrl.learners.ddpo_config import DDPOConfig
from jrl.mesh import make_mesh
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.lora_files import LORA_FILE, read_lora
from jrl.models.diffusion.part_files import PART_FILES
from jrl.models.diffusion.unet import LORA_TARGETS
from jrl.ops.denoising import guided_output
from jrl.trainers.diffusion.ddpo_sampling import Sampler
from tests.models.diffusion.pipeline_pair import KEY, PipelinePair, digests, noise, reread_half_precision
from tests.models.diffusion.test_folder_parity import plain
from tests.models.diffusion.test_lora_files import in_original_names, module_names, random_adapters, save
from tests.models.diffusion.test_sdxl_folder import CLIP_G, CLIP_L, REAL, SDXL_UNET, VAE_XL
from tests.models.diffusion.tiny_sdxl import tiny_sdxl
from tests.models.diffusion.torch_unets import nchw, nhwc

pytestmark = pytest.mark.parity
F32 = jnp.float32
PROMPTS = ["a red cat", "the blue dog " * 40]
STEPS, GUIDANCE = 4, 5.0
SHAPE = (8, 12, 4)
"""Of the latents: height and width differ, so that their order in the sizes shows."""


class Pair(PipelinePair):
    """With the contexts that a pipeline makes of the prompts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, tiny_sdxl(folder, **options))

    def contexts(self, negative: str = "") -> tuple[jax.Array, jax.Array]:
        """What the denoiser reads of the prompts, and of the negative one as a run has it."""
        sampler = Sampler(
            self.functions,
            self.ours.schedule,
            self.ours.tokenizer,
            DDPOConfig(negative_prompts=negative),
            mesh=make_mesh(1, devices=jax.devices()[:1]),
            latent_shape=SHAPE,
            rows=2,
            zero_negative=self.ours.zero_negative,
        )
        context = jax.jit(self.functions.encode)(self.frozen, self.ours.tokenizer(PROMPTS))
        return context, sampler.negative(self.frozen)

    def their_contexts(self, negative: str | None = None) -> tuple[torch.Tensor, ...]:
        """(prompts, negative prompt, both of them pooled)."""
        with torch.no_grad():
            return self.theirs.encode_prompt(
                PROMPTS, device="cpu", negative_prompt=negative and [negative] * 2
            )

    def sizes(self) -> torch.Tensor:
        """The sizes of an image of this shape, as the pipeline gives them."""
        height, width = (self.ours.vae.factor * edge for edge in SHAPE[:2])
        return self.theirs._get_add_time_ids(
            (height, width), (0, 0), (height, width), torch.float32, text_encoder_projection_dim=6
        )


CASES: dict[str, dict[str, Any]] = {
    "epsilon, zeros of an empty prompt": {},
    "v, an empty prompt as it is read": {"zero_negative": False, "prediction_type": "v_prediction"},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("sdxl") / "folder", **CASES[request.param])


def test_ids(pair: Pair) -> None:
    wanted = [
        tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True)["input_ids"]
        for tokenizer in (pair.theirs.tokenizer, pair.theirs.tokenizer_2)
    ]
    assert pair.ours.tokenizer(PROMPTS).tolist() == np.concatenate(wanted, axis=1).tolist()


def test_prompt_embeddings(pair: Pair) -> None:
    for text in (None, "a dog"):
        tokens, negative_tokens, pooled, negative_pooled = pair.their_contexts(text)
        context, negative = pair.contexts(text or "")
        for found, wanted, wanted_pooled in (
            (context, tokens, pooled),
            (negative, negative_tokens[:1], negative_pooled[:1]),
        ):
            assert found.shape[1:] == (77 + 1, 20)
            np.testing.assert_allclose(found[:, :-1], wanted.numpy(), atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(found[:, -1, :6], wanted_pooled.numpy(), atol=1e-5, rtol=1e-5)
            assert not np.any(found[:, -1, 6:])
        # An empty prompt that is no negative one is read like any other.
        assert np.any(negative) == (text is not None or not pair.ours.zero_negative)
    empty = pair.functions.encode(pair.frozen, pair.ours.tokenizer([""]))
    assert np.abs(empty).max() > 0.05
    assert np.abs(pooled.numpy()[0] - pooled.numpy()[1]).max() > 0.05


def test_a_guided_call(pair: Pair) -> None:
    latents, timesteps = noise(2, *SHAPE), np.array([981, 21], np.int32)
    tokens, negative_tokens, pooled, negative_pooled = pair.their_contexts()
    added = {
        "text_embeds": torch.cat([negative_pooled, pooled]),
        "time_ids": pair.sizes().repeat(4, 1),
    }
    with torch.no_grad():
        away, towards = pair.theirs.unet(
            torch.cat([nchw(latents)] * 2),
            torch.from_numpy(np.tile(timesteps, 2)),
            torch.cat([negative_tokens, tokens]),
            added_cond_kwargs=added,
        ).sample.chunk(2)
        elsewhere = pair.theirs.unet(
            nchw(latents),
            torch.from_numpy(timesteps),
            tokens,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": pair.sizes().flip(1).repeat(2, 1)},
        ).sample
    assert (elsewhere - towards).abs().max() > 1e-3, "the sizes must matter"
    context, negative = pair.contexts()

    def predict(latents: Any, timesteps: Any, context: Any) -> Any:
        return pair.functions.predict(pair.params, pair.frozen, latents, timesteps, context)

    found = jax.jit(lambda *data: guided_output(predict, *data, guidance_scale=GUIDANCE))(
        jnp.asarray(latents), jnp.asarray(timesteps), context, negative
    )
    np.testing.assert_allclose(found, nhwc(away + GUIDANCE * (towards - away)), atol=5e-5, rtol=1e-5)


def their_images(pair: Pair, scheduler: Any, initial: np.ndarray, **options: Any) -> tuple[Any, Any]:
    """(last latents, images), by a scheduler."""
    pipeline = StableDiffusionXLPipeline(
        **pair.theirs.components | {"scheduler": scheduler},
        force_zeros_for_empty_prompt=pair.ours.zero_negative,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    options |= {
        "prompt": PROMPTS,
        "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE,
        "height": 2 * SHAPE[0],
        "width": 2 * SHAPE[1],
        "latents": nchw(initial),
    }
    return tuple(pipeline(**options, output_type=kind).images for kind in ("latent", "pt"))


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_whole_image(pair: Pair, eta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By DDIM, which takes the place of the folder's scheduler; its noise is given."""
    initial, noises = noise(2, *SHAPE), noise(STEPS, 2, *SHAPE)[::-1].copy()
    scheduler = DDIMScheduler.from_config(pair.theirs.scheduler.config)
    drawn: list[int] = []

    def draw(*_: Any, **__: Any) -> torch.Tensor:
        drawn.append(len(drawn) % STEPS)
        return nchw(noises[drawn[-1]])

    monkeypatch.setattr("diffusers.schedulers.scheduling_ddim.randn_tensor", draw)
    latents, images = their_images(pair, scheduler, initial, eta=eta)
    assert len(drawn) == (2 * STEPS if eta else 0)
    found_latents, found = pair.images(
        initial, pair.contexts(), num_steps=STEPS, guidance_scale=GUIDANCE, eta=eta, noises=noises
    )
    np.testing.assert_allclose(found_latents, nhwc(latents), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found, nhwc(images), atol=1e-4)
    assert images.std() > 0.05


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own
def test_without_noise_it_is_the_folders_own_sampler(pair: Pair) -> None:
    """Euler's steps are those of DDIM at η = 0, in latents over √ᾱ; the last of both here goes to ᾱ_0."""
    initial = noise(2, *SHAPE)
    scheduler = EulerDiscreteScheduler.from_config(
        pair.theirs.scheduler.config, final_sigmas_type="sigma_min"
    )
    latents, _ = their_images(pair, scheduler, initial)
    found, _ = pair.images(initial, pair.contexts(), num_steps=STEPS, guidance_scale=GUIDANCE)
    level = pair.ours.schedule.alphas_cumprod[0]
    np.testing.assert_allclose(found, math.sqrt(level) * nhwc(latents), atol=1e-4, rtol=1e-4)


def test_decoding(pair: Pair) -> None:
    latents, vae = 0.3 * noise(2, *SHAPE), pair.theirs.vae
    with torch.no_grad():
        wanted = nhwc(vae.decode(nchw(latents) / 0.13025).sample)
    found = pair.functions.decode(pair.frozen, jnp.asarray(latents))
    np.testing.assert_allclose(found, np.clip(wanted / 2 + 0.5, 0, 1), atol=1e-5)


def test_a_folder_is_written_back(pair: Pair, tmp_path: Path) -> None:
    params = jax.tree.map(lambda x: x + np.float32(0.125), pair.params)
    pair.ours.trained(params, None).save(tmp_path / "again")
    again = StableDiffusionXLPipeline.from_pretrained(tmp_path / "again")
    for part in ("vae", "text_encoder", "text_encoder_2"):
        before, after = (getattr(pipeline, part).state_dict() for pipeline in (pair.theirs, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    before, after = (pipeline.unet.state_dict() for pipeline in (pair.theirs, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name] + 0.125) for name in before)
    for part in ("unet", "vae", "scheduler"):
        assert plain(getattr(again, part).config) == plain(getattr(pair.theirs, part).config)
    assert again.config.force_zeros_for_empty_prompt == pair.ours.zero_negative
    for name in ("tokenizer", "tokenizer_2"):
        assert getattr(pair.theirs, name)(PROMPTS).input_ids == getattr(again, name)(PROMPTS).input_ids
    for name, filed in PART_FILES.items():
        path = f"{name}/{filed.stem}.safetensors"
        if name == "unet" or not (pair.folder / path).is_file():
            continue
        one, other = (
            {filed.current_name(key): tensor for key, tensor in load_file(folder / path).items()}
            for folder in (pair.folder, tmp_path / "again")
        )
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)
    assert load_diffusion_model(tmp_path / "again").architecture == pair.ours.architecture
    pair.ours.save(tmp_path / "unchanged")
    reread = load_diffusion_model(tmp_path / "unchanged")
    assert digests(reread) == digests(pair.ours) and reread.zero_negative == pair.ours.zero_negative


def output_with(pair: Pair, found: Any) -> jax.Array:
    """The U-Net's output with an adapter, or None of it."""
    context, _ = pair.contexts()
    variables = None if found is None else found.lora.variables(found.adapters)
    data = (jnp.asarray(noise(2, *SHAPE)), jnp.full(2, 501), context)
    apply = jax.jit(lambda *data: pair.ours.unet.apply(*data, dtype=F32, remat=False))
    return apply(pair.params["unet"], variables, *data)


def their_output(pair: Pair, unet: Any) -> np.ndarray:
    tokens, _, pooled, _ = pair.their_contexts()
    added = {"text_embeds": pooled, "time_ids": pair.sizes().repeat(2, 1)}
    with torch.no_grad():
        out = unet(nchw(noise(2, *SHAPE)), torch.full((2,), 501), tokens, added_cond_kwargs=added)
    return nhwc(out.sample)


def test_our_adapter_in_diffusers(pair: Pair, tmp_path: Path) -> None:
    lora = pair.ours.unet.bind_lora(LoraConfig(r=2, lora_alpha=4))
    adapters = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape) / 3, lora.init(KEY, {}))
    pair.ours.trained({"lora": adapters}, lora).save(tmp_path / "adapted")
    theirs = StableDiffusionXLPipeline.from_pretrained(tmp_path / "adapted")
    theirs.load_lora_weights(tmp_path / "adapted")
    found = load_diffusion_model(tmp_path / "adapted").found_lora
    assert found is not None
    ours = output_with(pair, found)
    np.testing.assert_allclose(ours, their_output(pair, theirs.unet), atol=5e-5, rtol=2e-5)
    assert np.abs(output_with(pair, None) - ours).max() > 0.05


@pytest.mark.parametrize("dialect", ["diffusers", "metadata"])
def test_their_adapter_in_jrl(dialect: str, pair: Pair, tmp_path: Path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(pair.folder)
    # Only metadata says a scale.
    alpha = 6 if dialect == "metadata" else 3
    pipeline.unet.add_adapter(
        PeftConfig(r=3, lora_alpha=alpha, init_lora_weights=False, target_modules=list(LORA_TARGETS))
    )
    state = get_peft_model_state_dict(pipeline.unet)
    if dialect == "metadata":
        metadata = pipeline.unet.peft_config["default"].to_dict()
        pipeline.save_lora_weights(tmp_path, unet_lora_layers=state, unet_lora_adapter_metadata=metadata)
    else:
        pipeline.save_lora_weights(tmp_path, unet_lora_layers=convert_state_dict_to_diffusers(state))
    found = read_lora(tmp_path, pair.ours.unet)
    assert {module.scale for module in found.lora.modules} == {alpha / 3}
    wanted = their_output(pair, pipeline.unet)
    np.testing.assert_allclose(output_with(pair, found), wanted, atol=5e-5, rtol=2e-5)
    assert (tmp_path / LORA_FILE).is_file()


def test_an_adapter_with_names_of_the_published_code(pair: Pair, tmp_path: Path) -> None:
    targets = (*LORA_TARGETS, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "time_emb_proj")
    lora = pair.ours.unet.bind_lora(LoraConfig(r=2, target_modules=targets))
    adapters = jax.tree.map(lambda x: 0.2 * x, random_adapters(lora))
    tensors = in_original_names(adapters, module_names(pair.ours.unet))
    assert len(tensors) == 3 * len(adapters)
    save(tmp_path, tensors)
    theirs = StableDiffusionXLPipeline.from_pretrained(pair.folder)
    theirs.load_lora_weights(tmp_path)
    found = read_lora(tmp_path, pair.ours.unet)
    assert {module.scale for module in found.lora.modules} == {3.0}
    ours = output_with(pair, found)
    assert np.abs(output_with(pair, None) - ours).max() > 0.05
    np.testing.assert_allclose(ours, their_output(pair, theirs.unet), atol=1e-4, rtol=2e-5)


def test_half_precision_files(tmp_path: Path) -> None:
    kinds, index = reread_half_precision(tiny_sdxl, tmp_path)
    assert kinds == {"float16"}
    assert index["_class_name"] == "StableDiffusionXLPipeline"
    assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]


def test_parameters_at_real_size() -> None:
    """Of all parts of the published base model, as torch counts them without allocating any."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    def settings(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if not key.startswith("_")}

    with torch.device("meta"):
        theirs = {
            "unet": UNet2DConditionModel(**settings(SDXL_UNET)),
            "vae": AutoencoderKL(**settings(VAE_XL)),
            "clip-l": CLIPTextModel(CLIPTextConfig(**CLIP_L)),
            "clip-g": CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G)),
        }
    assert theirs.keys() == REAL.keys()
    for name, make in REAL.items():
        shapes = jax.tree.leaves(jax.eval_shape(make().init, KEY))
        count = sum(parameter.numel() for parameter in theirs[name].parameters())
        assert sum(math.prod(leaf.shape) for leaf in shapes) == count, name
