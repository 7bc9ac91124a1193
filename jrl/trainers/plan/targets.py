# SPDX-License-Identifier: Apache-2.0
"""Absent devices: what they hold and compute by their data sheets, and JAX's devices to compile for.

A compiler needs no device, only its library: `pip install 'jrl-post[plan-tpu]'` or `'jrl-post[plan-gpu]'`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from types import MappingProxyType
from typing import Any

from jax.experimental import topologies
from packaging.requirements import Requirement

from jrl.device_memory import GPU_MOST
from jrl.mesh import AbsentDevice


class MissingCompilerError(RuntimeError):
    """No compiler for a target is installed, or one that does not fit the installed JAX."""


@dataclass(frozen=True)
class Target:
    """Devices that a program is compiled for.

    Attributes:
      name: "tpu:v5e:2x4", "gpu:h100x8".
      platform: "tpu" or "gpu".
      num_devices: Of all hosts.
      devices_per_host: Of one host.
      memory_bytes: What one device has; of a TPU, what a program may use of it.
      matrix_flops: Peak FLOP/s of matrix products on one device, without sparsity, by the data type of the operands;
        those that the data sheet names.
      memory_rate: Bytes that one device reads or writes in a second.
      link_rate: Bytes that one device sends in a second to others of its slice or host, over all links together.
      device: Their kind, for a plan that no compiler is asked for.
    """

    name: str
    platform: str
    num_devices: int
    devices_per_host: int
    memory_bytes: int
    matrix_flops: Mapping[str, float]
    memory_rate: float
    link_rate: float | None
    device: AbsentDevice
    _description: Mapping[str, Any] = field(repr=False)

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that programs have if they get as much as they can."""
        return int(GPU_MOST * self.memory_bytes) if self.platform == "gpu" else self.memory_bytes

    def devices(self) -> Sequence[Any]:
        """JAX's devices of the target, to make a mesh and to compile for; nothing can be run on them.

        Raises:
          MissingCompilerError: If the compiler's library is missing, or of another version than JAX's.
        """
        if self.platform == "tpu":
            _require("libtpu", "tpu", "plan-tpu")
            with _environment(_TPU_ENVIRONMENT):
                return topologies.get_topology_desc(platform="tpu", **self._description).devices
        _require("jax-cuda12-plugin", "cuda12", "plan-gpu")
        with _environment(_GPU_ENVIRONMENT):
            try:
                return topologies.get_topology_desc(platform="cuda", **self._description).devices
            except NotImplementedError as error:
                raise MissingCompilerError(
                    f"JAX has no compiler for {self.name} in this process, though its library is installed: it looked "
                    "for GPUs before and gave the library up. Set JAX_PLATFORMS=cpu and start again."
                ) from error


def parse_target(text: str) -> Target:
    """The target of a name: a TPU with its slice, `tpu:v5e:2x4`, or a GPU with its number, `gpu:h100x8`.

    More than eight GPUs lie on hosts of eight.

    Raises:
      ValueError: If there is no such chip, or its slice or number is impossible.
    """
    platform, _, rest = text.lower().partition(":")
    if platform == "tpu":
        chip, _, slice_name = rest.partition(":")
        return _tpu(text, _known(text, chip, _TPUS), slice_name)
    if platform == "gpu":
        # By the names that are known: one has an x of its own, rtx4090.
        match = re.fullmatch(rf"({'|'.join(_GPUS)})(?:x(\d+))?", rest)
        chip, count = (match[1], int(match[2] or 1)) if match else (rest, 1)
        return _gpu(text, _known(text, chip, _GPUS), count)
    raise ValueError(
        f"a target must begin with tpu: or gpu:, got {text!r}. Known are tpu:CHIP:SLICE with CHIP of {list(_TPUS)}, as "
        f"tpu:v5e:2x4, and gpu:CHIPxNUMBER with CHIP of {list(_GPUS)}, as gpu:h100x8."
    )


@dataclass(frozen=True)
class _Chip:
    """A chip: figures of `Target`, its name in the compiler, and how it is described there.

    Attributes:
      kind: Of a TPU, its name in JAX; a GPU's is that in the compiler.
      largest: Of a TPU, the sizes of its largest slice.
      host: Of a TPU, the sizes of what one host has.
      description: Of a GPU, what differs between chips in XLA's GpuTargetConfig.
    """

    memory_bytes: int
    matrix_flops: Mapping[str, float]
    memory_rate: float
    link_rate: float
    library_name: str
    kind: str = ""
    largest: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    description: Mapping[str, str | int] = field(default_factory=dict)


def _tensor_cores(
    *, half: float, single: float, int8: float, float8: float | None = None
) -> dict[str, float]:
    """`Target.matrix_flops` of TFLOP/s as a data sheet prints them; a chip without float8 has no rate for it."""
    rates = {"bfloat16": half, "float16": half, "float32": single, "int8": int8}
    rates |= {} if float8 is None else {"float8": float8}
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


GIB = 1 << 30

# cloud.google.com/tpu/docs/v5e, /v5p, /v6e: "Peak compute per chip", "HBM bandwidth per chip", "Bidirectional
# inter-chip interconnect (ICI) bandwidth (per chip)", half of which goes out. Their "HBM capacity" is 16, 95 and 32 GB;
# the memory here is what libtpu 0.0.42 lets a program have ("exceeds available HBM (15.75G)").
_TPUS = {
    "v5e": _Chip(
        memory_bytes=int(15.75 * GIB),
        matrix_flops={"bfloat16": 197e12, "int8": 393e12},
        memory_rate=819e9,
        link_rate=400e9 / 2,
        library_name="v5e",
        kind="TPU v5 lite",
        largest=(16, 16),
        host=(2, 2),
    ),
    "v5p": _Chip(
        memory_bytes=int(95.74 * GIB),
        matrix_flops={"bfloat16": 459e12, "int8": 918e12},
        memory_rate=2765e9,
        link_rate=1200e9 / 2,
        library_name="v5p",
        kind="TPU v5",
        largest=(16, 16, 24),
        host=(2, 2, 1),
    ),
    "v6e": _Chip(
        memory_bytes=int(31.25 * GIB),
        matrix_flops={"bfloat16": 918e12, "int8": 1836e12},
        memory_rate=1638e9,
        link_rate=800e9 / 2,
        library_name="v6e",
        kind="TPU v6 lite",
        largest=(16, 16),
        host=(2, 2),
    ),
}

# NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, L4, L40S and HGX B200, and its Ada white paper of the RTX
# 4090 (sums in float32): dense rates (those printed with sparsity, halved), float32 as TF32, which XLA takes for it
# unless told otherwise; rates of NVLink and PCIe count both directions. The total memory and what describes the cores
# are what `cudaGetDeviceProperties` reports of them (CUDA programming guide, "Technical specifications per compute
# capability"; B200: xla/backends/gpu/target_config/specs/b200.txtpb). Memory of L4, L40S and RTX 4090 is rounded down.
_HOPPER: dict[str, str | int] = {
    "core_count": 132,
    "fpus_per_core": 128,
    "l2_cache_size": 50 << 20,
    "clock_rate_ghz": "1.98",
    "shared_memory_per_core": 228 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "cuda_compute_capability": "{ major: 9 feature_extension: ACCELERATED_FEATURES }",
}
_HOPPER_FLOPS = _tensor_cores(half=989, single=494, int8=1979, float8=1979)
_ADA: dict[str, str | int] = {
    "fpus_per_core": 128,
    "shared_memory_per_core": 100 << 10,
    "shared_memory_per_block_optin": 99 << 10,
    "threads_per_core_limit": 1536,
    "cuda_compute_capability": "{ major: 8 minor: 9 }",
}
_GPUS = {
    "l4": _Chip(
        memory_bytes=int(22.0 * GIB),
        matrix_flops=_tensor_cores(half=121, single=60, int8=242, float8=242),
        memory_rate=300e9,
        link_rate=64e9 / 2,
        library_name="NVIDIA L4",
        description={**_ADA, "core_count": 58, "l2_cache_size": 48 << 20, "clock_rate_ghz": "2.04"},
    ),
    "l40s": _Chip(
        memory_bytes=int(44.3 * GIB),
        matrix_flops=_tensor_cores(half=362, single=183, int8=733, float8=733),
        memory_rate=864e9,
        link_rate=64e9 / 2,
        library_name="NVIDIA L40S",
        description={**_ADA, "core_count": 142, "l2_cache_size": 96 << 20, "clock_rate_ghz": "2.52"},
    ),
    "rtx4090": _Chip(
        memory_bytes=int(23.6 * GIB),
        matrix_flops=_tensor_cores(half=165, single=82.6, int8=661, float8=330),
        memory_rate=1008e9,
        link_rate=64e9 / 2,
        library_name="NVIDIA GeForce RTX 4090",
        description={**_ADA, "core_count": 128, "l2_cache_size": 72 << 20, "clock_rate_ghz": "2.52"},
    ),
    "a100": _Chip(
        memory_bytes=85_100_068_864,
        matrix_flops=_tensor_cores(half=312, single=156, int8=624),
        memory_rate=2039e9,
        link_rate=600e9 / 2,
        library_name="NVIDIA A100-SXM4-80GB",
        description={
            "core_count": 108,
            "fpus_per_core": 64,
            "l2_cache_size": 40 << 20,
            "clock_rate_ghz": "1.41",
            "shared_memory_per_core": 164 << 10,
            "shared_memory_per_block_optin": 163 << 10,
            "cuda_compute_capability": "{ major: 8 }",
        },
    ),
    "h100": _Chip(
        memory_bytes=84_942_979_072,
        matrix_flops=_HOPPER_FLOPS,
        memory_rate=3350e9,
        link_rate=900e9 / 2,
        library_name="NVIDIA H100 80GB HBM3",
        description=_HOPPER,
    ),
    "h200": _Chip(
        memory_bytes=151_397_597_184,
        matrix_flops=_HOPPER_FLOPS,
        memory_rate=4800e9,
        link_rate=900e9 / 2,
        library_name="NVIDIA H200",
        description=_HOPPER,
    ),
    "b200": _Chip(
        memory_bytes=191_514_411_008,
        matrix_flops=_tensor_cores(half=2250, single=1125, int8=4500, float8=4500),
        memory_rate=7672e9,
        link_rate=1800e9 / 2,
        library_name="NVIDIA B200",
        description={
            **_HOPPER,
            "core_count": 148,
            "l2_cache_size": 132_644_864,
            "clock_rate_ghz": "1.965",
            "cuda_compute_capability": "{ major: 10 feature_extension: ACCELERATED_FEATURES }",
        },
    ),
}
_GPUS_PER_HOST = 8


def _tpu(name: str, chip: _Chip, slice_name: str) -> Target:
    sizes = (
        tuple(int(size) for size in slice_name.split("x")) if re.fullmatch(r"\d+(x\d+)*", slice_name) else ()
    )
    host = tuple(min(size, most) for size, most in zip(sizes, chip.host, strict=False))
    fits = len(sizes) == len(chip.largest) and all(
        0 < size <= most and size % own == 0
        for size, most, own in zip(sizes, chip.largest, host, strict=True)
    )
    if not fits:
        example = "x".join(str(2 * size) for size in chip.host)
        raise ValueError(
            f"`{name}` must name a slice of {len(chip.largest)} sizes, as {name.split(':')[1]}:{example}, each a "
            f"multiple of a host's {'x'.join(map(str, chip.host))} and at most {'x'.join(map(str, chip.largest))}; got "
            f"{slice_name!r}."
        )
    bounds = (*host, 1)[:3]
    return Target(
        name=name,
        platform="tpu",
        num_devices=math.prod(sizes),
        devices_per_host=math.prod(host),
        memory_bytes=chip.memory_bytes,
        matrix_flops=MappingProxyType(dict(chip.matrix_flops)),
        memory_rate=chip.memory_rate,
        link_rate=chip.link_rate,
        device=AbsentDevice(chip.kind, None, "tpu", ""),
        _description={"topology_name": f"{chip.library_name}:{slice_name}", "chips_per_host_bounds": bounds},
    )


def _gpu(name: str, chip: _Chip, count: int) -> Target:
    hosts = -(-count // _GPUS_PER_HOST)
    if count < 1 or (hosts > 1 and count % _GPUS_PER_HOST):
        raise ValueError(
            f"`{name}` must have up to {_GPUS_PER_HOST} GPUs, or a multiple of it: {_GPUS_PER_HOST} on each host; got "
            f"{count}."
        )
    capability = re.findall(r"(?:major|minor): (\d+)", str(chip.description["cuda_compute_capability"]))
    return Target(
        name=name,
        platform="gpu",
        num_devices=count,
        devices_per_host=count // hosts,
        memory_bytes=chip.memory_bytes,
        matrix_flops=MappingProxyType(dict(chip.matrix_flops)),
        memory_rate=chip.memory_rate,
        link_rate=chip.link_rate,
        device=AbsentDevice(chip.library_name, None, "gpu", ".".join([*capability, "0"][:2])),
        _description={"target_config": _gpu_config(chip), "topology": f"1x{hosts}x{count // hosts}"},
    )


def _known(text: str, chip: str, chips: Mapping[str, _Chip]) -> _Chip:
    if chip not in chips:
        raise ValueError(f"`{text}` must name one of the chips {list(chips)}, got {chip!r}.")
    return chips[chip]


def _gpu_config(chip: _Chip) -> str:
    """XLA's GpuTargetConfig (xla/stream_executor/device_description.proto) as text."""
    device: dict[str, str | int] = {
        # The same for all compute capabilities here but where a chip says otherwise.
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 << 10,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "device_memory_size": chip.memory_bytes,
        "memory_bandwidth": int(chip.memory_rate),
        **chip.description,
    }
    # Of a nested message the braces stand without a colon before them.
    lines = (
        f"{key} {value}" if str(value).startswith("{") else f"{key}: {value}" for key, value in device.items()
    )
    major, minor = _cudnn_version()
    return (
        f"gpu_device_info {{ {' '.join(lines)} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: {major} minor: {minor} }} '
        f'device_description_str: "{chip.library_name}"'
    )


def _cudnn_version() -> tuple[str, str]:
    """Of the installed wheel, by which XLA chooses its kernels; without one, the oldest that jax 0.10 runs with."""
    try:
        major, minor, *_ = version("nvidia-cudnn-cu12").split(".")
    except PackageNotFoundError:
        return "9", "8"
    return major, minor


# libtpu looks for the metadata server of a TPU host and for its other hosts, and lets one process of a machine load it,
# since a TPU serves one: a compiler needs none of that.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # of the host that it believes to be; any will do
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Where JAX is told to use GPUs, it asks for all of CUDA's libraries as soon as it looks for them; a compiler has fewer.
_GPU_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": "-1"}


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that a library reads while it is loaded, and puts back what was there."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _require(distribution: str, jax_extra: str, extra: str) -> None:
    """Refuses a compiler's library that is missing, or that `jax[jax_extra]` of the installed JAX would not install."""
    install = f"pip install 'jrl-post[{extra}]'"
    (wanted,) = (
        requirement
        for requirement in map(Requirement, requires("jax") or [])
        if requirement.name == distribution
        and requirement.marker is not None
        and requirement.marker.evaluate({"extra": jax_extra})
    )
    try:
        found = version(distribution)
    except PackageNotFoundError as error:
        raise MissingCompilerError(
            f"the compiler for this target is {distribution}{wanted.specifier}, which is not installed: {install}. No "
            "such device need be here."
        ) from error
    if not wanted.specifier.contains(found, prereleases=True):
        raise MissingCompilerError(
            f"{distribution} must be {wanted.specifier} for jax {version('jax')}, got {found}: {install} brings what "
            "fits."
        )
