# SPDX-License-Identifier: Apache-2.0
"""LoRA files of diffusion models, `pytorch_lora_weights.safetensors`: four dialects are read, one is written.

| dialect | names of a module's two matrices |
|---|---|
| diffusers (written of a U-Net) | `unet.<module>.lora.down.weight`, `.lora.up.weight` |
| PEFT (written of a transformer, after `transformer.`) | `<module>.lora_A.weight`, `.lora_B.weight` |
| attention processors of old diffusers | `<attention>.processor.to_q_lora.down.weight`, `to_out_lora` |
| kohya | `lora_unet_<module with _ for .>.lora_down.weight`, and `.alpha` |

Kohya's trainer, and others in any dialect, may call a module by its name in the code that the model was published with
(`jrl.models.diffusion.original_names`). One that is several maps here is cut: they share its A, and each has its rows
of B.

Down is A (r, in) and up is B (out, r), as in memory. A scale s = α / r other than 1 is said by `.alpha` tensors or by
the file's metadata, and where neither is, α is r. A file that also adapts a text encoder or a convolution wider than
1 × 1, as those of kohya often do, is refused whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.models.adapters.config import LoraConfig, read_adapter_config
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.original_names import original_modules
from jrl.models.diffusion.parts import Denoiser
from jrl.models.entries_io import some
from jrl.models.safetensors_io import SUFFIX, TensorFiles, read_metadata
from jrl.models.safetensors_write import LazyTensor, write_file
from jrl.typing import Params

LORA_STEM = "pytorch_lora_weights"
LORA_FILE = f"{LORA_STEM}{SUFFIX}"
ALPHA = "alpha"
# What a name may begin with, and the ends that say which of the matrices it is.
_PREFIX = re.compile(r"^(?:base_model\.model\.)?(?:unet\.|transformer\.|diffusion_model\.)?")
_ENDS: tuple[tuple[str, str], ...] = (
    (r"\.lora\.down\.weight", "A"),
    (r"\.lora\.up\.weight", "B"),
    (r"\.lora_A(?:\.default)?\.weight", "A"),
    (r"\.lora_B(?:\.default)?\.weight", "B"),
    (r"\.lora_down\.weight", "A"),
    (r"\.lora_up\.weight", "B"),
    (r"\.alpha", ALPHA),
)
_PROCESSOR = re.compile(
    r"^(?P<attention>.+?)(?:\.processor)?\.(?P<part>to_[qkv]|to_out)_lora\.(?P<way>down|up)\.weight$"
)
_KOHYA = "lora_unet_"
# Parts that other files adapt too.
_OTHERS = ("text_encoder", "lora_te")
# Where diffusers keeps the configuration of the adapter, as JSON within the file's metadata.
_METADATA = "lora_adapter_metadata"
# Ends of names in the files that diffusers writes, by the folder of the denoiser.
_WRITTEN: Mapping[str, tuple[str, str]] = {
    "unet": ("lora.down", "lora.up"),
    "transformer": ("lora_A", "lora_B"),
}
_SCALE = ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora")


@dataclass(frozen=True, eq=False)
class FoundLora:
    """An adapter that a model's folder holds.

    Attributes:
      lora: Bound to the denoiser, with the ranks and scales of the file.
      adapters: Its matrices, one entry a module: A (r, in), B (out, r), float32 on the host.
    """

    lora: Lora
    adapters: Params


def has_lora(folder: Path) -> bool:
    """True where a folder holds a LoRA file, even one that is refused."""
    return any((folder / f"{LORA_STEM}{suffix}").is_file() for suffix in (SUFFIX, ".bin"))


def write_lora(path: Path, lora: Lora, adapters: Params, *, part: str) -> None:
    """Writes an adapter in diffusers' dialect, float32.

    A scale other than 1 is multiplied into B: the dialect has no place for it that all of its readers know.

    Args:
      path: Of the file.
      lora: What the matrices belong to.
      adapters: One entry a module.
      part: Folder of the denoiser: "unet" or "transformer".
    """
    tensors, (down, up) = {}, _WRITTEN[part]
    for module in lora.modules:
        weights = adapters[module.name]
        for end, leaf, scale in ((down, weights["A"], 1.0), (up, weights["B"], module.scale)):
            tensors[f"{part}.{module.name}.{end}.weight"] = _tensor(leaf, scale)
    write_file(path, tensors)


def _tensor(leaf: Any, scale: float) -> LazyTensor:
    def make() -> np.ndarray:
        return np.asarray(jax.device_get(leaf), np.float32) * np.float32(scale)

    return LazyTensor(np.dtype(np.float32), tuple(leaf.shape), make)


def read_lora(folder: Path, unet: Denoiser) -> FoundLora:
    """The adapter of a folder, with the ranks and scales of its file.

    Raises:
      FileNotFoundError: If there is no such file, or only a pickled one.
      ValueError: If a name is of no dialect, a module is not of this denoiser or is incomplete, or a shape is wrong;
        the message names file and tensor.
    """
    files = TensorFiles(folder, LORA_STEM)
    found = _tensors(files, _Modules.of(unet))
    for module, leaves in found.items():
        missing = [name for name in ("A", "B") if name not in leaves]
        if missing:
            raise ValueError(
                f"{files.source}: {module} has no matrix {missing[0]} of its adapter. Is the file complete?"
            )
        if ALPHA in leaves and leaves[ALPHA].size != 1:
            raise ValueError(f"{files.source}: {module}.alpha must be one number, got {leaves[ALPHA].shape}.")
        rank = leaves["A"].shape[0]
        if leaves["A"].ndim != 2 or leaves["B"].ndim != 2 or leaves["B"].shape[1] != rank:
            raise ValueError(
                f"{files.source}: {module} must have matrices (r, in) and (out, r), got {leaves['A'].shape} and "
                f"{leaves['B'].shape}. Is it an adapter of a wide convolution, which jrl does not adapt?"
            )
    if not found:
        raise ValueError(f"{files.source} holds no adapter: it has no tensors.")
    lora = unet.bind_lora(_config(files, found, part=unet.folder_name))
    _check_bound(files, lora, found)
    return FoundLora(lora, {name: {leaf: found[name][leaf] for leaf in ("A", "B")} for name in found})


@dataclass(frozen=True)
class _Modules:
    """Modules of a denoiser.

    Attributes:
      outputs: Of each module with a weight, its outputs.
      originals: Modules by the name in the published code, with `_` for `.`.
      flat: A module by its name here, with `_` for `.`.
    """

    outputs: Mapping[str, int]
    originals: Mapping[str, tuple[str, ...]]
    flat: Mapping[str, str]

    @classmethod
    def of(cls, unet: Denoiser) -> _Modules:
        """Those of a denoiser."""
        outputs = {
            entry.name.removesuffix(".weight"): entry.shape[0]
            for entry in unet.entries()
            if entry.name.endswith(".weight")
        }
        originals = {_flat(name): here for name, here in original_modules(outputs).items()}
        return cls(outputs, originals, {_flat(name): name for name in outputs})

    def named(self, name: str) -> tuple[str, ...] | None:
        """The modules that a file calls by this name; None where a name of kohya's is of none."""
        if name.startswith(_KOHYA):
            flat = name.removeprefix(_KOHYA)
            return (self.flat[flat],) if flat in self.flat else self.originals.get(flat)
        return (name,) if name in self.outputs else self.originals.get(_flat(name), (name,))

    def cut(self, tensor: np.ndarray, leaf: str, modules: tuple[str, ...]) -> list[np.ndarray]:
        """What each of the modules has of a tensor of all of them."""
        if leaf != "B" or len(modules) == 1:
            return [tensor] * len(modules)
        sizes = [self.outputs[module] for module in modules]
        if tensor.shape[0] != sum(sizes):
            raise ValueError(
                f"the matrix B of {', '.join(modules)} together must have {sum(sizes)} rows, got {tensor.shape[0]}. "
                "Was the adapter made for another model?"
            )
        return np.split(tensor, np.cumsum(sizes)[:-1])


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _tensors(files: TensorFiles, known: _Modules) -> dict[str, dict[str, np.ndarray]]:
    """The matrices of each module, by its name in the denoiser."""
    found: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name in files:
        place = _place(name, known)
        if place is None:
            unknown.append(name)
            continue
        modules, leaf = place
        try:
            parts = known.cut(_matrix(files.read(name, np.float32)), leaf, modules)
        except ValueError as error:
            raise ValueError(f"{files.source}: {name}: {error}") from error
        for module, part in zip(modules, parts, strict=True):
            if leaf in found.setdefault(module, {}):
                raise ValueError(f"{files.source}: {name} holds {leaf} of {module} a second time.")
            found[module][leaf] = part
    if unknown:
        raise ValueError(
            f"{files.source}: {len(unknown)} tensors are of no LoRA of this denoiser: {some(sorted(unknown))}. Do they "
            "adapt the text encoder, a module that has no counterpart here, or by another method (DoRA, LoHa, LoKr)?"
        )
    return found


def _place(name: str, known: _Modules) -> tuple[tuple[str, ...], str] | None:
    """Modules and matrix that a tensor's name says; None where it says none."""
    plain = _PREFIX.sub("", name)
    if plain.startswith(_OTHERS):
        return None
    processor = _PROCESSOR.match(plain)
    if processor:
        end = "to_out.0" if processor["part"] == "to_out" else processor["part"]
        return (f"{processor['attention']}.{end}",), "A" if processor["way"] == "down" else "B"
    for end, leaf in _ENDS:
        match = re.search(f"{end}$", plain)
        if match is not None:
            modules = known.named(plain[: match.start()])
            return None if modules is None else (modules, leaf)
    return None


def _matrix(tensor: np.ndarray) -> np.ndarray:
    """Drops the window of a 1 × 1 convolution."""
    return tensor.reshape(tensor.shape[:2]) if tensor.ndim == 4 and tensor.shape[2:] == (1, 1) else tensor


def _config(files: TensorFiles, found: Mapping[str, Mapping[str, np.ndarray]], *, part: str) -> LoraConfig:
    """Configuration from the file's ranks and alphas: the most frequent as such, the others by module."""
    ranks = {module: leaves["A"].shape[0] for module, leaves in found.items()}
    rank, rank_pattern = _common(ranks)
    metadata = _metadata(files, f"{part}.")
    if any(ALPHA in leaves for leaves in found.values()) or metadata is None:
        alphas = {
            module: float(leaves[ALPHA].item()) if ALPHA in leaves else float(ranks[module])
            for module, leaves in found.items()
        }
        alpha, alpha_pattern = _common(alphas)
        metadata = {"lora_alpha": alpha, "alpha_pattern": alpha_pattern}
    values = {"r": rank, "rank_pattern": rank_pattern, "target_modules": list(found)}
    try:
        config = read_adapter_config({"peft_type": "LORA", **metadata, **values})
    except ValueError as error:
        raise ValueError(f"{files.source}: {error}") from error
    assert isinstance(config, LoraConfig)
    if config.use_dora:
        raise ValueError(
            f"{files.source}: the adapter is DoRA by its metadata, which is not read for a UNet."
        )
    return config


def _common(numbers: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most frequent of the modules' numbers, and a pattern for each module with another one."""
    most = Counter(numbers.values()).most_common(1)[0][0]
    return most, {re.escape(module): number for module, number in numbers.items() if number != most}


def _metadata(files: TensorFiles, prefix: str) -> dict[str, Any] | None:
    """The scale's part of the configuration that a file carries; None where it carries none."""
    text = read_metadata(files.source).get(_METADATA)
    if text is None:
        return None
    try:
        values = {
            key.removeprefix(prefix): value
            for key, value in json.loads(text).items()
            if key.startswith(prefix)
        }
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{files.source}: its `{_METADATA}` must be a JSON object: {error}.") from error
    return {key: values[key] for key in _SCALE if values.get(key) is not None} or None


def _check_bound(files: TensorFiles, lora: Lora, found: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Every module of the file is one of the denoiser's, in its size."""
    modules = {module.name: module for module in lora.modules}
    unknown = sorted(set(found) - set(modules))
    if unknown:
        raise ValueError(
            f"{files.source}: {len(unknown)} adapted modules are not in this UNet: {some(unknown)}. Was the adapter "
            "made for another model?"
        )
    for name, module in modules.items():
        shapes = found[name]["A"].shape, found[name]["B"].shape
        expected = (module.rank, module.size_in), (module.size_out, module.rank)
        if shapes != expected:
            raise ValueError(
                f"{files.source}: the matrices of {name} must have shapes {expected[0]} and {expected[1]} by the UNet, "
                f"got {shapes[0]} and {shapes[1]}. Was the adapter made for another model?"
            )
