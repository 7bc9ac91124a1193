# SPDX-License-Identifier: Apache-2.0
"""Diffusers folders: what is read, what is refused in one line, what is written back. Nothing is compiled."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest

from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.diffusion.saving import write_unet_folder
from jrl.models.safetensors_io import TensorFiles, conversion_line
from jrl.models.safetensors_write import LazyTensor, write_file
from tests.models.diffusion.folder_checks import config, index_of, scheduler
from tests.models.diffusion.tiny_folder import INDEX, SCHEDULER, change_json

CopyFolder = Callable[[], Path]
WEIGHTS = "diffusion_pytorch_model.safetensors"
SAFETY = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    """Changes the tensors of a file."""
    files = TensorFiles(path.parent, path.name.removesuffix(".safetensors"))
    tensors = change({name: files.read(name) for name in files})
    write_file(path, {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in tensors.items()})


def same(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_a_folder_is_read(tiny_model: DiffusionModel, tiny_folder: Path) -> None:
    assert tiny_model.name == str(tiny_folder)
    assert tiny_model.sample_size == (8, 8)
    assert tiny_model.latent_shape() == (8, 8, 4)
    assert tiny_model.found_lora is None
    assert tiny_model.schedule.beta_schedule == SCHEDULER["beta_schedule"]
    kinds = {type(leaf) for leaf in jax.tree.leaves(tiny_model.weights)}
    assert kinds == {np.ndarray}, "weights stay on the host"
    assert "safety" not in repr(tiny_model.architecture)


def test_prompts_have_one_length(tiny_model: DiffusionModel) -> None:
    tokens = tiny_model.tokenizer(["a red cat", "", "dog " * 50])
    assert tokens.shape == (3, 16)
    assert tokens.dtype == np.int32
    start, end = 524, 525
    assert tokens[1].tolist() == [start, *[end] * 15]
    assert tokens[2, 0] == start
    assert tokens[2, -1] == end, "what is cut still ends"
    assert np.array_equal(tiny_model.tokenizer(["A  RED\ncat"]), tokens[:1])


def test_it_is_written_back(tiny_model: DiffusionModel, tiny_folder: Path, tmp_path: Path) -> None:
    tiny_model.save(tmp_path / "again")
    again = load_diffusion_model(tmp_path / "again")
    assert same(again.weights, tiny_model.weights)
    assert again.architecture == tiny_model.architecture
    index = json.loads((tmp_path / "again" / "model_index.json").read_text())
    assert {name: index[name] for name in INDEX} == INDEX
    assert json.loads((tmp_path / "again/scheduler/scheduler_config.json").read_text()) == SCHEDULER
    assert np.array_equal(again.tokenizer(["a red cat"]), tiny_model.tokenizer(["a red cat"]))


def test_a_unet_in_several_files(tiny_model: DiffusionModel, changed_folder: CopyFolder) -> None:
    folder, unet = changed_folder(), tiny_model.unet
    shutil.rmtree(folder / "unet")
    params = tiny_model.weights["unet"]
    write_unet_folder(folder, unet.stored_config(), unet.entries(), params, max_shard_bytes=20_000)
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 2
    assert same(load_diffusion_model(folder).weights["unet"], params)


def test_a_variant_in_several_files(tiny_model: DiffusionModel, changed_folder: CopyFolder) -> None:
    """The index has the variant before its last ending, the files have it before their number."""
    folder = changed_folder()
    unet = folder / "unet"
    shard = "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"
    (unet / WEIGHTS).rename(unet / shard)
    weight_map = {entry.name: shard for entry in tiny_model.unet.entries()}
    (unet / f"{WEIGHTS}.index.fp16.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.warns(UserWarning, match="is read in its place"):
        found = load_diffusion_model(folder, variant="fp16")
    assert same(found.weights["unet"], tiny_model.weights["unet"])


def test_half_precision_stays(tiny_model: DiffusionModel, changed_folder: CopyFolder) -> None:
    folder = changed_folder()
    path = folder / "unet" / WEIGHTS
    rewrite(path, lambda tensors: {name: x.astype(np.float16) for name, x in tensors.items()})
    path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.warns(UserWarning, match=r"unet has no .*: diffusion_pytorch_model.fp16.safetensors is read"):
        found = load_diffusion_model(folder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert same(load_diffusion_model(folder, variant="fp16").weights, found.weights)
    assert ["model.fp16.safetensors: model.safetensors is" in str(each.message) for each in seen] == [
        False,
        True,
    ]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.weights["unet"])} == {"float16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.weights["vae"])} == {"float32"}


def test_what_is_no_part_of_the_model_is_skipped_aloud(changed_folder: CopyFolder, tmp_path: Path) -> None:
    folder = changed_folder()
    change_json(
        folder / "model_index.json", **SAFETY, **{"../outside": ["a", "B"]}, requires_safety_checker=True
    )
    with pytest.warns(
        UserWarning, match=r"`safety_checker` \(StableDiffusionSafetyChecker\), `../outside`"
    ) as seen:
        model = load_diffusion_model(folder)
    assert len(seen) == 1
    model.save(tmp_path / "again")
    index = json.loads((tmp_path / "again/model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    assert index["requires_safety_checker"] is False


@pytest.mark.parametrize(("version", "size"), [("0.6.0", 64), ("0.9.0", 8), ("0.10.2", 8), (None, 8)])
def test_sizes_of_the_first_folders(version: str | None, size: int, changed_folder: CopyFolder) -> None:
    folder = changed_folder()
    change_json(folder / "unet/config.json", _diffusers_version=version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert load_diffusion_model(folder).sample_size == (size, size)
    assert len(seen) == (size == 64)


def missing_and_misnamed(folder: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("conv_norm_out.weight", "conv_norm_out.gain"): x for name, x in tensors.items()}

    rewrite(folder / "unet" / WEIGHTS, change)


def one_missing(folder: Path) -> None:
    rewrite(
        folder / "vae" / WEIGHTS, lambda tensors: {k: x for k, x in tensors.items() if k != "quant_conv.bias"}
    )


def one_too_many(folder: Path) -> None:
    rewrite(folder / "vae" / WEIGHTS, lambda tensors: tensors | {"loss.logvar": np.zeros(1, np.float32)})


def not_finite(folder: Path) -> None:
    rewrite(
        folder / "unet" / WEIGHTS, lambda tensors: tensors | {"conv_out.bias": np.full(4, np.nan, np.float32)}
    )


def pickled(folder: Path) -> None:
    (folder / "unet" / WEIGHTS).rename(folder / "unet/diffusion_pytorch_model.bin")


def pickled_lora(folder: Path) -> None:
    (folder / "pytorch_lora_weights.bin").touch()


def one_file(folder: Path) -> None:
    (folder / "model_index.json").rename(folder / "v1-5-pruned.ckpt")


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "misnamed": (
        missing_and_misnamed,
        r"1 tensors are missing: conv_norm_out.weight; and 1 have no place: conv_norm_out.gain",
    ),
    "missing": (one_missing, r"vae.*1 tensor is missing: quant_conv.bias"),
    "unknown": (one_too_many, r"1 tensor has no place in a vae: loss.logvar"),
    "not finite": (not_finite, r"conv_out.bias holds NaN or infinity"),
    "pickled": (pickled, r"diffusion_pytorch_model.bin, a pickle, .*Convert it once"),
    "pickled adapter": (pickled_lora, r"pytorch_lora_weights.bin, a pickle"),
    "one file": (one_file, r"no model_index.json. It holds v1-5-pruned.ckpt, .*from_single_file"),
    "a missing component": (index_of(vae=None), r"names no vae: a model must have unet, vae, text_encoder"),
    "an absent component": (index_of(vae=[None, None]), r"names no vae"),
    "another text encoder": (
        index_of(text_encoder=["t", "T5EncoderModel"]),
        r"`text_encoder` must be CLIPTextModel",
    ),
    "Stable Diffusion XL's refiner": (
        index_of(
            _class_name="StableDiffusionXLImg2ImgPipeline",
            text_encoder_2=["t", "CLIPTextModelWithProjection"],
        ),
        r"must be Stable Diffusion 1 or 2, or one of Stable Diffusion 3 .*got StableDiffusionXLImg2ImgPipeline, "
        r".*Folders of refiners",
    ),
    "another transformer": (
        index_of(_class_name="AuraFlowPipeline", unet=None, transformer=["d", "AuraFlowTransformer2DModel"]),
        r"FLUX.1 \(`_class_name` FluxPipeline\); got AuraFlowPipeline, which has `transformer`. Folders of",
    ),
    "an empty folder": (
        lambda folder: shutil.rmtree(folder / "vae"),
        r"vae is missing, though model_index.json",
    ),
    "no config": (lambda folder: (folder / "vae/config.json").unlink(), r"vae/config.json is missing"),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in (folder / "tokenizer").iterdir()],
        r"tokenizer holds no tokenizer",
    ),
    "an unknown key": (
        config("vae", norm_num_group=2),
        r"VAE config: `norm_num_group` is unknown.*`norm_num_groups`",
    ),
    "a block": (
        config("vae", up_block_types=["X", "X"]),
        r"`up_block_types` must be .*'UpDecoderBlock2D'.*got",
    ),
    "shifted latents": (
        config("vae", latents_mean=[0.1]),
        r"`latents_mean` must be None .*not implemented.*got \[0.1\]",
    ),
    "an activation": (
        config("text_encoder", hidden_act="relu"),
        r"`hidden_act` must be 'quick_gelu' or 'gelu'",
    ),
    "heads": (config("text_encoder", num_attention_heads=3), r"`num_attention_heads` must be a divisor"),
    "a wider prompt": (
        config("unet", cross_attention_dim=16),
        r"`cross_attention_dim` must be 8, the hidden_size",
    ),
    "inpainting": (
        config("unet", in_channels=9),
        r"`in_channels` must be 4, the latent_channels of vae; got 9",
    ),
    "a wrong size": (config("text_encoder", vocab_size=700), r"must have shape \(700, 8\) by its config"),
    "a small vocabulary": (config("text_encoder", vocab_size=100), r"ids must be below 100.*got 525"),
    "a schedule": (scheduler(beta_schedule="x"), r"scheduler: .*beta_schedule"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, changed_folder: CopyFolder) -> None:
    change, expected = BAD[case]
    folder = changed_folder()
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as error:
        load_diffusion_model(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


class TestNames:
    """What is no folder."""

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "sd.safetensors"
        path.touch()
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is a file; .*from_single_file"):
            load_diffusion_model(path)

    def test_nothing(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"there is no folder './nowhere'"):
            load_diffusion_model("./nowhere")
        with pytest.raises(ValueError, match="empty text"):
            load_diffusion_model(" ")

    def test_the_hub(self, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
        asked: dict[str, Any] = {}

        def download(name: str, **options: Any) -> str:
            asked.update(options, name=name)
            return str(tiny_folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert load_diffusion_model("a/b", revision="v1").name == "a/b"
        assert (asked["name"], asked["revision"]) == ("a/b", "v1")
        patterns = asked["allow_patterns"]
        assert "unet/diffusion_pytorch_model.safetensors" in patterns
        assert not [
            pattern for pattern in patterns if ".bin" in pattern or "safety" in pattern or "fp16" in pattern
        ]

    def test_what_the_hub_has_in_half_precision_alone(
        self, monkeypatch: pytest.MonkeyPatch, changed_folder: CopyFolder, tmp_path: Path
    ) -> None:
        """Asked a second time; a part of pickles alone is never downloaded."""
        hub, cache = changed_folder(), tmp_path / "cache"
        asked = []
        (hub / "unet" / WEIGHTS).rename(hub / "unet/diffusion_pytorch_model.fp16.safetensors")

        def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
            asked.append(allow_patterns)
            for path in hub.rglob("*.*"):
                inner = path.relative_to(hub)
                if any(fnmatch.fnmatch(inner.as_posix(), pattern) for pattern in allow_patterns):
                    (cache / inner).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, cache / inner)
            return str(cache)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.warns(UserWarning, match="unet has no"):
            load_diffusion_model("a/b")
        assert len(asked) == 2 and "unet/diffusion_pytorch_model.fp16.safetensors" in asked[1]
        assert not [pattern for pattern in asked[1] if "vae" in pattern and "fp16" in pattern]

        (hub / "vae" / WEIGHTS).rename(hub / "vae/diffusion_pytorch_model.bin")
        (hub / "text_encoder/model.safetensors").rename(hub / "text_encoder/pytorch_model.bin")
        shutil.rmtree(cache)
        with pytest.raises(FileNotFoundError, match="may hold it only as a pickle") as error:
            load_diffusion_model("a/b")
        said = str(error.value)
        assert "'a/b' came from" in said and "without a vae/*.safetensors or text_encoder/*" in said
        assert conversion_line(Path("b/vae"), "diffusion_pytorch_model") in said and "\n" not in said
        assert conversion_line(Path("b/text_encoder")) in said and not list(cache.rglob("*.bin"))
