# SPDX-License-Identifier: Apache-2.0
"""`jrl doctor`, also called `jrl env`: versions and devices for a bug report, and common traps with their remedies.

A check reads the machine and changes nothing. Its verdict is a function of what was read.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jrl.cli.parser import CommandParser
from jrl.compilation import VARIABLE, cache_path, cache_refusal
from jrl.device_memory import gpu_advice, usable_bytes
from jrl.models.cost import format_bytes
from jrl.trainers.loop.activity import SECONDS_FILE
from jrl.version import __version__

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "datasets",
    "ray",
    "wandb",
)
_GIB = 1 << 30
LITTLE_DISK, NO_DISK = 20 * _GIB, 2 * _GIB
"""Free bytes below which a disk is warned of, and below which no checkpoint of a small model fits."""
LITTLE_MEMORY = 4 * _GIB
"""Free bytes of the host below which loading a small model may fail."""
# Variables that make every run slow or different, and why.
_SLOW = {
    "JAX_DISABLE_JIT": "nothing is compiled, so everything is very slow",
    "JAX_DEBUG_NANS": "every program is run twice where a NaN appears, and results are fetched at once",
    "JAX_ENABLE_X64": "arrays may become float64, which no test of jrl covers",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "device memory is allocated piece by piece, which is slow",
}
_GOOGLE = "0x1ae0"
"""Vendor of TPUs on the PCI bus."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Check(NamedTuple):
    """Finding of one check.

    Attributes:
      name: What was looked at.
      verdict: "ok"; "warning": a run may fail or surprise; "wrong": it will.
      found: What is there.
      remedy: What to do; "" where all is well.
    """

    name: str
    verdict: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """One line."""
        remedy = f" Remedy: {self.remedy}" if self.remedy else ""
        return f"[{self.verdict:^7}] {self.name}: {self.found}.{remedy}"


def add_flags(command: CommandParser) -> None:
    """The command has no flags; its help says how it ends."""
    command.end_help_with("Exits with status 1 where a check says `wrong`.")


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], int]:
    """`jrl doctor`: prints versions, system and devices, one a line, then the checks; status 1 where one is wrong."""
    del flags
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")

    def work() -> int:
        print("\n".join(f"- {name}: {value}" for name, value in environment().items()))
        found = list(checks())
        print("\n" + "\n".join(map(str, found)))
        return int(any(check.verdict == "wrong" for check in found))

    return work


def environment() -> dict[str, str]:
    """Versions by package, then system and devices."""
    try:
        devices = jax.devices()
        told = f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"
    except RuntimeError as error:  # of a driver that does not answer
        told = f"none: {error}"
    return {
        "system": platform.platform(),
        "Python": platform.python_version(),
        "jrl": __version__,
        **{name: _version(name) for name in _PACKAGES},
        "devices": told,
    }


def checks() -> Iterator[Check]:
    """All checks of this machine, in the order in which they should be mended."""
    yield check_package(packages_distributions().get("jrl", ()), Path(__file__).parents[1])
    yield check_versions(_version("jax"), _version("jaxlib"))
    yield check_accelerator(
        backend=_backend(),
        has_gpu=has_nvidia_gpu(),
        has_tpu=has_tpu(),
        chosen=os.environ.get("JAX_PLATFORMS"),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    yield check_memory(host_memory(), usable_bytes(), gpu_advice())
    for name, folder in (("disk", Path.cwd()), ("disk of caches", _cache_home())):
        yield check_disk(name, folder, _free_bytes(folder))
    yield check_cache(cache_path(), cache_refusal())
    yield check_hub({name: os.environ[name] for name in _OFFLINE if name in os.environ})
    yield check_extras(_version("safetensors"), _version("datasets"))
    yield check_variables(os.environ)


def check_package(distributions: Sequence[str], folder: Path) -> Check:
    """Checks whether `import jrl` is this library alone.

    Args:
      distributions: Installed ones that bring a package called jrl.
      folder: Where this one lies.
    """
    if "jrl" in distributions:
        return Check(
            "package",
            "wrong",
            f"the distribution `jrl` is installed: another project, whose files mix with these in {folder}",
            "pip uninstall -y jrl && pip install --force-reinstall --no-deps jrl-post",
        )
    how = "jrl-post" if "jrl-post" in distributions else "not installed, read from a folder"
    return Check("package", "ok", f"{how} ({folder})")


def check_versions(jax_version: str, jaxlib_version: str) -> Check:
    """Checks whether jax and jaxlib belong together."""
    found = f"jax {jax_version}, jaxlib {jaxlib_version}"
    if jax_version.split(".")[:2] != jaxlib_version.split(".")[:2]:
        return Check(
            "jax and jaxlib",
            "wrong",
            f"{found} are of different releases",
            f'pip install "jaxlib=={jax_version}", or install jrl-post anew with its extra',
        )
    return Check("jax and jaxlib", "ok", found)


def check_accelerator(
    *, backend: str, has_gpu: bool, has_tpu: bool, chosen: str | None, visible: str | None = None
) -> Check:
    """Checks whether JAX computes on the accelerator that the machine has.

    Args:
      backend: What JAX computes on; "none": it finds no device.
      has_gpu: Whether there is an NVIDIA GPU.
      has_tpu: Whether there is a TPU.
      chosen: `JAX_PLATFORMS`, where it is set.
      visible: `CUDA_VISIBLE_DEVICES`, where it is set.
    """
    if backend == "none":
        return Check(
            "accelerator",
            "wrong",
            "JAX finds no device",
            f"unset JAX_PLATFORMS, which is {chosen!r}" if chosen else "check the driver (`nvidia-smi`)",
        )
    kind, extra = ("an NVIDIA GPU", "cuda13") if has_gpu else ("a TPU", "tpu")
    if backend == "cpu" and (has_gpu or has_tpu):
        if chosen is not None and "cpu" in chosen:
            return Check(
                "accelerator", "warning", f"{kind} is here, and JAX_PLATFORMS={chosen}", "unset JAX_PLATFORMS"
            )
        if has_gpu and visible in ("", "-1"):
            hidden = f"{kind} is here, and CUDA_VISIBLE_DEVICES={visible!r} hides it"
            return Check("accelerator", "warning", hidden, "unset CUDA_VISIBLE_DEVICES")
        return Check(
            "accelerator",
            "wrong",
            f"{kind} is here, and JAX computes on the CPU: its jaxlib is the CPU build, or the driver is too old",
            f"pip install 'jrl-post[{extra}]'" + (" (or cuda12, by the driver)" if has_gpu else ""),
        )
    return Check("accelerator", "ok", f"JAX computes on {backend}")


def check_memory(host: int | None, device: int | None, advice: str | None = None) -> Check:
    """Checks whether a small model can be loaded.

    Args:
      host: Free bytes of the host; None: unknown.
      device: Bytes that programs may have on an accelerator; None: there is none.
      advice: How they get more of it.
    """
    told = "unknown" if host is None else f"{format_bytes(host)} free on the host"
    told += "" if device is None else f", {format_bytes(device)} usable on each device"
    told += "" if device is None or advice is None else f" ({advice})"
    if host is not None and host < LITTLE_MEMORY:
        return Check("memory", "warning", told, "end other programs, or take a smaller model (`jrl plan`)")
    return Check("memory", "ok", told)


def check_disk(name: str, folder: Path, free: int) -> Check:
    """Checks whether checkpoints, or downloaded models, fit.

    Args:
      name: Of the check.
      folder: On the disk.
      free: Bytes.
    """
    found = f"{format_bytes(free)} free in {folder}"
    remedy = "free space, or name another disk (`train.checkpoint_dir`; HF_HOME for downloads)"
    if free < NO_DISK:
        return Check(name, "wrong", found, remedy)
    return Check(name, "warning" if free < LITTLE_DISK else "ok", found, remedy if free < LITTLE_DISK else "")


def check_cache(folder: Path, refusal: str | None) -> Check:
    """Checks whether compiled programs are kept for the next start.

    Args:
      folder: Where, whether or not it is there yet.
      refusal: Why they are not kept; None: they are.
    """
    if refusal is not None:
        found = f"off, so that every start compiles anew: {refusal}"
        return Check("compilation cache", "warning", found, f"change that, or name a folder by {VARIABLE}")
    files = [
        entry.stat().st_size
        for entry in folder.glob("*")
        if entry.is_file()
        and entry.name != SECONDS_FILE
        and not entry.name.startswith(".")
        and not entry.name.endswith("-atime")
    ]
    return Check("compilation cache", "ok", f"{len(files)} programs, {format_bytes(sum(files))} in {folder}")


def check_hub(offline: Mapping[str, str]) -> Check:
    """Checks whether models and data may be downloaded.

    Args:
      offline: The variables that say no, and their values.
    """
    switched = {
        name: value for name, value in offline.items() if value.lower() not in ("", "0", "false", "no", "off")
    }
    if switched:
        names = ", ".join(f"{name}={value}" for name, value in switched.items())
        return Check(
            "hub",
            "warning",
            f"{names}: hub ids are looked for in the local cache alone",
            "give local folders, or unset it",
        )
    return Check("hub", "ok", "downloads are allowed (not tried)")


def check_extras(safetensors: str, datasets: str) -> Check:
    """Checks whether checkpoints and named data sets can be read."""
    if safetensors == _MISSING:
        return Check(
            "packages",
            "wrong",
            "safetensors is missing: no checkpoint can be read",
            "pip install safetensors",
        )
    if datasets == _MISSING:
        return Check(
            "packages",
            "ok",
            "files are read; data sets by name need the extra: pip install 'jrl-post[datasets]'",
        )
    return Check("packages", "ok", "checkpoints, files and data sets by name can be read")


def check_variables(variables: Mapping[str, str]) -> Check:
    """Checks whether a variable of the environment makes runs slow."""
    switched = [
        name for name in _SLOW if variables.get(name, "").lower() not in ("", "0", "false", "default")
    ]
    if not switched:
        return Check("variables", "ok", "none that slows runs down")
    told = "; ".join(f"{name} is set: {_SLOW[name]}" for name in switched)
    return Check("variables", "warning", told, f"unset {' '.join(switched)}")


def host_memory() -> int | None:
    """Free bytes of this host, where Linux tells them."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _backend() -> str:
    try:
        return jax.default_backend()
    except RuntimeError:
        return "none"


def has_nvidia_gpu() -> bool:
    """True where the driver names a GPU: its program alone may be on a machine that has none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
        return answer.returncode == 0 and bool(answer.stdout.strip())
    return False


def has_tpu(root: Path = Path("/")) -> bool:
    """True where the kernel shows a TPU: as `/dev/accel0`, or as a device of Google's behind `/dev/vfio`.

    A folder `/dev/accel` is of other accelerators, such as a laptop's.

    Args:
      root: Of the file system.
    """
    if any((root / "dev").glob("accel[0-9]*")):
        return True
    return (root / "dev/vfio").exists() and any(
        _vendor(path) == _GOOGLE for path in (root / "sys/bus/pci/devices").glob("*/vendor")
    )


def _vendor(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _cache_home() -> Path:
    """Folder of downloaded models."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache").expanduser()


def _free_bytes(folder: Path) -> int:
    """Free bytes of the disk on which a folder lies, or would."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


_MISSING = "not installed"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _MISSING
