# SPDX-License-Identifier: Apache-2.0
"""`jrl plan`: memory and traffic of a recipe on devices that need not be here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax

from jrl.cli.flat import is_flat
from jrl.device_memory import GPU_ADVICE, is_worth_more
from jrl.mesh import AXES, EXPERT, abstract_mesh, make_mesh, mesh_sizes, rows_parts
from jrl.trainers.config.coercion import read_yaml
from jrl.trainers.config.overrides import apply_overrides
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.plan.run_plan import plan_run

GIB = 1 << 30


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--config",
        required=True,
        metavar="YAML",
        help="recipe with the sections method, model, train, ..., or a flat one of DDPO; or its name",
    )
    command.add_argument(
        "--devices", type=int, metavar="N", help="default: what `--mesh` multiplies to, or 1"
    )
    command.add_argument(
        "--mesh",
        metavar="SIZES",
        help="such as data=2,fsdp=8,tensor=4; default: the recipe's, or all on data",
    )
    command.add_argument(
        "--target",
        metavar="TARGET",
        help="plan for these devices, and say whether it fits; no compiler is asked: gpu:rtx4090, gpu:h100x8, "
        "tpu:v5e:2x4, ...",
    )
    command.add_argument(
        "--compile",
        nargs="+",
        metavar="TARGET",
        help="compile the programs for absent devices: tpu:v5e:2x4, tpu:v6e:4x4, gpu:h100x8, ...",
    )
    command.add_argument(
        "--programs",
        nargs="+",
        default=[],
        metavar="NAME",
        help="with --compile: these alone (sample, score, update, evaluate)",
    )
    command.add_argument(
        "--save", type=Path, metavar="DIR", help="with --compile: writes the executables into this folder"
    )
    command.add_argument("--hbm", type=float, metavar="GIB", help="memory of a device: says whether it fits")


def prepare(flags: argparse.Namespace, overrides: Sequence[str]) -> Callable[[], int | None]:
    """Runs `jrl plan`."""
    read = partial(_config, flags.config, overrides)
    sizes = {"data": -1, "fsdp": 1, "tensor": 1} | (read(1).train.mesh or {})
    if flags.mesh:
        sizes = {"data": 1, "fsdp": 1, "tensor": 1} | _sizes(flags.mesh)
    if flags.target is not None and flags.compile:
        raise ValueError("--target must not be given with --compile, which plans for its targets, too.")
    for name, given in {"devices": flags.devices, "hbm": flags.hbm}.items():
        if given is not None and (flags.target is not None or flags.compile):
            flag = "--compile" if flags.compile else "--target"
            raise ValueError(f"--{name} must not be given with {flag}: the target has it.")
    if flags.compile:
        return _compile(read, flags, sizes)
    for name, given in {"programs": flags.programs, "save": flags.save}.items():
        if given:
            raise ValueError(f"--{name} needs --compile TARGET: without it nothing is compiled.")
    if flags.target is not None:
        return _plan_for(read, flags.target, sizes)
    devices = flags.devices
    if devices is None:
        devices = 1
        for size in sizes.values():
            devices *= max(size, 1)
    mesh = abstract_mesh(**sizes, num_devices=devices, device=None)
    found = plan_run(read(rows_parts(mesh)), mesh)

    def show() -> None:
        device = None if flags.hbm is None else int(flags.hbm * GIB)
        print(found.table(device))
        if device is not None and is_worth_more(found.total, device):
            print(GPU_ADVICE)

    return show


def _plan_for(
    read: Callable[[int], TRLConfig], name: str, sizes: Mapping[str, int]
) -> Callable[[], int | None]:
    """`jrl plan --target`; status 1 where the target is too small."""
    from jrl.trainers.plan.targets import parse_target  # other plans need no data sheets

    target = parse_target(name)
    mesh = abstract_mesh(**dict(sizes), num_devices=target.num_devices, device=target.device)
    with jax.sharding.use_abstract_mesh(mesh):  # of which a recipe may ask the dtype that it computes in
        config = read(rows_parts(mesh))
    found = plan_run(config, mesh)

    def show() -> int:
        print(found.table(target.usable_bytes))
        if target.platform == "gpu" and is_worth_more(found.total, target.memory_bytes):
            print(GPU_ADVICE)
        return int(found.total > target.usable_bytes)

    return show


def _config(path: str, overrides: Sequence[str], row_devices: int) -> TRLConfig:
    """The configuration of a run whose rows so many devices share: a nested one is the same for any number.

    Raises:
      ValueError: If it is flat, and not DDPO's, whose fields are no other command's.
    """
    content = read_yaml(path)
    if not is_flat(content):
        return apply_overrides(TRLConfig.load_recipe(path), list(overrides))
    if "pretrained_model" in content:
        from jrl.trl.commands import planned_ddpo  # transformers' arguments take a second to import

        return apply_overrides(planned_ddpo(path, row_devices), list(overrides))
    raise ValueError(
        f"--config must be a nested recipe, of the sections method, model, train, ...; {path} has TRL's "
        "flat fields. A run with it writes its sections into config.yaml of every checkpoint, which can be planned."
    )


def _compile(
    read: Callable[[int], TRLConfig], flags: argparse.Namespace, sizes: Mapping[str, int]
) -> Callable[[], int | None]:
    """`jrl plan --compile`; status 1 where a target is too small."""
    # Other commands need not wait for what reads compiled programs.
    from jrl.trainers.plan.compiled import compile_run
    from jrl.trainers.plan.targets import parse_target

    targets = [parse_target(text) for text in flags.compile]
    # All are tried before the first is compiled, which takes minutes.
    split = [mesh_sizes(**dict(sizes), num_devices=target.num_devices) for target in targets]
    meshes = [make_mesh(*axes, devices=target.devices()) for axes, target in zip(split, targets, strict=True)]

    def show() -> int:
        fits = True
        for target, mesh in zip(targets, meshes, strict=True):
            folder = None if flags.save is None else flags.save / target.name.replace(":", "_")
            with jax.set_mesh(mesh):
                config = read(rows_parts(mesh))
            found = compile_run(config, target, mesh, only=flags.programs, save=folder, tell=_tell)
            print(found.table(), flush=True)
            fits = fits and found.fits
        return 0 if fits else 1

    return show


def _tell(name: str) -> None:
    print(f"compiling {name} ...", file=sys.stderr, flush=True)


def _sizes(text: str) -> dict[str, int]:
    """ "data=2,fsdp=8" as a mapping."""
    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in (*AXES, EXPERT) or not size.lstrip("-").isdigit():
            raise ValueError(
                f"`--mesh` must be sizes of data, fsdp, expert and tensor, as data=2,fsdp=8; got {text!r}."
            )
        found[name] = int(size)
    return found
