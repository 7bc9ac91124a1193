# SPDX-License-Identifier: Apache-2.0
"""What holds of a folder of every kind: it comes back as it was, and one that was changed is refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrl.models.diffusion.folder import describe_diffusion_model, load_diffusion_model
from jrl.models.diffusion.pipeline import DiffusionModel
from tests.models.diffusion.tiny_folder import change_json

Change = Callable[[Path], None]


def config(part: str, **changes: Any) -> Change:
    """Changes a part's config."""
    return lambda folder: change_json(folder / part / "config.json", **changes)


def index_of(**changes: Any) -> Change:
    """Changes the list of parts."""
    return lambda folder: change_json(folder / "model_index.json", **changes)


def scheduler(**changes: Any) -> Change:
    """Changes the scheduler's config."""
    return lambda folder: change_json(folder / "scheduler/scheduler_config.json", **changes)


def check_is_written_back(folder: Path, model: DiffusionModel, copy: Path) -> DiffusionModel:
    """The model of `folder` is the same behind writing and reading, and is described as it is; the one read again."""
    model.save(copy)
    again = load_diffusion_model(copy)
    assert again.architecture == model.architecture
    same = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), dict(model.weights), dict(again.weights))
    assert jax.tree.all(same)
    described = describe_diffusion_model(folder)
    assert jax.tree.map(lambda x: x.shape, dict(described.weights)) == jax.tree.map(
        lambda x: x.shape, dict(model.weights)
    )
    return again


def check_refuses_ids(model: DiffusionModel, ids: Any, *, columns: int) -> None:
    """Rows of ids that are not as long as those of all encoders together are refused."""
    with pytest.raises(ValueError, match=rf"must have {columns} columns.*got {ids.shape[1]}"):
        model.text_encoder.encode(model.weights["text_encoder"], ids, dtype=np.float32)


def check_is_refused(bad: Mapping[str, tuple[Change, str]], case: str, folder: Path, copy: Path) -> None:
    """A copy that a case changes is refused with its message: one line, which names the copy."""
    change, expected = bad[case]
    shutil.copytree(folder, copy)
    change(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as error:
        describe_diffusion_model(copy)
    assert "\n" not in str(error.value)
    assert str(copy) in str(error.value)
