# SPDX-License-Identifier: Apache-2.0
"""Real processes that are killed, and writes that the system refuses."""

import os
import signal
import subprocess
import sys

import pytest

from jrl.trainers.checkpoint import Checkpointer
from tests.trainers.saves import CONFIG, FROZEN, make_state

pytestmark = pytest.mark.slow
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def start(what, run_dir):
    command = [sys.executable, "-m", "tests.trainers.saves", what, str(run_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def restored_step(run_dir):
    checkpoints = Checkpointer(run_dir, keep=2, resume_from=run_dir)
    found = checkpoints.restore(make_state(), config=CONFIG, frozen_sha256=lambda: FROZEN)
    checkpoints.close()
    return found.step


def test_killed_while_saving_falls_back_to_the_last_whole_one(tmp_path):
    with start("kill", tmp_path) as process:
        for line in process.stdout:
            if "half-written" in line:
                break
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "checkpoint_2.tmp").exists()
    with pytest.warns(UserWarning, match=r"checkpoint_2.tmp was left half-written.*checkpoint_1"):
        assert restored_step(tmp_path) == 1


def test_a_refused_write_keeps_the_older_checkpoint_and_the_run_goes_on(tmp_path):
    process = start("full", tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Checkpoint 2 could not be written" in output
    assert "kept: checkpoint_1" in output
    assert "failed 1" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_3", "run.lock"]
    assert restored_step(tmp_path) == 3
