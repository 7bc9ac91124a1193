# SPDX-License-Identifier: Apache-2.0
"""LoRA files: all dialects of one adapter are the same adapter, and what is none is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.lora_files import LORA_FILE, read_lora, write_lora
from jrl.models.diffusion.original_names import original_modules
from jrl.models.diffusion.parts import Denoiser
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.safetensors_io import TensorFiles
from jrl.models.safetensors_write import LazyTensor, write_file
from tests.models.diffusion.test_flux import TINY

Tensors = dict[str, np.ndarray]
Matrices = Mapping[str, Mapping[str, np.ndarray]]


def random_adapters(lora: Lora, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Both matrices of every module, none of them 0."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    return {
        module.name: {"A": normal(module.rank, module.size_in), "B": normal(module.size_out, module.rank)}
        for module in lora.modules
    }


def updates(lora: Lora, adapters: Matrices) -> Tensors:
    """s·B·A of every module."""
    return {m.name: m.scale * adapters[m.name]["B"] @ adapters[m.name]["A"] for m in lora.modules}


def save(folder: Path, tensors: Tensors, metadata: Mapping[str, object] | None = None) -> None:
    path = folder / LORA_FILE
    write_file(path, {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in tensors.items()})
    if metadata is not None:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length]) | {
            "__metadata__": {"lora_adapter_metadata": json.dumps(metadata)}
        }
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def diffusers(adapters: Matrices) -> Tensors:
    return {
        f"unet.{name}.lora.{way}.weight": leaves[leaf]
        for name, leaves in adapters.items()
        for way, leaf in (("down", "A"), ("up", "B"))
    }


def peft(adapters: Matrices, prefix: str = "base_model.model.") -> Tensors:
    return {
        f"{prefix}{name}.lora_{leaf}.weight": matrix
        for name, leaves in adapters.items()
        for leaf, matrix in leaves.items()
    }


def processors(adapters: Matrices, prefix: str = "unet.") -> Tensors:
    def renamed(name: str) -> str:
        attention, part = re.fullmatch(r"(.*)\.(to_[qkv]|to_out\.0)", name).groups()
        return f"{prefix}{attention}.processor.{part.removesuffix('.0')}_lora"

    return {
        f"{renamed(name)}.{way}.weight": leaves[leaf]
        for name, leaves in adapters.items()
        for way, leaf in (("down", "A"), ("up", "B"))
    }


def kohya(adapters: Matrices) -> Tensors:
    found = {}
    for name, leaves in adapters.items():
        flat = f"lora_unet_{name.replace('.', '_')}"
        found[f"{flat}.lora_down.weight"] = leaves["A"]
        found[f"{flat}.lora_up.weight"] = leaves["B"]
        found[f"{flat}.alpha"] = np.asarray(6.0, np.float32)
    return found


def in_original_names(adapters: Matrices, modules: Iterable[str], prefix: str = "lora_unet_") -> Tensors:
    """A file of kohya's with the names of the published code, its joined maps joined again; α is 6.

    Args:
      adapters: Maps that are one there must have the same A.
      modules: Of the denoiser.
      prefix: Of all names; other than kohya's, dots stay.
    """
    found = {}
    for original, names in original_modules(modules).items():
        if names[0] not in adapters:
            continue
        name = f"{prefix}{original.replace('.', '_') if prefix == 'lora_unet_' else original}"
        found[f"{name}.lora_down.weight"] = adapters[names[0]]["A"]
        found[f"{name}.lora_up.weight"] = np.concatenate([adapters[each]["B"] for each in names])
        found[f"{name}.alpha"] = np.asarray(6.0, np.float32)
    return found


def module_names(denoiser: Denoiser) -> list[str]:
    """Modules with a weight."""
    names = (entry.name for entry in denoiser.entries())
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


@pytest.fixture(scope="module")
def lora(tiny_model: DiffusionModel) -> Lora:
    return tiny_model.unet.bind_lora(LoraConfig(r=3, lora_alpha=3))


DIALECTS: dict[str, tuple[Callable[[Matrices], Tensors], float]] = {
    "diffusers": (diffusers, 1.0),
    "peft": (peft, 1.0),
    "peft in a pipeline": (lambda adapters: peft(adapters, "unet."), 1.0),
    "processors": (processors, 1.0),
    "processors without a prefix": (lambda adapters: processors(adapters, ""), 1.0),
    "kohya": (kohya, 2.0),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(dialect: str, lora: Lora, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    adapters, (rename, scale) = random_adapters(lora), DIALECTS[dialect]
    save(tmp_path, rename(adapters))
    found = read_lora(tmp_path, tiny_model.unet)
    assert {module.scale for module in found.lora.modules} == {scale}
    assert found.lora.config.r == 3
    for name, leaves in adapters.items():
        assert np.array_equal(found.adapters[name]["A"], leaves["A"])
        assert np.array_equal(found.adapters[name]["B"], leaves["B"])
    assert found.adapters.keys() == adapters.keys()


@pytest.mark.parametrize("prefix", ["lora_unet_", "diffusion_model."])
def test_names_of_the_published_code(
    prefix: str, lora: Lora, tiny_model: DiffusionModel, tmp_path: Path
) -> None:
    adapters = random_adapters(lora)
    tensors = in_original_names(adapters, module_names(tiny_model.unet), prefix)
    assert len(tensors) == 3 * len(adapters) and all("blocks" in name or "middle" in name for name in tensors)
    save(tmp_path, tensors)
    found = read_lora(tmp_path, tiny_model.unet)
    assert {module.scale for module in found.lora.modules} == {2.0}
    assert found.adapters.keys() == adapters.keys()
    for name, leaves in adapters.items():
        assert np.array_equal(found.adapters[name]["A"], leaves["A"])
        assert np.array_equal(found.adapters[name]["B"], leaves["B"])


def test_a_joined_map_is_cut(tmp_path: Path) -> None:
    flux, generator = Flux(TINY), np.random.default_rng(0)
    down, up = (generator.standard_normal(shape).astype(np.float32) for shape in ((2, 6), (42, 2)))
    name = "lora_unet_single_blocks_0_linear1"
    save(tmp_path, {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up})
    found = read_lora(tmp_path, flux).adapters
    parts = [f"single_transformer_blocks.0.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v")]
    parts.append("single_transformer_blocks.0.proj_mlp")
    assert all(np.array_equal(found[part]["A"], down) for part in parts)
    assert np.array_equal(np.concatenate([found[part]["B"] for part in parts]), up)
    assert [found[part]["B"].shape[0] for part in parts] == [6, 6, 6, 24]
    save(tmp_path, {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up[1:]})
    with pytest.raises(ValueError, match=r"linear1.lora_up.weight: .* together must have 42 rows, got 41"):
        read_lora(tmp_path, flux)


def test_what_is_written(lora: Lora, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    adapters = random_adapters(lora)
    write_lora(tmp_path / LORA_FILE, lora, adapters, part="unet")
    files = TensorFiles(tmp_path, "pytorch_lora_weights")
    assert sorted(files) == sorted(diffusers(adapters))
    assert len(files.info) == 2 * len(lora.modules) == 2 * 8 * 4
    name = lora.modules[0].name
    assert np.array_equal(files.read(f"unet.{name}.lora.down.weight"), adapters[name]["A"])
    assert np.array_equal(files.read(f"unet.{name}.lora.up.weight"), adapters[name]["B"])


def test_a_scale_is_written_into_the_matrix(tiny_model: DiffusionModel, tmp_path: Path) -> None:
    lora = tiny_model.unet.bind_lora(LoraConfig(r=2, lora_alpha=5))
    adapters = random_adapters(lora)
    write_lora(tmp_path / LORA_FILE, lora, adapters, part="unet")
    found = read_lora(tmp_path, tiny_model.unet)
    assert {module.scale for module in found.lora.modules} == {1.0}
    for name, expected in updates(lora, adapters).items():
        np.testing.assert_allclose(updates(found.lora, found.adapters)[name], expected, rtol=1e-6)


def test_ranks_and_alphas_of_their_own(lora: Lora, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    odd = lora.modules[1].name
    patterns = {re.escape(odd): 1}
    mixed = tiny_model.unet.bind_lora(LoraConfig(r=3, lora_alpha=3, rank_pattern=patterns))
    adapters = random_adapters(mixed)
    save(tmp_path, diffusers(adapters))
    found = {module.name: module for module in read_lora(tmp_path, tiny_model.unet).lora.modules}
    assert {module.rank for name, module in found.items() if name != odd} == {3}
    assert (found[odd].rank, found[odd].scale) == (1, 1.0)
    save(tmp_path, kohya(adapters))
    found = {module.name: module for module in read_lora(tmp_path, tiny_model.unet).lora.modules}
    assert (found[odd].scale, found[lora.modules[0].name].scale) == (6.0, 2.0)


def test_metadata_says_the_scale(lora: Lora, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    adapters = random_adapters(lora)
    save(tmp_path, diffusers(adapters), {"unet.r": 3, "unet.lora_alpha": 12, "unet.use_dora": False})
    assert {m.scale for m in read_lora(tmp_path, tiny_model.unet).lora.modules} == {4.0}
    save(tmp_path, diffusers(adapters), {"text_encoder.r": 3, "text_encoder.lora_alpha": 12})
    assert {m.scale for m in read_lora(tmp_path, tiny_model.unet).lora.modules} == {1.0}


def test_a_model_comes_with_its_adapter(
    lora: Lora, changed_folder: Callable[[], Path], tmp_path: Path
) -> None:
    folder, adapters = changed_folder(), random_adapters(lora)
    write_lora(folder / LORA_FILE, lora, adapters, part="unet")
    model = load_diffusion_model(folder)
    assert model.found_lora is not None
    assert model.found_lora.adapters.keys() == adapters.keys()
    model.save(tmp_path / "again")
    again = load_diffusion_model(tmp_path / "again").found_lora
    assert again is not None
    name = lora.modules[0].name
    assert np.array_equal(again.adapters[name]["B"], adapters[name]["B"])


MODULE = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
A, B = np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)
BAD: dict[str, tuple[Tensors, str]] = {
    "the text encoder": (
        {"text_encoder.x.lora_linear_layer.down.weight": A, "lora_te_x.lora_up.weight": B},
        r"2 tensors are of no LoRA of this denoiser: lora_te_x.lora_up.weight, text_encoder.x.*text encoder",
    ),
    "the text encoders of XL": (
        {f"lora_te{n}_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": B for n in (1, 2)},
        r"2 tensors are of no LoRA of this denoiser: lora_te1_text_model.*lora_te2_text_model.*text encoder",
    ),
    "an unknown block of the published code": (
        {"lora_unet_input_blocks_99_1_proj_in.lora_up.weight": B},
        r"1 tensors are of no LoRA of this denoiser: lora_unet_input_blocks_99",
    ),
    "DoRA": ({f"unet.{MODULE}.lora_magnitude_vector": B[:, 0]}, r"lora_magnitude_vector.*DoRA"),
    "an unknown module": (
        {
            f"unet.{name}.lora.{way}.weight": x
            for name in (MODULE, f"other.{MODULE}")
            for way, x in (("down", A), ("up", B))
        },
        r"1 adapted modules are not in this UNet: other.mid_block",
    ),
    "a wrong width": (
        {f"{MODULE}.lora_A.weight": A[:, :4], f"{MODULE}.lora_B.weight": B},
        r"must have shapes \(2, 8\) and \(8, 2\) by the UNet, got \(2, 4\) and \(8, 2\)",
    ),
    "half of it": ({f"{MODULE}.lora_A.weight": A}, r"has no matrix B"),
    "twice": (
        {f"{MODULE}.lora_A.weight": A, f"unet.{MODULE}.lora.down.weight": A},
        r"holds A of mid_block.* a second time",
    ),
    "two ranks": (
        {f"{MODULE}.lora_A.weight": A, f"{MODULE}.lora_B.weight": B[:, :1]},
        r"\(r, in\) and \(out, r\)",
    ),
    "two alphas": (
        {f"{MODULE}.lora_A.weight": A, f"{MODULE}.lora_B.weight": B, f"{MODULE}.alpha": A},
        r"alpha must be one number, got \(2, 8\)",
    ),
    "nothing": ({}, r"holds no adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    tensors, expected = BAD[case]
    save(tmp_path, tensors)
    with pytest.raises(ValueError, match=expected) as error:
        read_lora(tmp_path, tiny_model.unet)
    assert "\n" not in str(error.value)


def test_dora_by_its_metadata(lora: Lora, tiny_model: DiffusionModel, tmp_path: Path) -> None:
    save(tmp_path, diffusers(random_adapters(lora)), {"unet.lora_alpha": 4, "unet.use_dora": True})
    with pytest.raises(ValueError, match="DoRA"):
        read_lora(tmp_path, tiny_model.unet)
