# SPDX-License-Identifier: Apache-2.0
"""A diffusers folder of Stable Diffusion or FLUX.1, read. Nothing of it is ever executed, and no path leaves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from jrl.models.diffusion.components import (
    FLUX,
    MODEL_INDEX,
    SCHEDULER,
    STABLE_DIFFUSION,
    STABLE_DIFFUSION_3,
    STABLE_DIFFUSION_XL,
    TOKENIZER,
    PipelineKind,
    check_components,
    kept_index,
    pipeline_kind,
)
from jrl.models.diffusion.described import CONFIG, SCHEDULER_CONFIG, DescribedFolder, read_config
from jrl.models.diffusion.flux_folder import describe_flux_folder
from jrl.models.diffusion.lora_files import LORA_FILE, has_lora, read_lora
from jrl.models.diffusion.part_files import PART_FILES, VARIANT, Network, files_of, read_part
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.diffusion.saving import FolderFiles, StoredPart
from jrl.models.diffusion.sd3_folder import describe_sd3_folder
from jrl.models.diffusion.sd_folder import describe_sd_folder
from jrl.models.diffusion.sdxl_folder import describe_sdxl_folder
from jrl.models.hub import download, local_folder, no_weights_on_hub, read_json
from jrl.models.safetensors_io import SUFFIX

_BESIDE_PARTS = (
    MODEL_INDEX,
    LORA_FILE,
    f"{SCHEDULER}/*.json",
    *(f"{TOKENIZER}{number}/*.{end}" for number in ("", "_2", "_3") for end in ("json", "txt", "model")),
)
_DESCRIBING = (*_BESIDE_PARTS, *(f"{part}/{CONFIG}" for part in PART_FILES))
"""Files of a repository that tell what its model is."""
_DESCRIBE: Mapping[PipelineKind, Callable[[Path, tuple[str, ...]], DescribedFolder]] = {
    STABLE_DIFFUSION: describe_sd_folder,
    STABLE_DIFFUSION_XL: describe_sdxl_folder,
    STABLE_DIFFUSION_3: describe_sd3_folder,
    FLUX: describe_flux_folder,
}


def load_diffusion_model(
    path_or_repo: str | os.PathLike[str], *, revision: str = "main", variant: str | None = None
) -> DiffusionModel:
    """Reads Stable Diffusion 1, 2, XL, 3 or 3.5, or FLUX.1, from a folder as diffusers writes it, or from the hub.

    The weights stay on the host, in the dtype of their files. A safety checker and whatever else the folder holds is
    skipped, with a warning. A LoRA file in it becomes `found_lora`.

    Args:
      path_or_repo: A folder, or "organisation/name" on the hub.
      revision: Branch, tag or commit, on the hub.
      variant: "fp16" reads `diffusion_pytorch_model.fp16.safetensors` and its like, where a part has them.
    Raises:
      FileNotFoundError: If there is no such folder, a part of it is missing, or it is there only as a pickle.
      ValueError: If a config asks for what jrl lacks, the tensors are not those of their config, or one of them is
        damaged or not finite.
    """
    folder = _find(path_or_repo, lambda: _fetch(str(path_or_repo), revision, variant))
    model, described = _described(folder, str(path_or_repo))
    return _with_weights(
        model, described, lambda name, part: read_part(folder / name, part, files_of(name, part), variant)
    )


def describe_diffusion_model(
    path_or_repo: str | os.PathLike[str], *, revision: str = "main"
) -> DiffusionModel:
    """The model of a folder with shapes in the place of its weights: none is read, and none of the hub downloaded.

    A LoRA file is read, for its ranks are in it.

    Args:
      path_or_repo: As for `load_diffusion_model`.
      revision: Likewise.
    Raises:
      FileNotFoundError: If there is no such folder, or a config of it is missing.
      ValueError: If a config asks for what jrl lacks.
    """
    name = str(path_or_repo)
    folder = _find(path_or_repo, lambda: download(name, _DESCRIBING, ignored=(), revision=revision))
    model, described = _described(folder, name)
    # Nothing is computed, no key either: devices may be absent that the mesh in force is of.
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _with_weights(model, described, lambda _, part: jax.eval_shape(part.init, key))


def _described(folder: Path, name: str) -> tuple[DiffusionModel, DescribedFolder]:
    """(the model of a folder without weights, what its configs say)."""
    index = read_json(folder / MODEL_INDEX)
    kind = pipeline_kind(folder, index)
    components = check_components(folder, index, kind)
    found = _DESCRIBE[kind](folder, components)
    stored = {
        part: StoredPart(
            network.stored_config(), network.entries(), files_of(part, network).stem, found.places[part]
        )
        for part, network in found.parts.items()
    }
    scheduler = read_config(folder / SCHEDULER, SCHEDULER_CONFIG)
    model = DiffusionModel(
        name=name,
        unet=found.unet,
        vae=found.vae,
        text_encoder=found.text_encoder,
        tokenizer=found.tokenizer,
        schedule=found.schedule,
        weights={},
        sample_size=found.sample_size,
        zero_negative=found.zero_negative,
        found_lora=read_lora(folder, found.unet) if has_lora(folder) else None,
        files=FolderFiles(kept_index(index, components, kind), stored, scheduler, found.tokenizers),
    )
    return model, found


def _with_weights(
    model: DiffusionModel, described: DescribedFolder, make: Callable[[str, Network], Any]
) -> DiffusionModel:
    """The model with what `make` gives for each folder, in its place."""
    weights = {described.places[name]: make(name, part) for name, part in described.parts.items()}
    return replace(model, weights=traverse_util.unflatten_dict(weights))


def _find(path_or_repo: str | os.PathLike[str], fetch: Callable[[], Path]) -> Path:
    """The folder, or that which `fetch` downloads of the hub."""
    name, file = str(path_or_repo), Path(path_or_repo).expanduser()
    if file.is_file():
        raise ValueError(
            f"{file} is a file; a diffusers folder is needed. Make one of it where diffusers is: "
            f"StableDiffusionPipeline.from_single_file({name!r}).save_pretrained(...)"
        )
    folder = local_folder(path_or_repo, argument="the model") or fetch()
    if not (folder / MODEL_INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} is not a diffusers folder: it has no {MODEL_INDEX}.{_hint(folder)}"
        )
    return folder


def _fetch(name: str, revision: str, variant: str | None) -> Path:
    """The folder of a repository of the hub; where parts have no tensors of the variant, with those of another one."""
    wanted = list(_BESIDE_PARTS)
    parts: list[str] = list(PART_FILES)
    for asked in (variant, VARIANT if variant is None else None):
        wanted += [pattern for part in parts for pattern in _patterns(part, asked)]
        folder = download(name, wanted, ignored=(), revision=revision)
        parts = [
            part
            for part in parts
            if (folder / part / CONFIG).is_file() and not any((folder / part).glob(f"*{SUFFIX}"))
        ]
        if not parts:
            return folder
    raise FileNotFoundError(no_weights_on_hub(name, {part: PART_FILES[part].stem for part in parts}))


def _patterns(part: str, variant: str | None) -> list[str]:
    """File patterns of a part: its config, and its tensors of one variant in one file or several, however named."""
    stem = f"{part}/{PART_FILES[part].stem}"
    ends = ("", "-*-of-?????") if variant is None else (f".{variant}", f".{variant}-*", f"-*.{variant}")
    return [f"{part}/*.json", *(f"{stem}{end}{SUFFIX}" for end in ends)]


def _hint(folder: Path) -> str:
    single = sorted(path.name for pattern in ("*.ckpt", "*.safetensors") for path in folder.glob(pattern))
    if not single:
        return ""
    return (
        f" It holds {single[0]}, all parts in one file; make a folder of it where diffusers is: "
        f"StableDiffusionPipeline.from_single_file('{folder / single[0]}').save_pretrained(...)"
    )
