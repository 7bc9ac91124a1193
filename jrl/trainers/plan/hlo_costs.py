# SPDX-License-Identifier: Apache-2.0
"""Bytes that instructions read and operations that they compute, read from optimized HLO."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from jrl.trainers.plan.hlo_text import (
    Array,
    Computation,
    Frame,
    Instruction,
    Module,
    array_of,
    arrays_of,
    elements_of,
    index_of,
    trips_of,
)

_DECODING = "attend_spans"
# Pallas kernels of attention, and how many products of (queries, keys) by a head's width each makes. The last is jrl's,
# the others are JAX's. Those of `flash_attention`'s forward pass are in its own `cost_estimate`.
_PALLAS_PRODUCTS = {
    r"flash_mha_bwd_dq": 3,
    r"flash_mha_bwd_dkv": 4,
    r"splash_m[hq]a_fwd": 2,
    r"splash_m[hq]a_dq": 3,
    r"splash_m[hq]a_dkv": 4,
    _DECODING: 2,
}
_PALLAS_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton")
# Results of splash's dkv kernel where it makes dq as well, with one product more.
_FUSED_RESULTS = 5

# What a round of a loop reads.


SLICES = ("dynamic-slice", "slice", "gather")
_ALIASES = ("bitcast", "get-tuple-element", "optimization-barrier")
WRITTEN_IN_PLACE = ("dynamic-update-slice", "scatter")


class _Reads(NamedTuple):
    """Bytes that a computation reads of a value, and where it gives the value on: its root, or elements of it."""

    num_bytes: int
    outputs: frozenset[int]

    def __add__(self, other: tuple[object, ...]) -> _Reads:
        assert isinstance(other, _Reads)
        return _Reads(self.num_bytes + other.num_bytes, self.outputs | other.outputs)


_NOTHING = _Reads(0, frozenset())
_ROOT = -1


def element_reads(module: Module, computation: Computation, name: str, index: int | None) -> _Reads:
    """Bytes read of element `index` of the tuple `name` and where it is given on; None: of the value `name` itself."""
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
    if it.opcode in _ALIASES or (it.opcode in WRITTEN_IN_PLACE and position == 0):
        return _reads(module, computation, it.name)
    if it.opcode in SLICES and position == 0:
        return _Reads(array_of(it.result).num_bytes, frozenset())
    if it.opcode.removesuffix("-start") in SLICES and position == 0:
        sliced = arrays_of(elements_of(it.result)[1])
        return _Reads(sum(array.num_bytes for array in sliced), frozenset())
    if it.opcode == "tuple":
        if it.name == computation.root:
            return _Reads(0, frozenset({position}))
        return element_reads(module, computation, it.name, position)
    if it.opcode in ("fusion", "call", "conditional", "while"):
        found = _called_reads(module, computation, it, position, None)
        # A fusion reads an element once, however many of its parts want it.
        return found._replace(num_bytes=min(whole, found.num_bytes)) if it.opcode == "fusion" else found
    after = (index for index, operand in it.in_place.items() if operand == position)
    return sum(
        (element_reads(module, computation, it.name, index) for index in after), _Reads(whole, frozenset())
    )


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
        found = element_reads(module, inner, parameter, index)
        total += _Reads(found.num_bytes * rounds, frozenset())
        for output in found.outputs:
            if output == _ROOT:
                total += _reads(module, computation, it.name)
            else:
                total += element_reads(module, computation, it.name, output)
    return total


# Operations of products.


def flops_of(computation: Computation, it: Instruction) -> float:
    """Operations of one instruction, without those of computations that it calls; 0 for all but products."""
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
    if it.target in _PALLAS_TARGETS:
        return _pallas_flops(computation, it)
    return 0.0


def appends(it: Instruction) -> bool:
    """True for a kernel that writes one column of each row into the cache that it is given."""
    return it.target in _PALLAS_TARGETS and _DECODING in it.op_name and bool(it.in_place)


def _pallas_flops(computation: Computation, it: Instruction) -> float:
    """Operations of a known kernel of attention, blocks that it skips too; its first floats are queries and keys."""
    products = next((count for name, count in _PALLAS_PRODUCTS.items() if re.search(name, it.op_name)), 0)
    if not products:
        return 0.0
    if "_dkv" in it.op_name and len(arrays_of(it.result)) == _FUSED_RESULTS:
        products += 1
    given = (array_of(computation.instructions[name].result) for name in it.operands)
    queries, keys = [array.shape for array in given if array.is_float][:2]
    if appends(it):  # the newest keys and values lie behind the queries
        queries = arrays_of(it.result)[0].shape
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
