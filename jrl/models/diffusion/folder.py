# SPDX-License-Identifier: Apache-2.0
"""A diffusers folder of Stable Diffusion, read. Nothing of it is ever executed, and no path leaves it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jrl.models.diffusion.clip_config import read_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.lora_files import LORA_FILE, has_lora, read_lora
from jrl.models.diffusion.part_files import PART_FILES, VARIANT, Network, read_part
from jrl.models.diffusion.pipeline import TEXT_ENCODER, UNET, VAE_PART, DiffusionModel
from jrl.models.diffusion.saving import (
    CONFIG,
    MODEL_INDEX,
    SCHEDULER,
    SCHEDULER_CONFIG,
    TOKENIZER,
    FolderFiles,
    StoredPart,
)
from jrl.models.diffusion.tokenizer import load_clip_tokenizer
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.models.hub import download, local_folder, named_folder, no_weights_on_hub, read_json
from jrl.models.safetensors_io import SUFFIX
from jrl.ops.noise_schedule import make_noise_schedule

# What each component has to be; None: anything, for its config is read whatever class it names.
_CLASSES: Mapping[str, tuple[str, ...] | None] = {
    UNET: ("UNet2DConditionModel",),
    VAE_PART: ("AutoencoderKL",),
    TEXT_ENCODER: ("CLIPTextModel",),
    TOKENIZER: ("CLIPTokenizer", "CLIPTokenizerFast"),
    SCHEDULER: None,
}
_BESIDE_PARTS = (MODEL_INDEX, LORA_FILE, f"{SCHEDULER}/*.json", f"{TOKENIZER}/*.json", f"{TOKENIZER}/*.txt")
_DESCRIBING = (*_BESIDE_PARTS, *(f"{part}/{CONFIG}" for part in PART_FILES))
"""Files of a repository that tell what its model is."""
_LEAST_SAMPLE_SIZE, _LEAST_VERSION = 64, (0, 9)


def load_diffusion_model(
    path_or_repo: str | os.PathLike[str], *, revision: str = "main", variant: str | None = None
) -> DiffusionModel:
    """Reads Stable Diffusion from a folder as diffusers writes it, or from the Hugging Face hub.

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
    model, parts = _described(folder, str(path_or_repo))
    weights = {
        name: read_part(folder / name, part, PART_FILES[name], variant) for name, part in parts.items()
    }
    return replace(model, weights=weights)


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
    model, parts = _described(folder, name)
    # Nothing is computed, no key either: devices may be absent that the mesh in force is of.
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = {name: jax.eval_shape(part.init, key) for name, part in parts.items()}
    return replace(model, weights=shapes)


def _described(folder: Path, name: str) -> tuple[DiffusionModel, dict[str, Network]]:
    """(the model of a folder without weights, its parts that have some)."""
    index = read_json(folder / MODEL_INDEX)
    _check_components(folder, index)
    configs = {name: _config(folder / name) for name in PART_FILES}
    with named_folder(folder / UNET):
        unet = UNet(read_unet_config(_sized(folder, configs[UNET])))
    with named_folder(folder / VAE_PART):
        vae = VAE(read_vae_config(configs[VAE_PART]))
    with named_folder(folder / TEXT_ENCODER):
        text_encoder = ClipText(read_clip_config(configs[TEXT_ENCODER]))
    _check_widths(folder, unet, vae, text_encoder)
    scheduler = _config(folder / SCHEDULER, SCHEDULER_CONFIG)
    with named_folder(folder / SCHEDULER):
        schedule = make_noise_schedule(scheduler)
    tokenizer = load_clip_tokenizer(
        folder / TOKENIZER,
        max_length=text_encoder.config.max_position_embeddings,
        vocab_size=text_encoder.config.vocab_size,
    )
    parts: dict[str, Network] = {UNET: unet, VAE_PART: vae, TEXT_ENCODER: text_encoder}
    stored = {
        name: StoredPart(part.stored_config(), part.entries(), PART_FILES[name].stem)
        for name, part in parts.items()
    }
    model = DiffusionModel(
        name=name,
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        schedule=schedule,
        weights={},
        sample_size=_sample_size(unet),
        found_lora=read_lora(folder, unet) if has_lora(folder) else None,
        files=FolderFiles(_kept_index(index), stored, scheduler, tokenizer),
    )
    return model, parts


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


def _check_components(folder: Path, index: Mapping[str, Any]) -> None:
    """All that is needed is there and of a known kind; what else there is, is said."""
    path = folder / MODEL_INDEX
    present = {
        name: str(value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[1] is not None
    }
    missing = [name for name in _CLASSES if name not in present]
    if missing:
        raise ValueError(
            f"{path} names no {missing[0]}: a model must have {', '.join(_CLASSES)}, got "
            f"{', '.join(present) or 'none of them'}."
        )
    for name, classes in _CLASSES.items():
        if classes is not None and present[name] not in classes:
            raise ValueError(
                f"{path}: `{name}` must be {' or '.join(classes)}, got {present[name]!r}. Is it Stable Diffusion 1 or "
                "2?"
            )
        if not (folder / name).is_dir():
            raise FileNotFoundError(
                f"{folder / name} is missing, though {MODEL_INDEX} names it. Is the download complete?"
            )
    skipped = [f"`{name}` ({kind})" for name, kind in present.items() if name not in _CLASSES]
    if skipped:
        warnings.warn(
            f"{path}: {', '.join(skipped)} skipped: neither training nor its images use what is not the model.",
            stacklevel=4,
        )


def _config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Is the download complete?")
    return read_json(path)


def _sized(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The denoiser's config with the size that diffusers gives to the folders of its first versions."""
    size, version = config.get("sample_size"), str(config.get("_diffusers_version", ""))
    parts = version.split(".")[:2]
    is_old = (
        len(parts) == 2
        and all(part.isdecimal() for part in parts)
        and tuple(map(int, parts)) < _LEAST_VERSION
    )
    if not is_old or not isinstance(size, int) or size >= _LEAST_SAMPLE_SIZE:
        return dict(config)
    warnings.warn(
        f"{folder / UNET / CONFIG}: `sample_size` {size} of a folder from diffusers {version} is read as "
        f"{_LEAST_SAMPLE_SIZE}, as diffusers does: its first versions wrote a wrong one.",
        stacklevel=4,
    )
    return {**config, "sample_size": _LEAST_SAMPLE_SIZE}


def _sample_size(unet: UNet) -> tuple[int, int]:
    size = unet.config.sample_size or _LEAST_SAMPLE_SIZE
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _check_widths(folder: Path, unet: UNet, vae: VAE, text_encoder: ClipText) -> None:
    """The parts belong to each other."""
    pairs = (
        ("in_channels", unet.config.in_channels, "latent_channels of vae", vae.channels),
        ("out_channels", unet.config.out_channels, "in_channels", unet.config.in_channels),
        (
            "cross_attention_dim",
            unet.config.cross_attention_dim,
            "hidden_size of text_encoder",
            text_encoder.config.hidden_size,
        ),
    )
    for key, got, other, expected in pairs:
        if got != expected:
            raise ValueError(
                f"{folder / UNET / CONFIG}: `{key}` must be {expected}, the {other}; got {got}. Is it a model for "
                "text to image, and are all parts of one model?"
            )


def _kept_index(index: Mapping[str, Any]) -> dict[str, Any]:
    """model_index.json with what was skipped marked as absent."""
    return {
        name: [None, None] if isinstance(value, list) and name not in _CLASSES else value
        for name, value in index.items()
    } | {"requires_safety_checker": False}
