# SPDX-License-Identifier: Apache-2.0
"""Folders and LoRA files against diffusers and PEFT, both ways (P10, P11, P12)."""

from __future__ import annotations

import json
import random as random_module
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.lora_files import LORA_FILE, LORA_STEM, read_lora
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.diffusion.saving import write_unet_folder
from jrl.models.safetensors_io import TensorFiles
from jrl.typing import Params
from tests.models.diffusion.test_lora_files import kohya, processors, random_adapters, save

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
TOLERANCE = 1e-5
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Pipeline A of torch with the scheduler of Stable Diffusion 1, and its folder."""
    from tests.models.diffusion.tiny_pipelines import tiny_pipeline

    folder = tmp_path_factory.mktemp("pipeline") / "A"
    return tiny_pipeline("A", folder, scheduler="PNDM"), folder


@pytest.fixture(scope="module")
def model(saved: tuple[Any, Path]) -> DiffusionModel:
    # Today's PNDM has no such key; the checkpoints of its time have it, and it is false.
    with pytest.warns(UserWarning, match="clip_sample"):
        return load_diffusion_model(saved[1])


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


LATENTS, CONTEXT, TIMESTEPS = noise(2, 8, 8, 4), noise(2, 7, 8), np.array([981, 21], np.int32)


def their_output(unet: Any) -> np.ndarray:
    """The U-Net of torch, on latents with channels last."""
    latents = torch.from_numpy(np.ascontiguousarray(LATENTS.transpose(0, 3, 1, 2)))
    with torch.no_grad():
        out = unet(latents, torch.from_numpy(TIMESTEPS), torch.from_numpy(CONTEXT)).sample
    return out.numpy().transpose(0, 2, 3, 1)


def our_output(model: DiffusionModel, lora: Any = None, adapters: Params | None = None) -> np.ndarray:
    variables = None if lora is None else lora.variables(adapters)

    @jax.jit
    def run(params: Params, variables: Any) -> Any:
        inputs = (jnp.asarray(LATENTS), jnp.asarray(TIMESTEPS), jnp.asarray(CONTEXT))
        return model.unet.apply(params, variables, *inputs, dtype=jnp.float32, remat=False)

    return np.asarray(run(model.weights["unet"], variables))


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def plain(config: Any) -> dict[str, Any]:
    """What a config says of the model, tuples as lists."""
    return json.loads(json.dumps({key: value for key, value in config.items() if not key.startswith("_")}))


def test_a_pipeline_goes_through_jrl(saved: tuple[Any, Path], model: DiffusionModel, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    pipeline, _ = saved
    close(our_output(model), their_output(pipeline.unet))
    model.save(tmp_path / "again")
    again = StableDiffusionPipeline.from_pretrained(tmp_path / "again")
    assert again.safety_checker is None
    for part in ("unet", "vae", "text_encoder"):
        before, after = getattr(pipeline, part).state_dict(), getattr(again, part).state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before), part
    for part in ("unet", "vae", "scheduler"):
        before, after = plain(getattr(pipeline, part).config), plain(getattr(again, part).config)
        assert before == after, part
    texts = ["a red cat", "", "THE  blue dog's 12 hats!"]
    for text in texts:
        assert again.tokenizer(text).input_ids == pipeline.tokenizer(text).input_ids
    parts = {"unet": model.weights["unet"]}
    write_unet_folder(
        tmp_path, model.unet.stored_config(), model.unet.entries(), parts["unet"], max_shard_bytes=30_000
    )
    assert len(list((tmp_path / "unet").glob("*.safetensors"))) > 1
    close(their_output(UNet2DConditionModel.from_pretrained(tmp_path / "unet")), their_output(pipeline.unet))


@pytest.mark.parametrize("kind", ["A", "B"])
def test_half_precision_files(kind: str, tmp_path: Path) -> None:
    from tests.models.diffusion.tiny_pipelines import tiny_pipeline

    pipeline = tiny_pipeline(kind, tmp_path / kind, variant="fp16", prediction_type="v_prediction")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_diffusion_model(tmp_path / kind, variant="fp16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.weights)} == {"float16"}
    assert model.schedule.prediction_type == "v_prediction"
    bias = pipeline.unet.conv_out.bias.detach().numpy()
    assert np.array_equal(model.weights["unet"]["conv_out"]["bias"], bias)


def test_our_adapter_in_diffusers_and_peft(
    saved: tuple[Any, Path], model: DiffusionModel, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.utils import convert_unet_state_dict_to_peft
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    pipeline, folder = saved
    base = their_output(pipeline.unet)
    # A scale other than 1, and a rank of its own for some.
    config = LoraConfig(r=3, lora_alpha=6, rank_pattern={r".*attn2\.to_q": 2})
    lora = model.unet.bind_lora(config)
    adapters = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(KEY, x.shape), lora.init(KEY, {}))
    ours = our_output(model, lora, adapters)
    assert np.abs(ours - base).max() > 0.1, "the adapter does nothing"
    model.writer({"lora": adapters}, lora)(tmp_path)
    theirs = StableDiffusionPipeline.from_pretrained(folder)
    theirs.load_lora_weights(tmp_path)
    close(ours, their_output(theirs.unet))
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    state = load_file(tmp_path / LORA_FILE)
    state = convert_unet_state_dict_to_peft({name.removeprefix("unet."): x for name, x in state.items()})
    ranks = {r".*attn2\.to_q": 2}
    inject_adapter_in_model(
        PeftConfig(r=3, lora_alpha=3, rank_pattern=ranks, alpha_pattern=ranks, target_modules=TARGETS), unet
    )
    assert not set_peft_model_state_dict(unet, state).unexpected_keys
    close(ours, their_output(unet))
    found = read_lora(tmp_path, model.unet)
    close(our_output(model, found.lora, found.adapters), ours)


@pytest.mark.parametrize("dialect", ["diffusers", "metadata", "peft"])
def test_their_adapter_in_jrl(
    dialect: str, saved: tuple[Any, Path], model: DiffusionModel, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig as PeftConfig
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    unet = UNet2DConditionModel.from_pretrained(saved[1] / "unet")
    # Only metadata says a scale.
    alpha = 6 if dialect == "metadata" else 3
    unet.add_adapter(PeftConfig(r=3, lora_alpha=alpha, init_lora_weights=False, target_modules=TARGETS))
    state = get_peft_model_state_dict(unet)
    if dialect == "peft":
        tensors = {f"base_model.model.{name}": x.contiguous() for name, x in state.items()}
        save_file(tensors, tmp_path / LORA_FILE)
    elif dialect == "metadata":
        metadata = unet.peft_config["default"].to_dict()
        StableDiffusionPipeline.save_lora_weights(
            tmp_path, unet_lora_layers=state, unet_lora_adapter_metadata=metadata
        )
    else:
        layers = convert_state_dict_to_diffusers(state)
        StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)
    found = read_lora(tmp_path, model.unet)
    assert {module.scale for module in found.lora.modules} == {alpha / 3}
    close(our_output(model, found.lora, found.adapters), their_output(unet))


@pytest.mark.parametrize("rename", [processors, kohya])
def test_older_dialects(rename: Any, saved: tuple[Any, Path], model: DiffusionModel, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    adapters = random_adapters(model.unet.bind_lora(LoraConfig(r=3)))
    save(tmp_path, rename(jax.tree.map(lambda x: 0.3 * x, adapters)))
    theirs = StableDiffusionPipeline.from_pretrained(saved[1])
    theirs.load_lora_weights(tmp_path)
    found = read_lora(tmp_path, model.unet)
    close(our_output(model, found.lora, found.adapters), their_output(theirs.unet))


def test_names_that_diffusers_writes(saved: tuple[Any, Path], model: DiffusionModel, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig as PeftConfig
    from peft.utils import get_peft_model_state_dict

    unet = UNet2DConditionModel.from_pretrained(saved[1] / "unet")
    unet.add_adapter(PeftConfig(r=4, lora_alpha=4, target_modules=TARGETS))
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
    StableDiffusionPipeline.save_lora_weights(tmp_path / "theirs", unet_lora_layers=layers)
    lora = model.unet.bind_lora(LoraConfig(r=4, lora_alpha=4))
    model.writer({"lora": lora.init(KEY, {})}, lora)(tmp_path / "ours")
    theirs, ours = (TensorFiles(tmp_path / name, LORA_STEM).info for name in ("theirs", "ours"))
    assert {name: (info.dtype, info.shape) for name, info in ours.items()} == {
        name: (info.dtype, info.shape) for name, info in theirs.items()
    }


def test_ids_of_200_texts(saved: tuple[Any, Path], model: DiffusionModel) -> None:
    tokenizer, generator = saved[0].tokenizer, random_module.Random(0)
    symbols = "abcdeABC redcatdog 0123 '!?.,-\n\tàéß漢字🙂"
    texts = ["".join(generator.choices(symbols, k=generator.randrange(120))) for _ in range(200)]
    theirs = tokenizer(
        texts, padding="max_length", max_length=77, truncation=True, return_tensors="np"
    ).input_ids
    assert np.array_equal(model.tokenizer(texts), theirs)
