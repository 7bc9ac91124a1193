# SPDX-License-Identifier: Apache-2.0
"""Measurements: the machine's own rates, medians of repeated calls, peak memory, versions.

A floor is only worth something beside a rate of the same machine in the same minute, so both rates are measured in the
run that reports them.
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIN_ROUNDS = 5
"""Calls that a median needs."""
_PROBE_SECONDS = 0.3
_PACKAGES = ("jax", "jaxlib", "flax", "optax")
# (rows, inner, columns). Of a CPU the shapes of a small transformer, where its libraries do best.
_CPU_PRODUCTS = ((512, 768, 3072), (2048, 2048, 2048))
_ACCELERATOR_PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 16384))
# FLOP/s of dense bfloat16 products by the makers' data sheets, by the device's whole name: the PCIe and NVL cards of a
# kind have other rates than these.
_PEAKS = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


@dataclass(frozen=True)
class Machine:
    """Measured rates of the first device.

    Attributes:
      matrix_rate: FLOP/s of the best of two matrix products, a multiplication and an addition counted each.
      bandwidth: Bytes/s of the best of a copy (reads and writes counted) and a product of matrix and vector (reads).
      peak_rate: FLOP/s by the data sheet, of bfloat16; None for a device or dtype that is not in the table.
    """

    matrix_rate: float
    bandwidth: float
    peak_rate: float | None


@dataclass(frozen=True)
class Timing:
    """Repeated calls of one function.

    Attributes:
      seconds: Of every call after the first.
      first: Of the first call, which traces and compiles.
    """

    seconds: tuple[float, ...]
    first: float

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def compile_seconds(self) -> float:
        """Time that the first call took longer than the median one: tracing, lowering and compiling."""
        return max(self.first - self.median, 0.0)


def time_calls(call: Callable[[], Any], *, rounds: int = MIN_ROUNDS, warmup: int = 1) -> Timing:
    """Times a function whose result is waited for.

    Args:
      call: Returns arrays, or None where it has waited for the device itself.
      rounds: Calls that count.
      warmup: Calls before them, at least 1: the first one compiles.
    Raises:
      ValueError: If there are no rounds or no warm-up.
    """
    if rounds < 1 or warmup < 1:
        raise ValueError(f"`rounds` and `warmup` must be at least 1, got {rounds} and {warmup}.")

    def seconds() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin

    before = [seconds() for _ in range(warmup)]
    return Timing(tuple(seconds() for _ in range(rounds)), before[0])


@functools.cache
def measure_machine(dtype: str = "float32") -> Machine:
    """The first device's rates in this dtype; measured once a process.

    Args:
      dtype: "float32" or "bfloat16", of the factors; products are accumulated as XLA chooses.
    """
    kind = jnp.dtype(dtype)
    on_cpu = jax.default_backend() == "cpu"
    products = _CPU_PRODUCTS if on_cpu else _ACCELERATOR_PRODUCTS
    return Machine(
        matrix_rate=max(_product_rate(shape, kind) for shape in products),
        bandwidth=_bandwidth(2**28 if on_cpu else 2**31),
        peak_rate=None if on_cpu else _peak_rate(kind),
    )


def peak_bytes() -> int:
    """Most memory that was in use so far: of the first device where it counts that, else of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hardware() -> str:
    """The first device, and how much of this host a benchmark may use."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device.device_kind} ({device.platform}), {_processor()}, {cores} cores"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the figures depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def _product_rate(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> float:
    rows, inner, columns = shape
    left, right = (
        jax.random.normal(key, size).astype(dtype)
        for key, size in zip(
            jax.random.split(jax.random.key(0)), ((rows, inner), (inner, columns)), strict=True
        )
    )
    return 2.0 * rows * inner * columns / _seconds(jax.jit(jnp.matmul), left, right)


def _bandwidth(num_bytes: int) -> float:
    rows = num_bytes // 4 // 1024
    matrix = jnp.ones((rows, 1024), jnp.float32)
    copied = 2 * num_bytes / _seconds(jax.jit(lambda x: x * 2), matrix)
    read = num_bytes / _seconds(jax.jit(jnp.matmul), matrix, jnp.ones((1024,), jnp.float32))
    return max(copied, read)


def _seconds(program: Callable[..., Any], *arrays: Any) -> float:
    """Median seconds of a call, over calls that follow each other without waiting between them."""
    first = time_calls(lambda: program(*arrays), rounds=1)
    calls = max(1, round(_PROBE_SECONDS / MIN_ROUNDS / max(first.median, 1e-6)))

    def burst() -> Any:
        found = None
        for _ in range(calls):
            found = program(*arrays)
        return found

    return time_calls(burst, rounds=MIN_ROUNDS).median / calls


def _peak_rate(dtype: np.dtype[Any]) -> float | None:
    if dtype != jnp.bfloat16:
        return None
    return _PEAKS.get(jax.devices()[0].device_kind)


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
