# SPDX-License-Identifier: Apache-2.0
"""Folders as diffusers reads them, written: a LoRA file, a UNet, or a whole pipeline.

A folder changes in one step: killed at any moment, this leaves the old one or the new one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.components import MODEL_INDEX, SCHEDULER
from jrl.models.diffusion.described import CONFIG, SCHEDULER_CONFIG
from jrl.models.diffusion.lora_files import LORA_FILE, FoundLora, write_lora
from jrl.models.entries_io import entry_tensors
from jrl.models.families.base import Entry
from jrl.models.folders import replace_folder
from jrl.models.safetensors_write import write_tensors
from jrl.typing import Params

UNET = "unet"
DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
# What diffusers itself splits at.
MAX_SHARD_BYTES = 10 * 10**9


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A component of a pipeline's folder that has weights.

    Attributes:
      config: Its config.json.
      entries: Its tensors.
      stem: Of its tensor files.
      place: Where its parameters are in the weights of the whole model.
    """

    config: Mapping[str, Any]
    entries: Sequence[Entry]
    stem: str
    place: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Contents of a pipeline's folder beside its arrays.

    Attributes:
      index: model_index.json.
      parts: What has weights, by folder.
      scheduler: scheduler_config.json, as it was read.
      tokenizers: Tokenizers by folder; each can `save_pretrained`.
    """

    index: Mapping[str, Any]
    parts: Mapping[str, StoredPart]
    scheduler: Mapping[str, Any]
    tokenizers: Mapping[str, Any]


def write_lora_folder(
    directory: str | os.PathLike[str], lora: Lora, adapters: Params, *, part: str = UNET
) -> None:
    """Writes `pytorch_lora_weights.safetensors` into a folder, beside what is in it.

    Args:
      directory: Made if missing.
      lora: What the matrices belong to.
      adapters: One entry a module.
      part: Folder of the denoiser.
    """
    with replace_folder(directory) as staging:
        write_lora(staging / LORA_FILE, lora, adapters, part=part)


def write_unet_folder(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    entries: Sequence[Entry],
    params: Params,
    *,
    name: str = UNET,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the denoiser's folder into a folder; a LoRA file that lies there goes, for it belongs to the old weights.

    Args:
      directory: Made if missing.
      config: For its `config.json`.
      entries: The table of its tensors.
      params: Its parameters.
      name: Of its folder: "unet", or "transformer".
      max_shard_bytes: Larger ones are split into several files with an index.
    """
    part = StoredPart(config, entries, DIFFUSERS_STEM, ())
    with replace_folder(directory, obsolete=_lies_in(LORA_FILE, name)) as staging:
        _write_part(staging / name, part, params, max_shard_bytes)


def write_model_folder(
    directory: str | os.PathLike[str],
    files: FolderFiles,
    weights: Mapping[str, Params],
    adapter: FoundLora | None,
    *,
    denoiser: str = UNET,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a whole pipeline.

    Args:
      directory: Made if missing. What an older pipeline left in the folders written stays nowhere.
      files: All but the arrays.
      weights: Of the whole model; `files.parts` say where each part's are.
      adapter: Written as a LoRA file beside; None: there is none, and an old one goes.
      denoiser: Folder of what the adapter adapts.
      max_shard_bytes: Larger parts are split into several files with an index.
    """
    obsolete = _lies_in(LORA_FILE, SCHEDULER, *files.tokenizers, *files.parts)
    with replace_folder(directory, obsolete=obsolete) as staging:
        _write_json(staging / MODEL_INDEX, files.index)
        for name, part in files.parts.items():
            params = functools.reduce(lambda tree, key: tree[key], part.place, weights)
            _write_part(staging / name, part, params, max_shard_bytes)
        (staging / SCHEDULER).mkdir()
        _write_json(staging / SCHEDULER / SCHEDULER_CONFIG, files.scheduler)
        for name, tokenizer in files.tokenizers.items():
            tokenizer.save_pretrained(staging / name)
        if adapter is not None:
            write_lora(staging / LORA_FILE, adapter.lora, adapter.adapters, part=denoiser)


def _lies_in(*names: str) -> Callable[[str], bool]:
    """Predicate: True for paths that are among these, or in one of them."""
    return lambda path: path.partition("/")[0] in names


def _write_part(folder: Path, part: StoredPart, params: Params, max_shard_bytes: int) -> None:
    folder.mkdir()
    _write_json(folder / CONFIG, part.config)
    # An entry whose vocabulary is padded cuts off what is too much itself.
    tensors = entry_tensors(part.entries, params, vocab_size=0)
    write_tensors(folder, tensors, max_shard_bytes=max_shard_bytes, stem=part.stem)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values), indent=2, sort_keys=True) + "\n", encoding="utf-8")
