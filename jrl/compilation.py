# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept on the disk, so that the second start of a run does not compile them again.

JAX has such a cache and leaves it off; jrl turns it on, once a process, when the first model or trainer is made. What
the user says comes first: a folder that JAX was given (`JAX_COMPILATION_CACHE_DIR`, `jax_compilation_cache_dir`) is
used as it is, with that user's limits, and `JAX_ENABLE_COMPILATION_CACHE=0` or `JRL_COMPILATION_CACHE=off` means none.

What jrl's programs are compiled with is here too (`COMPILER_OPTIONS`), the same for sampling, scoring and updates.

A program compiled for one processor may hold instructions that another lacks, and home folders are shared between
machines: every kind of machine has a folder of its own, and so has every version of JAX, whose old folders may go.
Where a run has several devices of a CPU, in one process or in several, nothing is kept (`_keep_none`).
Programs are code: the folder is made for this user alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import stat
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jrl.data.sources.mapping import cache_folder

VARIABLE = "JRL_COMPILATION_CACHE"
"""Environment variable that names the folder; "off" for none."""
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
"""Of every program that computes with a model: `jax.jit(..., compiler_options=COMPILER_OPTIONS)`.

XLA may leave out a rounding to bfloat16 between two operations that it fuses, and fuses otherwise in every program: one
token then has a different probability in sampling, scoring and the update. Rounding as written, all three agree."""
MIN_COMPILE_SECONDS = 0.1
"""What takes less is compiled anew: a file costs about as much. JAX's own limit, a second, would leave out nearly every
program of a small model."""
_JAX_MIN_COMPILE_SECONDS = 1.0
_LOCK = ".lockfile"
"""JAX's own, in a folder whose size is limited: always empty, and held by whoever writes."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program of a model that may also be called while another one is traced, as within a user's `jax.grad`.

    JAX refuses compiler options inside another program, which has its own.

    Args:
      function: Traceable; compiled once for arguments of a kind.
    """
    program, part = jax.jit(function, compiler_options=COMPILER_OPTIONS), jax.jit(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
        return (part if inside else program)(*arguments)

    return call


def cache_refusal() -> str | None:
    """Why compiled programs are not kept; None: they are, in `cache_path`. Nothing is made or changed."""
    config: Any = jax.config  # its attributes are made at run time
    if not config.jax_enable_compilation_cache:
        return "JAX_ENABLE_COMPILATION_CACHE says so"
    if _has_several_devices_of_a_cpu():
        return "the run has several devices of a CPU"
    if not config.jax_compilation_cache_dir and os.environ.get(VARIABLE) == "off":
        return f"{VARIABLE} is off"
    folder = cache_path()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if config.jax_compilation_cache_dir or there != folder:
        may_write = there.is_dir() and os.access(there, os.W_OK)
        return None if may_write else f"{folder} cannot be made or written"
    refusal = _not_private(folder)
    return None if refusal is None else f"{folder} {refusal}"


def cache_path() -> Path:
    """Folder of compiled programs: JAX's own where it was given one, else jrl's; it may not be there yet."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    named = os.environ.get(VARIABLE)
    return (Path(named) if named else cache_folder() / "compiled") / machine_name()


def use_compilation_cache() -> Path | None:
    """Turns the cache on, unless it is on or the user said otherwise.

    Returns:
      The folder that JAX keeps programs in from now on; None: it keeps none.
    """
    config: Any = jax.config  # its attributes are made at run time
    if not config.jax_enable_compilation_cache:
        return None
    if _has_several_devices_of_a_cpu():
        _keep_none(config.jax_compilation_cache_dir or os.environ.get(VARIABLE, "off"))
        return None
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    if os.environ.get(VARIABLE) == "off":
        return None
    folder = cache_path()
    refusal = _make_private(folder)
    if refusal is not None:
        warnings.warn(
            f"Compiled programs are not kept: {folder} {refusal}. {VARIABLE} names another folder, or is `off`.",
            stacklevel=2,
        )
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_COMPILE_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    # JAX looks for its cache once, at the first program, which the user may have run before.
    compilation_cache.reset_cache()
    return folder


def _has_several_devices_of_a_cpu() -> bool:
    """Whether programs may reach over several: those of this process, or of all processes of the job."""
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _keep_none(named: str) -> None:
    """Turns the cache off: a program over several devices of a CPU, read back, mixes up its collectives.

    As compiled, they run one after the other, in one order on all devices. XLA keeps that order as a resource that
    they share, and reads it back for each list of operations alone: a loop and what stands beside it, or two loops,
    no longer share one and may run at once. Gloo, which talks between processes, tells them apart by their order
    alone; one process that reads a program back among others that compile it is enough.

    Seen with jaxlib 0.10.2. PPO on a mesh of (2, 2, 2) virtual devices ends with "Termination timeout for all reduce"
    in its second process, every time. Of second starts of PPO in two processes of one device each, on a busy machine,
    about half hang; in others, steps had a loss of NaN and were skipped.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
    compilation_cache.reset_cache()  # else JAX goes on with what it found at the first program
    if named != "off":
        warnings.warn(
            f"Compiled programs are neither kept in {named} nor read from there: this run has {jax.device_count()} "
            "devices of a CPU, and programs over them compute something else or hang when they are read back.",
            stacklevel=3,
        )


def _make_private(folder: Path) -> str | None:
    """Makes the folder; why it cannot be used, or None. Whoever may write there may run code as this user."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        refusal = _not_private(folder)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if refusal is not None:
        return refusal
    for entry in list(folder.iterdir()):
        with contextlib.suppress(OSError):
            _remove_if_empty(entry)
    return None


def _not_private(folder: Path) -> str | None:
    """Why a folder that is there cannot be used, or None.

    Raises:
      OSError: If it cannot be looked at.
    """
    found = folder.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return "belongs to another user"
    if found.st_mode & 0o022:
        return "may be written by others (its mode is to be 700)"
    if not os.access(folder, os.W_OK):
        return "cannot be written"
    return None


def _remove_if_empty(entry: Path) -> None:
    """Removes what a process left that died between making a file and filling it."""
    found = entry.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_size == 0 and entry.name != _LOCK:
        entry.unlink()


def machine_name() -> str:
    """Key of the machine that a compiled program fits: versions of JAX, and the kind of processor."""
    features = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return f"jax-{version('jax')}-{version('jaxlib')}-{platform.machine()}-{features}"


def _processor() -> str:
    """The processor's instruction sets where Linux tells them, else its name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return line
    except OSError:
        pass
    return platform.processor()
