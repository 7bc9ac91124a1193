# SPDX-License-Identifier: Apache-2.0
"""Facts about a compiled program, read from its optimized HLO text: the same functions for CPU, GPU and TPU.

Every size is of one device, as its array's shape says; padding of a TPU's tiles is not in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jrl.trainers.plan.hlo_costs import SLICES, WRITTEN_IN_PLACE, appends, element_reads, flops_of
from jrl.trainers.plan.hlo_text import (
    Array,
    Computation,
    Frame,
    Instruction,
    Shape,
    Site,
    Trips,
    arrays_of,
    elements_of,
    read_module,
    sites,
    trips_of,
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_FUSED_KERNEL = re.compile(r'"fusion_backend_config":\s*\{"kind":\s*"(__[^"]*)"')
_COUNTED_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? *\{(.*?)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


# Custom calls that compute nothing.
_MARKS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "ZeroCrop",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: Its name in HLO, without `-start`.
      arrays: What it gives to one device.
      axes: Mesh axes along which the devices of a group differ.
      group_size: Devices that take part in it together.
      place: Trip counts of the loops around it, outermost first; None where a count is not known. () is once.
      op_name: Path of the traced operation that it serves.
    """

    kind: str
    arrays: tuple[Array, ...]
    axes: frozenset[str]
    group_size: int
    place: tuple[int | None, ...]
    op_name: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of what it gives to one device."""
        return tuple(array.shape for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes of what it gives to one device."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends for it, on a ring of its group."""
        others = self.group_size - 1
        if self.kind == "all-reduce":
            return 2 * self.num_bytes * others // self.group_size
        if self.kind == "reduce-scatter":
            return self.num_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.num_bytes
        return self.num_bytes * others // self.group_size


@dataclass(frozen=True)
class Loop:
    """A `while` of a program.

    Attributes:
      name: Of the instruction.
      op_name: Path of the traced operation, such as `jit(generate)/while`.
      trips: Rounds, where the program says it.
      most_trips: Rounds at most, where it says so.
      place: Trip counts of the loops around it, outermost first.
      carried: What a round is given and gives on.
      reads: Of each of `carried`, the bytes that one round reads; a slice, where it reads a slice.
    """

    name: str
    op_name: str
    trips: int | None
    most_trips: int | None
    place: tuple[int | None, ...]
    carried: tuple[Array, ...]
    reads: tuple[int, ...]

    @property
    def round_bytes(self) -> int:
        """Bytes of what it carries that one round reads."""
        return sum(self.reads)


def collectives(text: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Every collective of a program, once for each place from which it is reached.

    A TPU's compiler spreads a collective over the fusions that are computed meanwhile, and each of them names it again:
    those of one channel are one collective. It writes a reduce-scatter as the fusion of an all-reduce with the slice of
    each device.

    Args:
      text: Optimized HLO.
      mesh: That of the program; its devices in their order are the numbers in the HLO.
    """
    found, started = [], set()
    for site in sites(read_module(text)):
        it = site.instruction
        kind = it.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        channel = re.search(r"channel_id=(\d+)", it.attributes)
        if site.is_fused and channel:
            key = (kind, channel[1], site.place)
            if key in started:
                continue
            started.add(key)
        groups = _groups(it.attributes, mesh.size)
        result = _started_result(it) if it.opcode.endswith("-start") else it.result
        if slices := _slices_of(site):
            kind, result = "reduce-scatter", slices
        found.append(
            Collective(
                kind=kind,
                arrays=tuple(arrays_of(result)),
                axes=_axes(groups, mesh),
                group_size=max(len(group) for group in groups) if groups else 1,
                place=site.place,
                op_name=it.op_name or (site.frame.call.op_name if site.frame.call else ""),
            )
        )
    return found


def kernels(text: str) -> dict[str, int]:
    """Targets of custom calls, and kinds of a GPU's generated kernels such as `__triton_gemm`, with their number.

    Marks that a TPU's compiler leaves for itself as custom calls are left out.
    """
    found: Counter[str] = Counter()
    for computation in read_module(text).computations.values():
        for it in computation.instructions.values():
            if it.target and it.target not in _MARKS:
                found[it.target] += 1
            if made := _FUSED_KERNEL.search(it.attributes):
                found[made[1]] += 1
    return dict(found)


def num_sorts(text: str) -> int:
    """Number of sorts in a program, those of a GPU's library too."""
    found = (it for one in read_module(text).computations.values() for it in one.instructions.values())
    return sum(it.opcode == "sort" or "DeviceRadixSort" in it.target for it in found)


def largest_arrays(text: str, count: int) -> list[tuple[str, Shape, int]]:
    """(dtype, shape, bytes) of the largest floating-point arrays that are held, each once, largest first.

    What lies inside a fusion is never held as a whole, and is left out.
    """
    found = {
        array
        for site in sites(read_module(text))
        if not site.is_fused
        for array in arrays_of(site.instruction.result)
        if array.is_float
    }
    ordered = sorted(found, key=lambda array: (-array.num_bytes, array))
    return [(array.dtype, array.shape, array.num_bytes) for array in ordered[:count]]


def entry_arguments(text: str) -> tuple[Array, ...]:
    """Arrays that a program is given."""
    entry = read_module(text).entry
    return tuple(array for name in entry.parameters for array in arrays_of(entry.instructions[name].result))


def loops(text: str) -> list[Loop]:
    """Every loop of a program, an outer one before those within it."""
    found = []
    for site in sites(read_module(text)):
        it, frame = site.instruction, site.frame
        if it.opcode != "while":
            continue
        body = frame.module.computations[it.called["body"][0]]
        elements = elements_of(it.result)
        (given,) = body.parameters
        reads = (element_reads(frame.module, body, given, index) for index in range(len(elements)))
        trips = trips_of(frame, it)
        found.append(
            Loop(
                name=it.name,
                op_name=it.op_name,
                trips=trips.exact,
                most_trips=trips.most,
                place=site.place,
                carried=tuple(array for element in elements for array in arrays_of(element)),
                reads=tuple(read.num_bytes for read in reads),
            )
        )
    return found


def num_flops(text: str, rounds: int) -> float:
    """Floating-point operations of matrix products and convolutions, two for a multiplication and its addition.

    Counted on one device, inside fusions, called computations and custom calls too. Both branches of a conditional
    count. A custom call that is no known product counts what it says of itself (Pallas: `cost_estimate`), else nothing.

    Args:
      text: Optimized HLO.
      rounds: Taken for the rounds of a loop that does not say its own, as far as it says how many at most: in
        sampling, the tokens.
    """
    total = 0.0
    for site in sites(read_module(text)):
        made = flops_of(site.frame.computation, site.instruction)
        if made:
            total += made * math.prod(_rounds(trips, rounds) for trips in site.trips)
    return total


def _rounds(trips: Trips, otherwise: int) -> int:
    if trips.exact is not None:
        return trips.exact
    return otherwise if trips.most is None else min(otherwise, trips.most)


# What kernels compute and move.


class Work(NamedTuple):
    """Operations and traffic of a kernel.

    Attributes:
      flops: Operations of its matrix products.
      num_bytes: That it reads and writes in the device's memory.
      rounds: How often it is called.
    """

    flops: float
    num_bytes: int
    rounds: int


_NO_WORK = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier"),
    *("partition-id", "replica-id"),
)
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")
_SCRATCH = ("__cublas$", "__cudnn$")


def work(text: str, rounds: int) -> list[Work]:
    """Operations and traffic of each kernel of a program: operands are read once, results written once.

    Of an operand of which a kernel takes slices, the slices count; of a result that is written into an operand, what is
    written. What a TPU's compiler has placed in on-chip memory does not count, and neither does what collectives do. Of
    a conditional's branches the one that moves least counts: in sampling, the one without top-k and top-p.

    Args:
      text: Optimized HLO.
      rounds: As of `num_flops`.
    """
    module = read_module(text)
    return list(_work_within(Frame(module, module.entry), 1, rounds))


def _work_within(frame: Frame, calls: int, otherwise: int) -> Iterator[Work]:
    for it in frame.computation.instructions.values():
        kind = it.opcode.removesuffix("-start")
        if it.opcode == "while":
            inside = calls * _rounds(trips_of(frame, it), otherwise)
            for name in (*it.called["condition"], *it.called["body"]):
                yield from _work_within(frame.enter(it, name), inside, otherwise)
        elif it.opcode == "conditional":
            names = (name for named in it.called.values() for name in named)
            branches = (list(_work_within(frame.enter(it, name), calls, otherwise)) for name in names)
            yield from min(branches, key=lambda found: sum(one.num_bytes * one.rounds for one in found))
        elif it.opcode in ("call", "async-start"):
            for name in (name for named in it.called.values() for name in named):
                yield from _work_within(frame.enter(it, name), calls, otherwise)
        elif not (
            it.opcode in _NO_WORK
            or it.opcode.endswith(("-done", "-update"))
            or kind in COLLECTIVES
            or it.target in _MARKS
        ):
            yield Work(_kernel_flops(frame, it), _read_bytes(frame, it) + _written_bytes(frame, it), calls)


def _kernel_flops(frame: Frame, it: Instruction) -> float:
    """Operations of an instruction and, of a fusion, of all inside it."""
    if it.opcode != "fusion":
        return flops_of(frame.computation, it)
    inner = frame.enter(it, it.called["calls"][0])
    return sum(_kernel_flops(inner, part) for part in inner.computation.instructions.values())


def _read_bytes(frame: Frame, it: Instruction) -> int:
    kind = it.opcode.removesuffix("-start")
    total = 0
    for name in dict.fromkeys(it.operands):
        position, given = it.operands.index(name), frame.computation.instructions[name].result
        whole = _off_chip_bytes(given)
        if it.opcode == "fusion":
            inner = frame.module.computations[it.called["calls"][0]]
            found = element_reads(frame.module, inner, inner.parameters[position], None).num_bytes
            total += min(whole, found)
        elif kind in WRITTEN_IN_PLACE and position == 0:
            continue
        elif kind in SLICES and position == 0:
            made = elements_of(it.result)
            total += min(whole, arrays_of(made[1] if it.opcode.endswith("-start") else made[0])[0].num_bytes)
        else:
            total += whole
    return total


def _written_bytes(frame: Frame, it: Instruction) -> int:
    elements = elements_of(it.result)
    if it.opcode == "copy-start":
        return _off_chip_bytes(elements[0])
    if it.opcode.endswith("-start"):
        return _off_chip_bytes(elements[1])
    if it.opcode in WRITTEN_IN_PLACE:
        return _off_chip_bytes(
            frame.computation.instructions[it.operands[-1 if it.opcode == "scatter" else 1]].result
        )
    if it.target.startswith(_SCRATCH):
        elements = [element for element in elements if not element.startswith(("s8[", "u8["))]
    if it.opcode != "fusion":
        # The column that is written is not read, but counts as read.
        kept = it.in_place if appends(it) else {}
        return sum(_off_chip_bytes(element) for index, element in enumerate(elements) if index not in kept)
    inner = frame.module.computations[it.called["calls"][0]]
    root = inner.instructions[inner.root]
    if root.opcode != "tuple" and len(elements) > 1:  # a reduction of several values
        return sum(_off_chip_bytes(element) for element in elements)
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return sum(
        min(_off_chip_bytes(element), _made_bytes(inner, name))
        for name, element in zip(names, elements, strict=True)
    )


def _made_bytes(computation: Computation, name: str) -> int:
    """Bytes that a part of a fusion writes as its result: all of it, or what goes into an array that is there."""
    it = computation.instructions[name]
    while it.opcode in ("bitcast", "convert", "copy"):
        it = computation.instructions[it.operands[0]]
    if it.opcode in WRITTEN_IN_PLACE:
        it = computation.instructions[it.operands[-1 if it.opcode == "scatter" else 1]]
    return sum(array.num_bytes for array in arrays_of(it.result))


def _off_chip_bytes(result: str) -> int:
    """Bytes of a type's arrays that lie in the device's memory."""
    elements = elements_of(result)
    if result.startswith("("):
        return sum(_off_chip_bytes(element) for element in elements)
    return 0 if _ON_CHIP.search(result) else sum(array.num_bytes for array in arrays_of(result))


# Collectives.


def _slices_of(site: Site) -> str:
    """Types of the slices that alone are taken of an all-reduce inside a fusion; empty for any other instruction."""
    if not site.is_fused or site.instruction.opcode != "all-reduce":
        return ""
    users = site.frame.computation.users[site.instruction.name]
    return " ".join(it.result for it in users) if all(it.opcode == "dynamic-slice" for it in users) else ""


def _started_result(it: Instruction) -> str:
    """Type of what an asynchronous start gives in the end: it stands behind the operands in the start's own."""
    elements = elements_of(it.result)
    if not it.result.startswith("(") or (it.opcode == "all-reduce-start" and not elements[0].startswith("(")):
        return it.result
    return elements[1]


def _axes(groups: list[list[int]], mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Axes along which the devices of a group differ; a device's number is its place in the mesh, not its id."""
    axes = set()
    for group in groups:
        places = np.unravel_index(group, tuple(mesh.shape.values()))
        axes |= {name for name, at in zip(mesh.axis_names, places, strict=True) if len(set(at.tolist())) > 1}
    return frozenset(axes)


def _groups(attributes: str, num_devices: int) -> list[list[int]]:
    """Numbers of the devices of each group; HLO has three ways to write them, and pairs for a permutation."""
    if match := _PAIRS.search(attributes):
        pairs = re.findall(r"\{(\d+),(\d+)\}", match[1])
        return [[int(source), int(target)] for source, target in pairs]
    if match := _COUNTED_GROUPS.search(attributes):
        return _numbered(match[2], match[3]).reshape(_sizes(match[1])).tolist()
    if match := _NAMED_GROUPS.search(attributes):
        return _named_groups(*match.groups())
    match = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}", attributes)
    if match is None:
        raise ValueError(f"unknown replica groups in HLO: {attributes[:300]}")
    listed = [_sizes(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    return listed or [list(range(num_devices))]


def _named_groups(mesh: str, shape: str | None, order: str | None, moved: str) -> list[list[int]]:
    """Groups along axes of a mesh in the text; `'x':(2)4` is the part of size 4 of axis x behind a part of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = {name: (pre, size) for name, pre, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", moved)}
    parts: list[int] = []
    kept: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        pre, width = wanted.get(name, ("", ""))
        if name not in wanted:
            split = [size]
        elif not width:
            split = [1, size, 1]
        else:
            split = [int(pre), int(width), size // int(pre) // int(width)]
        for position, part in enumerate(split):
            (grouped if name in wanted and position == 1 else kept).append(len(parts))
            parts.append(part)
    devices = _numbered(shape or str(math.prod(parts)), order).reshape(parts)
    width = math.prod(parts[index] for index in grouped)
    return devices.transpose(kept + grouped).reshape(-1, width).tolist()


def _numbered(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, ... in this shape, then transposed."""
    numbers = np.arange(math.prod(_sizes(sizes))).reshape(_sizes(sizes))
    return numbers.transpose(_sizes(order)) if order else numbers


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]
