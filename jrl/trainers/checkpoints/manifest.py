# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: of files, in the manifest that makes a checkpoint whole, and of trees of arrays."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.distributed import from_main, is_main
from jrl.mesh import path_name
from jrl.placement import fetch
from jrl.trainers.checkpoints.regular_files import open_binary, read_text

MANIFEST = "manifest.json"
_FORMAT = 1
_BLOCK = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


def file_sha256(path: Path, *, sync: bool = False) -> str:
    """SHA-256 of a file's content, in hexadecimal.

    Args:
      path: The file.
      sync: Whether to force it to the disk first, so that a power cut after the rename loses nothing.
    """
    digest = hashlib.sha256()
    with open_binary(path) as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fingerprint_files(directory: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files below a folder, by name in it; they are forced to the disk first."""
    return {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "sha256": file_sha256(path, sync=True),
        }
        for path in paths
    }


def missing_files(directory: Path, known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files that a folder does not show, or not at their full size.

    Args:
      directory: The folder.
      known: What `fingerprint_files` gave, perhaps in another process: a network file system may show its files late.
    Returns:
      Their names, sorted.
    """
    present = _files(directory)
    return sorted(
        name
        for name, noted in known.items()
        if name not in present or present[name].stat().st_size != noted["size"]
    )


def write_manifest(
    directory: Path, entries: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Writes `manifest.json` over everything in a folder: the last file of a checkpoint.

    Args:
      directory: Folder whose files are all written.
      entries: Further facts to keep in it, plain JSON.
      known: What `fingerprint_files` gave for some of them, in the process that wrote these.
    Raises:
      CheckpointError: If one of these is not there: a manifest of the rest would declare it whole.
    """
    present, known = _files(directory), known or {}
    if missing := missing_files(directory, known):
        raise CheckpointError(
            f"{directory} lacks {missing[0]}, or a part of it, which a process has written."
        )
    files = fingerprint_files(directory, (path for name, path in present.items() if name not in known))
    files = dict(sorted({**files, **{name: dict(known[name]) for name in known}}.items()))
    content = {**entries, "format": _FORMAT, "files": files}
    # The manifest carries its own fingerprint: a flipped bit in it must be noticed as much as one elsewhere.
    content["sha256"] = _content_sha256(content)
    target = directory / MANIFEST
    with target.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest's content, its own fingerprint checked.

    Raises:
      CheckpointError: If it is missing, no JSON, or altered.
    """
    try:
        content = json.loads(read_text(directory / MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is half-written, or no checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} cannot be read ({error}).") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _content_sha256(content):
        raise CheckpointError(f"{directory / MANIFEST} has changed since it was written.")
    if content["format"] != _FORMAT:
        raise CheckpointError(
            f"{directory} has format {content['format']}, this version reads {_FORMAT}: another version "
            "wrote it."
        )
    return content


def verify_manifest(directory: Path) -> dict[str, Any]:
    """Compares every file with the manifest and returns the manifest.

    Raises:
      CheckpointError: Naming the first file that is missing, unknown, of another size, altered, or a link to somewhere
        else; or what the disk says that cannot read one.
    """
    try:
        return _verify(directory)
    except OSError as error:  # a bad sector, a server's stale handle, a loop of links
        raise CheckpointError(f"{directory} cannot be read ({error}).") from error


def _verify(directory: Path) -> dict[str, Any]:
    content = read_manifest(directory)
    _check_links(directory)
    present = _files(directory)
    for name, expected in content["files"].items():
        if name not in present:
            raise CheckpointError(f"{directory} lacks the file {name} of its {MANIFEST}.")
        size = present[name].stat().st_size
        if size != expected["size"]:
            raise CheckpointError(
                f"{directory / name} has {size} bytes, its {MANIFEST} says {expected['size']}."
            )
        if file_sha256(present[name]) != expected["sha256"]:
            raise CheckpointError(f"{directory / name} has changed since it was written (SHA-256 differs).")
    surplus = sorted(set(present) - set(content["files"]))
    if surplus:
        raise CheckpointError(f"{directory} holds {surplus[0]}, which its {MANIFEST} does not know.")
    return content


def tree_sha256(tree: Any) -> str:
    """SHA-256 over names, types, shapes and bytes of all arrays of a tree; {} has one too. All processes call it.

    Arrays are fetched to the host of process 0 one by one, so no second copy of the tree is ever held.
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for name, leaf in sorted(((path_name(path), leaf) for path, leaf in leaves), key=lambda entry: entry[0]):
        array = fetch(leaf, everywhere=False)
        if is_main():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    found: str = from_main(digest.hexdigest())
    return found


def sync_directory(directory: Path) -> None:
    """Forces a folder's list of names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path) -> dict[str, Path]:
    """All files below a folder but the manifest, by relative name."""
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def _check_links(directory: Path) -> None:
    """A checkpoint holds what it is made of: a link out of it would have other files read, or later deleted."""
    home = directory.resolve()
    for path in directory.rglob("*"):
        # Not `Path.resolve`, which has an error of its own for links that lead in a circle.
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(home):
            raise CheckpointError(
                f"{path} is a link that leads out of the checkpoint. Copy the files themselves (cp -L)."
            )


def _content_sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
