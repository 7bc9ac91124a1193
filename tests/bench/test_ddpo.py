# SPDX-License-Identifier: Apache-2.0
"""The benchmark of DDPO at the size that a CPU can run, as a user starts it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "tiny")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [4, 0])
def test_a_record_at_tiny_size(lora_rank):
    words = [
        *TINY,
        "--rows",
        "4",
        "--steps",
        "3",
        "--minibatch",
        "2",
        "--precision",
        "float32",
        "--rounds",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "ddpo.py", *words, "--lora-rank", str(lora_rank)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    record = json.loads(done.stdout)
    assert record["parameters"] == 203_204 and record["shapes"]["lora_rank"] == lora_rank
    # A trained adapter wants the gradient of what it reads; weights that train want their own beside it.
    assert 2.0 < record["flops_update"] / record["flops_denoising"] < 3.01
    assert (record["flops_update"] == 3 * record["flops_denoising"]) == (lora_rank == 0)
    assert record["pre_update_clip_fraction"] == 0 and record["pre_update_ratio_max_dev"] < 5e-6
    assert len(record["all_seconds_update"]) == 2
    numbers = [value for value in record.values() if isinstance(value, float)]
    assert numbers and all(map(math.isfinite, numbers)) and record["samples_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["ddpo_jrl.py", "ddpo_torch.py"])
def test_a_worker_answers(worker):
    if worker == "ddpo_torch.py":
        pytest.importorskip("diffusers")
    words = [*TINY, "--rows", "2", "--steps", "2", "--minibatch", "1"]
    precision = "--precision" if worker == "ddpo_jrl.py" else "--dtype"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peers" / worker, *words, precision, "float32"],
        env=ENVIRONMENT,
        input="run\nrun\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    ready = done.stdout.splitlines()[-3:]
    assert ready[0] == "ready" and all(float(seconds) > 0 for seconds in ready[1:])
