# SPDX-License-Identifier: Apache-2.0
"""Facts about a compiled program, read from its optimized HLO text: the same functions for CPU, GPU and TPU.

Every size is of one device, as its array's shape says; padding of a TPU's tiles is not in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jrl.trainers.plan.hlo_text import (
    Array,
    Computation,
    Frame,
    Instruction,
    Module,
    Shape,
    Site,
    Trips,
    array_of,
    arrays_of,
    elements_of,
    index_of,
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
# Pallas kernels of attention that ship with JAX, and the products of (queries, keys) by a head's width that each makes.
# Those of `flash_attention`'s forward pass are in its own `cost_estimate`.
_PALLAS_PRODUCTS = {
    r"flash_mha_bwd_dq": 3,
    r"flash_mha_bwd_dkv": 4,
    r"splash_m[hq]a_fwd": 2,
    r"splash_m[hq]a_dq": 3,
    r"splash_m[hq]a_dkv": 4,
}


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
        reads = (_element_reads(frame.module, body, given, index) for index in range(len(elements)))
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
        made = _flops(site.frame.computation, site.instruction)
        if made:
            total += made * math.prod(_rounds(trips, rounds) for trips in site.trips)
    return total


def _rounds(trips: Trips, otherwise: int) -> int:
    if trips.exact is not None:
        return trips.exact
    return otherwise if trips.most is None else min(otherwise, trips.most)


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


# What a round of a loop reads.


_SLICES = ("dynamic-slice", "slice", "gather")
_ALIASES = ("bitcast", "get-tuple-element", "optimization-barrier")
_WRITTEN_IN_PLACE = ("dynamic-update-slice", "scatter")


class _Reads(NamedTuple):
    """Bytes that a computation reads of a value, and where it gives the value on: its root, or elements of it."""

    num_bytes: int
    outputs: frozenset[int]

    def __add__(self, other: tuple[object, ...]) -> _Reads:
        assert isinstance(other, _Reads)
        return _Reads(self.num_bytes + other.num_bytes, self.outputs | other.outputs)


_NOTHING = _Reads(0, frozenset())
_ROOT = -1


def _element_reads(module: Module, computation: Computation, name: str, index: int | None) -> _Reads:
    """Of element `index` of the tuple `name`; None: of the value `name` itself."""
    if index is None:
        return _reads(module, computation, name)
    total = _NOTHING
    for it in computation.users[name]:
        if it.opcode == "get-tuple-element" and index_of(it) == index:
            total += _reads(module, computation, it.name)
        elif it.opcode in ("while", "conditional", "call", "fusion"):
            total += _called_reads(module, computation, it, it.operands.index(name), index)
    return total


def _reads(module: Module, computation: Computation, name: str) -> _Reads:
    """Of a value: all its users together, and those of what is written into it where it lies."""
    whole = sum(array.num_bytes for array in arrays_of(computation.instructions[name].result))
    total = _Reads(0, frozenset({_ROOT})) if name == computation.root else _NOTHING
    for it in computation.users[name]:
        for position in (at for at, operand in enumerate(it.operands) if operand == name):
            total += _read_by(module, computation, it, position, whole)
    return total


def _read_by(module: Module, computation: Computation, it: Instruction, position: int, whole: int) -> _Reads:
    """Of what is operand `position` of an instruction."""
    if it.opcode in _ALIASES or (it.opcode in _WRITTEN_IN_PLACE and position == 0):
        return _reads(module, computation, it.name)
    if it.opcode in _SLICES and position == 0:
        return _Reads(array_of(it.result).num_bytes, frozenset())
    if it.opcode.removesuffix("-start") in _SLICES and position == 0:
        sliced = arrays_of(elements_of(it.result)[1])
        return _Reads(sum(array.num_bytes for array in sliced), frozenset())
    if it.opcode == "tuple":
        if it.name == computation.root:
            return _Reads(0, frozenset({position}))
        return _element_reads(module, computation, it.name, position)
    if it.opcode in ("fusion", "call", "conditional", "while"):
        found = _called_reads(module, computation, it, position, None)
        # A fusion reads an element once, however many of its parts want it.
        return found._replace(num_bytes=min(whole, found.num_bytes)) if it.opcode == "fusion" else found
    return _Reads(whole, frozenset())


def _called_reads(
    module: Module, computation: Computation, it: Instruction, position: int, index: int | None
) -> _Reads:
    """Of operand `position` of a call, or of its element `index`: what is called reads, and who is given it back."""
    names, rounds = [name for found in it.called.values() for name in found], 1
    if it.opcode == "conditional":
        names = [names[position - 1]] if position else []
    elif it.opcode == "while":
        names, rounds = it.called["body"], trips_of(Frame(module, computation), it).most or 1
    total = _NOTHING
    for name in names:
        inner = module.computations[name]
        parameter = inner.parameters[0 if it.opcode == "conditional" else position]
        found = _element_reads(module, inner, parameter, index)
        total += _Reads(found.num_bytes * rounds, frozenset())
        for output in found.outputs:
            if output == _ROOT:
                total += _reads(module, computation, it.name)
            else:
                total += _element_reads(module, computation, it.name, output)
    return total


# Operations of products.


def _flops(computation: Computation, it: Instruction) -> float:
    if it.opcode in ("dot", "ragged-dot"):
        return _dot_flops(computation, it, r"lhs_contracting_dims=\{([\d,]*)\}")
    if it.opcode == "convolution":
        given, kernel = (_operand(computation, it, at) for at in (0, 1))
        return _convolution_flops(it, given, kernel, array_of(it.result))
    if it.opcode == "custom-call":
        return _custom_flops(computation, it)
    return 0.0


def _operand(computation: Computation, it: Instruction, position: int) -> Array:
    return array_of(computation.instructions[it.operands[position]].result)


def _dot_flops(computation: Computation, it: Instruction, contracting: str) -> float:
    match = re.search(contracting, it.attributes)
    if match is None:
        raise ValueError(f"a product without contracted dimensions in HLO: {it}")
    contracted = [int(found) for found in re.findall(r"\d+", match[1])]
    left = _operand(computation, it, 0)
    return 2.0 * math.prod(array_of(it.result).shape) * math.prod(left.shape[index] for index in contracted)


def _custom_flops(computation: Computation, it: Instruction) -> float:
    target = it.target
    if target.startswith(("__cublas$", "__onednn$matmul")):
        return _dot_flops(computation, it, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
    if target.startswith("__cudnn$conv"):
        first, second = (_operand(computation, it, at) for at in (0, 1))
        result = array_of(it.result)
        if "BackwardInput" in target:
            return _convolution_flops(it, result, second, first)
        if "BackwardFilter" in target:
            return _convolution_flops(it, first, result, second)
        return _convolution_flops(it, first, second, result)
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(computation, it)
    if match := re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', it.attributes):
        return float(match[1])
    if it.target == "tpu_custom_call":
        return _pallas_flops(computation, it)
    return 0.0


def _pallas_flops(computation: Computation, it: Instruction) -> float:
    """Operations of a known kernel of attention, blocks that it skips too; its first floats are queries and keys."""
    products = next((count for name, count in _PALLAS_PRODUCTS.items() if re.search(name, it.op_name)), 0)
    if not products:
        return 0.0
    given = (array_of(computation.instructions[name].result) for name in it.operands)
    queries, keys = [array.shape for array in given if array.is_float][:2]
    return products * 2.0 * math.prod(queries) * keys[-2]


def _attention_flops(computation: Computation, it: Instruction) -> float:
    """Two products of (rows, heads, queries, keys) by a head's width; five in the backward pass."""
    scores = re.search(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', it.attributes)
    if scores is None:
        raise ValueError(f"an attention without its scores' shape in HLO: {it}")
    width = _operand(computation, it, 0).shape[-1]
    products = 5 if "Backward" in it.target else 2
    return products * 2.0 * width * math.prod(int(found) for found in re.findall(r"\d+", scores[1]))


def _convolution_flops(it: Instruction, given: Array, kernel: Array, result: Array) -> float:
    """Only taps that fall on an input count: a TPU's compiler writes a product over batches as a convolution whose
    dilation or padding lets each batch meet its own kernel alone.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", it.attributes)
    if labels is None:
        raise ValueError(f"a convolution without the names of its dimensions in HLO: {it}")
    features = kernel.shape[labels[2].index("i")] * result.shape[labels[3].index("f")]
    batch_groups = re.search(r"batch_group_count=(\d+)", it.attributes)
    rows = result.shape[labels[3].index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    window = _window(it, kernel, labels[2])
    taps = math.prod(
        _taps(
            given.shape[labels[1].index(name)],
            result.shape[labels[3].index(name)],
            window[int(name)],
        )
        for name in labels[2]
        if name.isdigit()
    )
    return 2.0 * features * rows * taps


class _Window(NamedTuple):
    size: int
    stride: int = 1
    low_padding: int = 0
    given_dilation: int = 1
    kernel_dilation: int = 1


def _window(it: Instruction, kernel: Array, labels: str) -> list[_Window]:
    """Of each spatial dimension; what the text leaves out has its default."""
    count = sum(name.isdigit() for name in labels)
    written = re.search(r"window=\{([^}]*)\}", it.attributes)
    fields = dict(part.split("=") for part in written[1].split()) if written else {}

    def numbers(name: str, default: int) -> list[int]:
        found = fields[name].split("x") if name in fields else [str(default)] * count
        return [int(one.split("_")[0]) for one in found]

    sizes = [kernel.shape[labels.index(str(index))] for index in range(count)]
    return [
        _Window(*found)
        for found in zip(
            sizes,
            numbers("stride", 1),
            numbers("pad", 0),
            numbers("lhs_dilate", 1),
            numbers("rhs_dilate", 1),
            strict=True,
        )
    ]


def _taps(given: int, result: int, window: _Window) -> int:
    """Pairs of an output and a tap of the kernel that meet an input, along one dimension."""
    outputs = np.arange(result)[:, None] * window.stride
    taps = np.arange(window.size)[None, :] * window.kernel_dilation
    at = outputs + taps - window.low_padding
    inside = (at >= 0) & (at <= (given - 1) * window.given_dilation) & (at % window.given_dilation == 0)
    return int(inside.sum())
