# SPDX-License-Identifier: Apache-2.0
"""Real processes that are asked to stop, or killed, and go on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.trainers.runs import repeatable

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("interrupted_run.py")
ROOT = Path(__file__).resolve().parents[2]
STEPS = {"ppo": 40, "sft": 200, "rft": 60, "ilql": 120, "dpo": 120, "reward": 200}


def start(algorithm, checkpoint, folder):
    command = [sys.executable, str(SCRIPT), algorithm, checkpoint, str(folder), str(STEPS[algorithm])]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def history(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in repeatable([json.loads(line) for line in lines]) if "iteration" in record]


def wait_for(condition, process, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def read_arrays(path):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


@pytest.fixture(scope="module", params=["ppo", "sft", "rft", "ilql", "dpo", "reward"])
def whole(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / request.param
    process = start(request.param, checkpoint, folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return request.param, folder


def finish_and_compare(algorithm, checkpoint, folder, whole_folder):
    process = start(algorithm, checkpoint, folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert history(folder) == history(whole_folder)
    last = f"checkpoint_{STEPS[algorithm]}"
    expected, got = read_arrays(whole_folder / last / "state"), read_arrays(folder / last / "state")
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(expected[name], got[name], err_msg=name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_exits_0_and_resumes_bit_for_bit(whole, checkpoint, tmp_path, number):
    algorithm, whole_folder = whole
    folder = tmp_path / "run"
    process = start(algorithm, checkpoint, folder)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(history(folder)) >= 3, process)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert any(folder.glob("checkpoint_*/manifest.json"))
    assert len(history(folder)) < len(history(whole_folder))
    finish_and_compare(algorithm, checkpoint, folder, whole_folder)


def test_a_killed_run_resumes_from_the_last_whole_checkpoint(whole, checkpoint, tmp_path):
    algorithm, whole_folder = whole
    folder = tmp_path / "run"
    process = start(algorithm, checkpoint, folder)
    wait_for(lambda: any(folder.glob("checkpoint_*/manifest.json")), process)
    process.kill()
    process.communicate()
    assert len(history(folder)) < len(history(whole_folder))
    finish_and_compare(algorithm, checkpoint, folder, whole_folder)
