# SPDX-License-Identifier: Apache-2.0
"""Tiny models that several tests read; whoever changes a folder copies it first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.pipeline import DiffusionModel
from tests.models.diffusion.tiny_folder import save_tiny_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder made without torch. Not to be changed."""
    return save_tiny_folder(tmp_path_factory.mktemp("diffusion") / "tiny")


@pytest.fixture
def changed_folder(tiny_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies the tiny folder to where a test may change it."""
    return lambda: Path(shutil.copytree(tiny_folder, tmp_path / "changed"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> DiffusionModel:
    """The model in that folder."""
    return load_diffusion_model(tiny_folder)
