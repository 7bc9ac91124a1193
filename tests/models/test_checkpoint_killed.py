# SPDX-License-Identifier: Apache-2.0
"""Processes killed while they save: the folder is the old checkpoint or the new one."""

import subprocess
import sys
from pathlib import Path

import pytest

from jrl.models.checkpoint import load_checkpoint

ROUNDS = 60


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(tmp_path):
    command = [sys.executable, "-m", "tests.models.saves_forever", str(tmp_path / "m"), str(ROUNDS)]
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(command, check=True, cwd=root, capture_output=True, text=True).stdout
    assert len(found) == ROUNDS and set(found) == {"A", "B"}
    loaded = load_checkpoint(tmp_path / "m")
    assert float(loaded.params["final_norm"]["scale"][0]) == "AB".index(found[-1]) + 1
