# SPDX-License-Identifier: Apache-2.0
"""`jrl plan`: memory and traffic of a recipe on devices that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from jrl.mesh import abstract_mesh
from jrl.trainers.config import TRLConfig
from jrl.trainers.overrides import apply_overrides
from jrl.trainers.plan import plan_run

GIB = 1 << 30


def add_plan_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument("--config", required=True, metavar="YAML", help="recipe of a run")
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
    """`jrl plan`."""
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
