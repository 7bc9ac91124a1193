# SPDX-License-Identifier: Apache-2.0
"""transformers' names of checkpoints: `checkpoint-500` is a link to the model in jrl's `checkpoint_500`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jrl.distributed import is_main
from jrl.trainers.checkpoints import MODEL

_OURS, _THEIRS = "checkpoint_", "checkpoint-"


def link_model(checkpoint: Path) -> None:
    """Puts `checkpoint-<step>` beside a checkpoint: a folder that `from_pretrained` reads. It may not be written yet.

    What has that name already stays, and where there can be no links there are none.

    Args:
      checkpoint: The folder `checkpoint_<step>`.
    """
    if not is_main():
        return
    drop_links(checkpoint.parent)
    link = checkpoint.with_name(checkpoint.name.replace(_OURS, _THEIRS, 1))
    with contextlib.suppress(OSError):
        link.symlink_to(Path(checkpoint.name) / MODEL, target_is_directory=True)


def drop_links(run_dir: Path) -> None:
    """Removes links whose checkpoints are not there any more."""
    if not is_main():
        return
    for link in run_dir.glob(f"{_THEIRS}*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def behind_link(path: Path) -> Path:
    """The checkpoint itself where a path is such a link; else the path."""
    if path.name.startswith(_THEIRS) and path.is_symlink() and path.resolve().name == MODEL:
        return path.resolve().parent
    return path
