# SPDX-License-Identifier: Apache-2.0
"""`jrl env`: what a bug report should say of the machine."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import jax

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


def show_environment(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl env`: prints versions, system and devices, one a line."""
    del flags
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    return lambda: print("\n".join(f"- {name}: {value}" for name, value in environment().items()))


def environment() -> dict[str, str]:
    """Versions by package, then system and devices."""
    devices = jax.devices()
    return {
        "system": platform.platform(),
        "Python": platform.python_version(),
        "jrl": __version__,
        **{name: _version(name) for name in _PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
