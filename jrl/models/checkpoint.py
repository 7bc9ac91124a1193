# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints, read and written: safetensors, config.json, and a value head beside the model.

The value head goes into the same file under trlX's names (`v_head.0`, `v_head.2`) or
TRL's (`v_head.summary`). These open it, and plain transformers passes over it.
"""

from __future__ import annotations

import copy
import difflib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from jrl.mesh import tree_shardings
from jrl.models.families.base import Entry, Family, linear, vector
from jrl.models.heads import init_value_head
from jrl.models.model import CausalLM
from jrl.models.safetensors_io import INDEX, LazyTensor, TensorFiles, write_tensors
from jrl.models.transformer import init_decoder
from jrl.typing import Params

DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HEAD = "v_head"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
      model: What it is; `model.value_head` is the kind of value head that the files held, None without one.
      params: The whole tree, with `v_head` if the files held one.
      replicated: One line for every dimension that the mesh does not divide.
    """

    model: CausalLM
    params: dict[str, Any]
    replicated: tuple[str, ...]


def load_checkpoint(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    config_changes: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads a model folder, or one of the Hugging Face hub.

    Tensors are read one by one and go straight to their place on the mesh.

    Args:
      path_or_id: A folder, or "organisation/name" on the hub.
      dtype: Of the parameters, whatever the file holds; a value head is float32 always.
      mesh: Where to place them; None is the default device.
      config_changes: Replaces entries of config.json.
    Raises:
      FileNotFoundError: If the folder holds no checkpoint, or only a pickled one.
      ValueError: If the architecture is not supported, or the tensors are not those of its config.json.
    """
    folder = _local_folder(path_or_id)
    model = CausalLM.from_config(_read_hf_config(folder, config_changes or {}))
    files = TensorFiles(folder)
    names = _canonical_names(model, files)
    model = replace(model, value_head=_found_value_head(names))
    entries = _entries(model)
    _check_coverage(model.family, entries, names, files)

    shapes = jax.eval_shape(lambda: _init(model))
    shardings, replicated = (None, []) if mesh is None else tree_shardings(mesh, shapes)
    flat_shapes = _flat(shapes)
    places = {} if shardings is None else _flat(shardings)
    params = {}
    for entry in entries:
        wanted = jnp.float32 if entry.name.startswith(f"{HEAD}.") else dtype
        tensor = files.read(names[entry.name])
        parts = entry.transform.load(tensor, [flat_shapes[path].shape for path in entry.paths])
        for path, part in zip(entry.paths, parts, strict=True):
            assert part.shape == flat_shapes[path].shape, (entry.name, path, part.shape)
            params[path] = jax.device_put(np.ascontiguousarray(part.astype(wanted)), places.get(path))
    assert set(params) == set(flat_shapes), set(params) ^ set(flat_shapes)
    return Loaded(model, traverse_util.unflatten_dict(params, sep="/"), tuple(replicated))


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: CausalLM,
    params: Params,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that transformers (and, for the value head, trlX and TRL) can open.

    All files are complete under another name before the first gets its own. A new folder appears at once; in
    an old one, the files are replaced one after the other.

    Args:
      directory: Made if missing. The model files of an older checkpoint in it are replaced.
      model: What the parameters belong to.
      params: The whole tree (`merge_params`); its `v_head`, if any, is written in the layout it has.
      tokenizer: A transformers tokenizer to store with the model.
      generation_config: A transformers `GenerationConfig` to store with it.
      max_shard_bytes: Larger models are split into several files with an index.
    Raises:
      ValueError: If `params` is not the whole tree of this model.
    """
    directory = Path(directory)
    tensors = _checkpoint_tensors(model, params)
    staging = directory.with_name(f".{directory.name}.saving")
    # Left by a save that was killed: never complete, so of no use.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        write_tensors(staging, tensors, max_shard_bytes=max_shard_bytes)
        hf_config = copy.deepcopy(model.hf_config)
        hf_config.architectures = [model.family.architecture]
        hf_config.dtype = str(params["final_norm"]["scale"].dtype)
        hf_config.save_pretrained(staging)
        if generation_config is not None:
            generation_config.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        _publish(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, directory: Path) -> None:
    if not directory.exists():
        staging.rename(directory)
        return
    for old in (*directory.glob("model*.safetensors"), directory / INDEX):
        old.unlink(missing_ok=True)
    for file in staging.iterdir():
        file.replace(directory / file.name)


def _init(model: CausalLM) -> dict[str, Any]:
    key = jax.random.key(0)
    params = init_decoder(model.config, key)
    if model.value_head is not None:
        params[HEAD] = init_value_head(model.value_head, model.config.width, key)
    return params


def _entries(model: CausalLM) -> list[Entry]:
    """Every tensor of this model's checkpoint, the value head's included."""
    entries = model.family.entries(model.config)
    width = model.config.width
    if model.value_head == "mlp":
        entries = entries + _dense_entries(f"{HEAD}.0", f"{HEAD}/hidden", width, 2 * width)
        entries = entries + _dense_entries(f"{HEAD}.2", f"{HEAD}/out", 2 * width, 1)
    elif model.value_head == "linear":
        entries = entries + _dense_entries(f"{HEAD}.summary", f"{HEAD}/out", width, 1)
    return entries


def _dense_entries(name: str, path: str, size_in: int, size_out: int) -> list[Entry]:
    return [
        Entry(f"{name}.weight", (f"{path}/kernel",), linear(), (size_out, size_in)),
        Entry(f"{name}.bias", (f"{path}/bias",), vector(), (size_out,)),
    ]


def _local_folder(path_or_id: str | os.PathLike[str]) -> Path:
    folder = Path(path_or_id).expanduser()
    if not folder.is_dir():
        name = str(path_or_id)
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise FileNotFoundError(
                f"`model_path` must be a folder or a name on the hub; there is no folder {name!r}."
            )
        # Only here: a local folder needs no network client.
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=list(DOWNLOADED)))
    if not (folder / "config.json").is_file():
        hint = " Its model is in the subfolder hf_model." if (folder / "hf_model").is_dir() else ""
        raise FileNotFoundError(f"{folder} is not a model checkpoint: it has no config.json.{hint}")
    return folder


def _read_hf_config(folder: Path, changes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    known = config.to_dict()
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"{folder}: config.json has no entry `{name}` to change.{hint}")
    config.update(dict(changes))
    return config


def _canonical_names(model: CausalLM, files: TensorFiles) -> dict[str, str]:
    """The table's name of each tensor → its name in the files."""
    prefix = model.family.base_prefix
    bare = not any(name.startswith(prefix) for name in files)
    names = {}
    for name in files:
        whole = not bare or name.startswith(("lm_head.", f"{HEAD}."))
        names[name if whole else prefix + name] = name
    if model.config.tie_embeddings:
        # Old files hold a tied head a second time.
        names.pop("lm_head.weight", None)
    return names


def _found_value_head(names: Mapping[str, str]) -> str | None:
    if f"{HEAD}.summary.weight" in names:
        return "linear"
    return "mlp" if any(name.startswith(f"{HEAD}.") for name in names) else None


def _check_coverage(
    family: Family, entries: list[Entry], names: Mapping[str, str], files: TensorFiles
) -> None:
    """Every parameter is found, in the shape that the config announces, and every tensor is known."""
    known = {entry.name for entry in entries}
    missing = sorted(known - set(names))
    if missing:
        raise ValueError(f"{files.folder}: {len(missing)} tensors are missing: {_some(missing)}.")
    unknown = sorted(name for name in names if name not in known and not family.is_ignored(name))
    if unknown:
        raise ValueError(
            f"{files.folder}: {len(unknown)} tensors have no place in a {family.model_type} model: "
            f"{_some(unknown)}. Is it another architecture, or an adapter?"
        )
    for entry in entries:
        shape = files.shape(names[entry.name])
        if shape != entry.shape:
            raise ValueError(
                f"{files.folder}: {entry.name} must have shape {entry.shape} by config.json, got {shape}. "
                "Does the config belong to these weights?"
            )


def _checkpoint_tensors(model: CausalLM, params: Params) -> dict[str, LazyTensor]:
    if HEAD in params:
        model = replace(model, value_head="mlp" if "hidden" in params[HEAD] else "linear")
    flat = _flat(params)
    entries = _entries(model)
    wrong = sorted({path for entry in entries for path in entry.paths} ^ set(flat))
    if wrong:
        raise ValueError(
            f"`params` must be the whole tree of a {model.family.model_type} model; missing or unknown: "
            f"{_some(wrong)}. Was `merge_params` forgotten?"
        )

    def tensor(entry: Entry) -> LazyTensor:
        def make() -> np.ndarray:
            arrays = [np.asarray(jax.device_get(flat[path])) for path in entry.paths]
            return entry.transform.save(arrays, model.config.vocab_size)

        num_bytes = int(np.prod(entry.shape)) * flat[entry.paths[0]].dtype.itemsize
        return LazyTensor(num_bytes, make)

    return {entry.name: tensor(entry) for entry in entries}


def _flat(tree: Params) -> dict[str, Any]:
    """A nested mapping as one of "a/b/c"."""
    return dict(traverse_util.flatten_dict(dict(tree), sep="/"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
