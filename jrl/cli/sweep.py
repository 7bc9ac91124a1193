# SPDX-License-Identifier: Apache-2.0
"""`jrl sweep`: hyperparameters of a script, searched by Ray Tune."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

from jrl.sweep import read_plan


def sweep(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], int]:
    """`jrl sweep`: the file is read and checked now; status 1 where no trial came to a result."""
    if overrides:
        raise ValueError(f"unknown flags {overrides}; what all trials share stands in {flags.config}.")
    plan = read_plan(flags.config)
    script = Path(flags.script)
    if not script.is_file():
        raise FileNotFoundError(f"there is no script {script}.")
    from jrl.sweep.run import prepare_sweep  # Ray is an extra, and slow to import

    default = Path("runs") / f"sweep_{script.stem}" / time.strftime("%Y%m%d-%H%M%S")
    work = prepare_sweep(
        plan,
        script,
        Path(flags.output_dir) if flags.output_dir else default,
        num_cpus=flags.num_cpus,
        num_gpus=flags.num_gpus,
        address=flags.server_address,
    )
    return lambda: 0 if any(math.isfinite(result.last) for result in work()) else 1
