# SPDX-License-Identifier: Apache-2.0
"""The benchmark of loading, at a third of its size: the bound on memory holds in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "load_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("file_dtype", ["float32", "bfloat16"])
def test_peak_memory_of_loading(tmp_path, file_dtype):
    command = [sys.executable, SCRIPT, "--gigabytes", "0.5", "--shards", "3", "--folder", tmp_path]
    # Larger matrices in fewer layers: what importing transformers takes counts too, and must not decide.
    command += ["--file-dtype", file_dtype, "--vocab-size", "64000"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert found["ok"] and found["files"] == 3 and found["devices"] == 2
    assert found["peak"] > found["share"] > 500 * (1 if file_dtype == "float32" else 2) * 0.95
    assert found["bound"] == pytest.approx(found["share"] + 2.25 * found["largest"], abs=0.2)
