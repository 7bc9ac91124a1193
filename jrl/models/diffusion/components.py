# SPDX-License-Identifier: Apache-2.0
"""Kinds of pipelines that are read: the components that their `model_index.json` must name, and of which classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEDULER, TOKENIZER, TRANSFORMER = "scheduler", "tokenizer", "transformer"
MODEL_INDEX = "model_index.json"
_CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
_PROJECTED = ("CLIPTextModelWithProjection",)
_T5, _T5_TOKENIZERS = ("T5EncoderModel",), ("T5Tokenizer", "T5TokenizerFast")


@dataclass(frozen=True, eq=False)
class PipelineKind:
    """A kind of pipeline.

    Attributes:
      title: In words.
      classes: Class names of each component; None: anything, for its config is read whatever class it names.
      optional: Components that are needed only where the first of them is there.
      settings: What is written into a `model_index.json` beside components.
    """

    title: str
    classes: Mapping[str, tuple[str, ...] | None]
    optional: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


STABLE_DIFFUSION = PipelineKind(
    "Stable Diffusion 1 or 2",
    {
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        TOKENIZER: _CLIP_TOKENIZERS,
        SCHEDULER: None,
    },
    settings={"requires_safety_checker": False},
)
STABLE_DIFFUSION_3 = PipelineKind(
    "Stable Diffusion 3 or 3.5",
    {
        TRANSFORMER: ("SD3Transformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": _PROJECTED,
        "text_encoder_2": _PROJECTED,
        "text_encoder_3": _T5,
        TOKENIZER: _CLIP_TOKENIZERS,
        "tokenizer_2": _CLIP_TOKENIZERS,
        "tokenizer_3": _T5_TOKENIZERS,
        SCHEDULER: None,
    },
    optional=("text_encoder_3", "tokenizer_3"),
)
STABLE_DIFFUSION_XL = PipelineKind(
    "Stable Diffusion XL",
    {
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        "text_encoder_2": _PROJECTED,
        TOKENIZER: _CLIP_TOKENIZERS,
        "tokenizer_2": _CLIP_TOKENIZERS,
        SCHEDULER: None,
    },
)
FLUX = PipelineKind(
    "FLUX.1",
    {
        TRANSFORMER: ("FluxTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        "text_encoder_2": _T5,
        TOKENIZER: _CLIP_TOKENIZERS,
        "tokenizer_2": _T5_TOKENIZERS,
        SCHEDULER: None,
    },
)
_BY_CLASS: Mapping[str, PipelineKind] = {
    "StableDiffusion3Pipeline": STABLE_DIFFUSION_3,
    "StableDiffusionXLPipeline": STABLE_DIFFUSION_XL,
    "FluxPipeline": FLUX,
}
# Components that no Stable Diffusion 1 or 2 has: they would otherwise be passed over as no part of the model.
_OTHER_MODELS = (TRANSFORMER, "text_encoder_2", "prior", "image_encoder_2", "unet_2")


def pipeline_kind(folder: Path, index: Mapping[str, Any]) -> PipelineKind:
    """The kind of a folder.

    Args:
      folder: Where it is, for messages.
      index: Its `model_index.json`.
    Raises:
      ValueError: If it is of a kind that is not read, such as the refiner of Stable Diffusion XL, or FLUX.1 Fill.
    """
    name, present = str(index.get("_class_name")), _present(index)
    if name in _BY_CLASS:
        return _BY_CLASS[name]
    if name.startswith("Flux"):
        raise ValueError(
            f"{folder / MODEL_INDEX}: of Flux, {FLUX.title} from text to image is read (`_class_name` FluxPipeline); "
            f"got {name}. Fill, Control, Kontext, Redux, other tasks, and FLUX.2 are not implemented."
        )
    foreign = [component for component in _OTHER_MODELS if component in present]
    if foreign:
        others = ", ".join(f"{kind.title} (`_class_name` {known})" for known, kind in _BY_CLASS.items())
        raise ValueError(
            f"{folder / MODEL_INDEX}: a pipeline must be {STABLE_DIFFUSION.title}, or one of {others}; got {name}, "
            f"which has `{foreign[0]}`. Folders of refiners, other tasks and other models are not read."
        )
    return STABLE_DIFFUSION


def check_components(folder: Path, index: Mapping[str, Any], kind: PipelineKind) -> tuple[str, ...]:
    """The components to be read: all that are needed are there and of a known class; what else there is, is said.

    Raises:
      ValueError: If one is missing, or of another class.
      FileNotFoundError: If the folder of one is missing.
    """
    path, present = folder / MODEL_INDEX, _present(index)
    left_out = () if set(kind.optional[:1]) <= set(present) else kind.optional
    wanted = [name for name in kind.classes if name not in left_out]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ValueError(
            f"{path} names no {missing[0]}: a model must have {', '.join(wanted)}, got "
            f"{', '.join(present) or 'none of them'}."
        )
    for name in wanted:
        classes = kind.classes[name]
        if classes is not None and present[name] not in classes:
            raise ValueError(
                f"{path}: `{name}` must be {' or '.join(classes)}, got {present[name]!r}. Is it {kind.title}?"
            )
        if not (folder / name).is_dir():
            raise FileNotFoundError(
                f"{folder / name} is missing, though {MODEL_INDEX} names it. Is the download complete?"
            )
    skipped = [f"`{name}` ({value})" for name, value in present.items() if name not in wanted]
    if skipped:
        warnings.warn(
            f"{path}: {', '.join(skipped)} skipped: neither training nor its images use what is not the model.",
            stacklevel=4,
        )
    return tuple(wanted)


def kept_index(index: Mapping[str, Any], read: tuple[str, ...], kind: PipelineKind) -> dict[str, Any]:
    """model_index.json with what was not read marked as absent."""
    return {
        name: [None, None] if isinstance(value, list) and name not in read else value
        for name, value in index.items()
    } | dict(kind.settings)


def _present(index: Mapping[str, Any]) -> dict[str, str]:
    """Class of each component that is there."""
    return {
        name: str(value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[1] is not None
    }
