# SPDX-License-Identifier: Apache-2.0
"""Places of models: a folder on the disk or on the Hugging Face hub, or an object in memory; and their configs.

Nothing of a folder is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.models.families import FAMILIES, READ_AS, unsupported
from jrl.models.folders import recover_folder
from jrl.models.model_object import ModelObject, as_source, is_model_object
from jrl.models.mxfp4 import Mxfp4Tensors, packed_names
from jrl.models.safetensors_io import HEADS_FOLDER, LFS_POINTER, SUFFIX, TensorFiles, Tensors, conversion_line
from jrl.suggestions import did_you_mean

CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
CONFIG_FILES = (CONFIG, GENERATION_CONFIG)
_WEIGHTS = f"*{SUFFIX}"
DOWNLOADED = ("*.json", _WEIGHTS, "*.txt", "*.model", "*.jinja")


def _other_folders(name: str) -> list[str]:
    """Patterns of the files in every folder but this one, and of those in its subfolders: in a pattern, `*` is also a
    slash, and there is no other way to leave one out."""
    beginnings = [name[:length] for length in range(len(name))]
    unlike = [f"{begun}[!{letter}]*/*" for begun, letter in zip(beginnings, name, strict=True)]
    return [*unlike, *(f"{begun}/*" for begun in beginnings[1:]), f"{name}[!/]*/*", f"{name}/*/*"]


# Copies of the weights in other formats and layouts.
_NOT_DOWNLOADED = (*_other_folders(HEADS_FOLDER), "consolidated*")
_QUANTISED = ("quantization_config", "compression_config")
TEXT_CONFIG = "text_config"
_READ = "mxfp4"
"""The one method whose tensors are read; see `jrl.models.mxfp4`."""
_MOST = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "n_layers", "encoder_layers"),
        10_000,
    ),
    "vocab_size": 2**31 - 1,
}
"""More than any model has: a damaged count must not make us build whatever it says. Ids are int32."""
_GGUF = ".gguf"


Place = Path | ModelObject
"""Where a checkpoint is."""


def is_checkpoint(value: Any) -> bool:
    """True for sources with weights: a folder, a name on the hub, or a model object; not a transformers config."""
    return isinstance(value, str | os.PathLike | ModelObject) or is_model_object(value)


def read_config(value: Any) -> Any:
    """A transformers config: itself, or made of the mapping that a saved configuration holds in its place.

    Raises:
      ValueError: If the mapping names no `model_type`.
    """
    if not isinstance(value, Mapping):
        return value
    if not isinstance(value.get("model_type"), str):
        raise ValueError(
            "`model.model_path` must be a checkpoint, a transformers config, or the mapping of one with its "
            f"`model_type`, got the keys {sorted(value)}."
        )
    from transformers import AutoConfig  # only here: importing jrl does not import transformers

    others = {
        name: field for name, field in value.items() if name not in ("model_type", "transformers_version")
    }
    return AutoConfig.for_model(value["model_type"], **others)


def find_checkpoint(
    source: Any, *, files: Sequence[str] = DOWNLOADED, argument: str = "`model_path`"
) -> Place:
    """Finds a checkpoint, and downloads it where it is on the hub.

    Args:
      source: A folder, "organisation/name" on the hub, or a transformers model object of torch.
      files: Patterns of what to download.
      argument: What `source` is called in messages.
    Raises:
      FileNotFoundError: As `find_folder`.
      ValueError: As `find_folder`.
    """
    found = as_source(source)
    return found if isinstance(found, ModelObject) else find_folder(found, files=files, argument=argument)


def open_tensors(place: Place) -> Tensors:
    """The model's tensors, with those of heads that lie apart.

    Raises:
      FileNotFoundError: If a folder holds no safetensors.
      ValueError: If they cannot be read.
    """
    if isinstance(place, ModelObject):
        return place.tensors()
    files, heads = TensorFiles(place), place / HEADS_FOLDER
    if (heads / f"model{SUFFIX}").is_file():
        files.info |= TensorFiles(heads).info
    return Mxfp4Tensors(files) if packed_names(files) else files


def name_of_base(source: Any) -> str | None:
    """Name by which an adapter's file calls its base model: folder or hub id; None where no name leads to it.

    Args:
      source: As `model_path` names it: a folder, a hub id, a model object, or a transformers config.
    """
    if isinstance(source, ModelObject):
        return source.name
    return str(source) if isinstance(source, str | os.PathLike) else None


def find_folder(
    path_or_id: str | os.PathLike[str], *, files: Sequence[str] = DOWNLOADED, argument: str = "`model_path`"
) -> Path:
    """The folder of a checkpoint, downloaded first where it is one of the hub.

    Args:
      path_or_id: A folder, or "organisation/name" on the hub.
      files: Patterns of what to download.
      argument: What `path_or_id` is called in messages.
    Raises:
      FileNotFoundError: If there is no such folder, it holds no model, or the hub does not give it.
      ValueError: If the path is empty.
    """
    folder = local_folder(path_or_id, argument=argument)
    if folder is None:
        folder = download(str(path_or_id), files)
        if _WEIGHTS in files and (folder / CONFIG).is_file() and not any(folder.glob(_WEIGHTS)):
            raise FileNotFoundError(no_weights_on_hub(str(path_or_id), {".": "model"}))
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not a model checkpoint: it has no {CONFIG}.{_hint(folder)}")
    return folder


def local_folder(path_or_id: str | os.PathLike[str], *, argument: str) -> Path | None:
    """The folder on the disk; None: there is none, and it may be a name on the hub.

    Args:
      path_or_id: A folder, or "organisation/name" on the hub.
      argument: What `path_or_id` is called in messages.
    Raises:
      FileNotFoundError: If there is no such folder, and the hub has no such names.
      ValueError: If the path is empty, or the folder holds a pipe or a device, whose reading might never end.
    """
    name = str(path_or_id)
    if not name.strip():
        raise ValueError(f"{argument} must be a folder or a name on the hub, got an empty text.")
    folder = Path(path_or_id).expanduser()
    recover_folder(folder)
    if folder.is_dir():
        for path in folder.iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path} is neither a file nor a folder, but a pipe, a socket or a device.")
        return folder
    if folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"{argument} must be a folder or a name on the hub; there is no folder {name!r}, seen from "
            f"{Path.cwd()}.{_hint(folder)}"
        )
    return None


def read_hf_config(place: Place, changes: Mapping[str, Any] | None = None) -> Any:
    """The transformers config of a checkpoint.

    Args:
      place: A folder with a config.json, or a model object.
      changes: Replaces entries of it. Of a multimodal model those of the text model may be named as they are, or in a
        mapping `text_config`.
    Raises:
      ValueError: If the file is malformed, the architecture is unknown or needs code of its own, the weights are
        quantised, or a change names no entry.
    """
    if isinstance(place, ModelObject):
        config = place.config
        _check_raw_config(place, config.to_dict())
    else:
        content = read_json(place / CONFIG)
        _check_raw_config(place / CONFIG, content)
        config = _parsed_config(place, content)
    # What is saved later has no code beside it, and is not packed.
    for entry in ("auto_map", *_QUANTISED):
        vars(config).pop(entry, None)
    _change(place, config, changes or {})
    return config


def _change(place: Place, config: Any, changes: Mapping[str, Any]) -> None:
    """Replaces entries of a config and of its text model's.

    Raises:
      ValueError: If there is no such entry, or what stands for a text model's config is no mapping.
    """
    text = FAMILIES[config.model_type].text_config(config)
    own, inner = dict(changes), dict[str, Any]()
    if text is not config:
        inner = own.pop(TEXT_CONFIG, {})
        if not isinstance(inner, Mapping):
            raise ValueError(
                f"{place}: a change of `{TEXT_CONFIG}` must be a mapping of its entries, got {inner!r}."
            )
        outer = config.to_dict()
        inner = {**inner, **{name: own.pop(name) for name in list(own) if name not in outer}}
    for part, of_part in ((config, own), (text, inner)):
        known = part.to_dict()
        for name in of_part:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(f"{place}: config.json has no entry `{name}` to change.{hint}")
        part.update(of_part)


def _parsed_config(folder: Path, content: Mapping[str, Any]) -> Any:
    # Only here: importing jrl does not import transformers.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        model_type = content["model_type"]
        if model_type in READ_AS:
            own = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
            return CONFIG_MAPPING[READ_AS[model_type]].from_dict(own)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (
        StrictDataclassError,
        ValueError,
        ArithmeticError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder / CONFIG} is refused by transformers: {type(error).__name__}: {reason}"
        ) from error


@contextlib.contextmanager
def named_folder(place: Place) -> Iterator[None]:
    """Around what computes with a checkpoint's config: errors name where it is.

    Raises:
      ValueError: In place of any ValueError or ArithmeticError.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    except ArithmeticError as error:
        config = place if isinstance(place, ModelObject) else place / CONFIG
        raise ValueError(
            f"{config} describes no model ({type(error).__name__}: {error}). Is one of its sizes 0?"
        ) from error


def read_generation_config(place: Place) -> dict[str, Any] | None:
    """The content of generation_config.json; None where there is none."""
    if isinstance(place, ModelObject):
        return place.generation_config
    path = place / GENERATION_CONFIG
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: If the file holds anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            raise ValueError(
                f"{path} is a git-lfs pointer, not the file: run `git lfs pull` in its repository."
            )
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read as JSON. Is it damaged?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Is it cut off?") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def _check_raw_config(path: Place, config: Mapping[str, Any]) -> None:
    """Refuses what must not even reach transformers."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or READ_AS.get(model_type, model_type) not in FAMILIES:
        if "auto_map" in config:
            raise ValueError(
                f"{path}: `model_type` {model_type!r} comes with code of its own (`auto_map`), as for "
                "`trust_remote_code`; jrl never runs code of a checkpoint. Convert it to one of "
                f"{', '.join(sorted((*FAMILIES, *READ_AS)))}."
            )
        raise ValueError(f"{path}: {unsupported(model_type)}")
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        for entry, most in _MOST.items():
            count = fields.get(entry)
            if isinstance(count, int) and count > most:
                raise ValueError(
                    f"{path}: `{entry}` must be at most {most:,}, got {count:,}. Is the file damaged?"
                )
    for entry in _QUANTISED:
        quantised = config.get(entry)
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            if method == _READ:
                continue
            raise ValueError(
                f"{path}: the weights are quantised (`{entry}`: {method!r}), which jrl does not read. Load the "
                "full-precision weights, and set `model.frozen_dtype` to quantise what does not train."
            )


def download(
    name: str, files: Sequence[str], *, ignored: Sequence[str] = _NOT_DOWNLOADED, revision: str | None = None
) -> Path:
    """Fetches a repository of the hub, or takes it from the cache.

    Args:
      name: "organisation/name".
      files: Patterns of what to download.
      ignored: Patterns of what not.
      revision: Branch, tag or commit; None: the main branch.
    Raises:
      FileNotFoundError: If the hub does not give it.
    """
    # Only here: a local folder needs no network client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    chosen: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(files), ignore_patterns=list(ignored), **chosen)
        )
    except (OSError, HFValidationError) as error:
        cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        reason = str(error).strip().splitlines()
        raise FileNotFoundError(
            f"{name!r} is no folder here, and the Hugging Face hub did not give it ({type(error).__name__}: "
            f"{reason[0] if reason else 'no reason'}).{offline} Without a network, copy the model into a folder and "
            f"name that, or fill the cache ({cache}, set by HF_HOME) on a machine that has one."
        ) from error


def no_weights_on_hub(name: str, stems: Mapping[str, str]) -> str:
    """Advice where the hub gives no tensors that can be read without danger.

    Args:
      name: "organisation/name".
      stems: Of the files that are missing, by their folder in the repository.
    """
    folder = name.rpartition("/")[2]
    convert = " && ".join(conversion_line(Path(folder) / inner, stem) for inner, stem in stems.items())
    missing = " or ".join((Path(inner) / _WEIGHTS).as_posix() for inner in stems)
    fetch = (
        f"from huggingface_hub import snapshot_download; snapshot_download('{name}', local_dir='{folder}')"
    )
    return (
        f"{name!r} came from the Hugging Face hub (or its cache) without a {missing}. The hub may hold it only as a "
        "pickle, which can run code when it is read and is never downloaded. Convert it on a machine that you trust "
        f'with it: python -c "{fetch}" && {convert}, and name that folder.'
    )


def _hint(folder: Path) -> str:
    if not folder.exists():
        if not folder.parent.is_dir():
            return f" {str(folder.parent)!r} is no folder either. A name on the hub is written without `./` before it."
        others = sorted(other for other in folder.parent.iterdir() if other.is_dir() and other.name[0] != ".")
        near = did_you_mean(folder, map(str, others), cutoff=0.8)
        return near or (
            f" {str(folder.parent)!r} has the folders {[other.name for other in others[:8]]}"
            f"{' and more' if others[8:] else ''}. A name on the hub is written without `./` before it."
        )
    if (folder / "hf_model").is_dir():
        return " Its model is in the subfolder hf_model."
    files = [folder] if folder.is_file() else sorted(folder.glob(f"*{_GGUF}"))
    if files and files[0].suffix == _GGUF:
        return (
            f" It is or holds {files[0].name}, a GGUF file, which jrl does not read. Convert it once, where torch is: "
            f"AutoModelForCausalLM.from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r})"
            ".save_pretrained(...) of transformers."
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f" It holds an adapter ({ADAPTER_CONFIG}), which a trainer takes as `model.model_path`; a model is the "
            "base that this file names."
        )
    return ""
