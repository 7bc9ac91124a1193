# SPDX-License-Identifier: Apache-2.0
"""`jrl plan`: memory and traffic of a recipe on devices that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from jrl.cli.flat import is_flat
from jrl.mesh import abstract_mesh
from jrl.trainers.config.coercion import read_yaml
from jrl.trainers.config.overrides import apply_overrides
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.plan.run_plan import plan_run

GIB = 1 << 30


def add_plan_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--config", required=True, metavar="YAML", help="nested recipe of a run, or its name"
    )
    command.add_argument(
        "--devices", type=int, metavar="N", help="default: what `--mesh` multiplies to, or 1"
    )
    command.add_argument(
        "--mesh",
        metavar="SIZES",
        help="such as data=2,fsdp=8,tensor=4; default: the recipe's, or all on data",
    )
    command.add_argument("--hbm", type=float, metavar="GIB", help="memory of a device: says whether it fits")


def plan(flags: argparse.Namespace, overrides: Sequence[str]) -> Callable[[], int | None]:
    """Runs `jrl plan`."""
    content = read_yaml(flags.config)
    if is_flat(content):
        raise ValueError(
            f"--config must be a nested recipe, of the sections method, model, train, ...; {flags.config} has TRL's "
            "flat fields. A run with it writes its sections into config.yaml of every checkpoint, which can be planned."
        )
    config = apply_overrides(TRLConfig.load_yaml(flags.config), list(overrides))
    sizes = {"data": -1, "fsdp": 1, "tensor": 1} | (config.train.mesh or {})
    if flags.mesh:
        sizes = {"data": 1, "fsdp": 1, "tensor": 1} | _sizes(flags.mesh)
    devices = flags.devices
    if devices is None:
        devices = 1
        for size in sizes.values():
            devices *= max(size, 1)
    mesh = abstract_mesh(**sizes, num_devices=devices)
    found = plan_run(config, mesh)

    def show() -> None:
        print(found.table(None if flags.hbm is None else int(flags.hbm * GIB)))

    return show


def _sizes(text: str) -> dict[str, int]:
    """ "data=2,fsdp=8" as a mapping."""
    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "fsdp", "tensor") or not size.lstrip("-").isdigit():
            raise ValueError(
                f"`--mesh` must be sizes of data, fsdp and tensor, as data=2,fsdp=8; got {text!r}."
            )
        found[name] = int(size)
    return found
