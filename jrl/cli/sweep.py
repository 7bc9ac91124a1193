# SPDX-License-Identifier: Apache-2.0
"""`jrl sweep`: hyperparameters of a script, searched by Ray Tune."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

from jrl.sweep import read_plan


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument("script", help="Python file with `main(hparams)`, which calls `jrl.train`")
    command.add_argument("--config", required=True, metavar="YAML", help="`tune_config` and the search space")
    command.add_argument(
        "--output-dir", metavar="DIRECTORY", help="default: runs/sweep_<script>/<time>; trials and results"
    )
    # trlX's spellings beside those of the other commands.
    command.add_argument(
        *("--num-gpus", "--num_gpus"),
        type=float,
        metavar="N",
        help="of each trial; default: 1 where there are any",
    )
    command.add_argument(
        *("--num-cpus", "--num_cpus"),
        type=float,
        metavar="N",
        help="of each trial; default: its share of all, so without GPUs one trial after another",
    )
    command.add_argument(
        *("--server-address", "--server_address"),
        metavar="ADDRESS",
        help="of a Ray cluster; default: this machine",
    )
    command.add_argument("-y", action="store_true", help="no question is ever asked; trlX's flag, accepted")


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], int]:
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
