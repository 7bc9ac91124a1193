# SPDX-License-Identifier: Apache-2.0
"""Examples as a user starts them: in a process of their own, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def start(*flags, cwd, program):
    """A running example; `program` is the script, or what stands in its place on the command line."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    }
    return subprocess.Popen(
        [sys.executable, *map(str, program), *map(str, flags)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """What it printed; fails with that if it did."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output
