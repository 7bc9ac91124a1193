# SPDX-License-Identifier: Apache-2.0
"""Runs a Pallas kernel in the form in which it is lowered for NVIDIA GPUs: its Triton module, in NumPy.

Pallas' own interpreter runs what was traced. Pointers, masks, the grid and what aliases what exist in the module alone.
An access outside an array fails. Programs run one after another, so a race is not seen unless it changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.triton import dialect

_DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i64": np.int64, "i32": np.int32, "i1": np.bool_}
_ENDS = ("scf.yield", "tt.return", "tt.reduce.return")
_CASTS = ("arith.extf", "arith.truncf", "arith.extui", "arith.sitofp")
_ORDERS = (np.less, np.less_equal, np.greater, np.greater_equal)
_COMPARED = (np.equal, np.not_equal, *_ORDERS, *_ORDERS)  # signed, then unsigned
_LARGER = 2  # of floats, and neither is NaN
_REDUCED = {"arith.addf": np.sum, "arith.maxnumf": np.max}
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("arith.addi", "arith.addf"), np.add),
    **dict.fromkeys(("arith.subi", "arith.subf"), np.subtract),
    **dict.fromkeys(("arith.muli", "arith.mulf"), np.multiply),
    "arith.divf": np.divide,
    "arith.minsi": np.minimum,
    "arith.maxnumf": np.fmax,
    "arith.andi": np.bitwise_and,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.divsi": lambda x, y: np.trunc(x / y).astype(np.int32),
    "arith.remsi": np.fmod,
    "arith.select": np.where,
    "tt.dot": lambda x, y, sums: x.astype(np.float32) @ y.astype(np.float32) + sums,
}


class Kernel(NamedTuple):
    """A kernel as XLA is given it.

    Attributes:
      module: The Triton module, as MLIR's bytecode.
      grid: Its programs along three axes.
    """

    module: bytes
    grid: tuple[int, int, int]

    def run(self, arrays: Sequence[np.ndarray], *, seed: int) -> None:
        """Runs all programs in some order on arguments and results, which it writes."""
        programs = list(np.ndindex(*self.grid))
        np.random.default_rng(seed).shuffle(programs)
        with ir.Context() as context:
            dialect.register_dialect(context)
            module = ir.Module.parse(self.module, context)
            (function,) = module.body.operations
            for program in programs:
                _Program(arrays, tuple(program)).start(function)


class _Pointers(NamedTuple):
    """Pointers into one of the arrays."""

    array: int
    offsets: Any

    def map(self, change: Any) -> _Pointers:
        return self._replace(offsets=change(self.offsets))


def kernels_of(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The kernels of a program that was lowered for "cuda"."""
    module: Any = lowered.compiler_ir()
    calls = [op for op in _operations(module.operation) if op.name == "stablehlo.custom_call"]
    configs = [
        ir.DictAttr(call.attributes["mhlo.backend_config"])
        for call in calls
        if "triton" in str(call.attributes["call_target_name"])
    ]
    return [
        Kernel(
            ir.StringAttr(config["ir"]).value_bytes,
            tuple(ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz"),
        )
        for config in configs
    ]


def _operations(operation: Any) -> Iterator[Any]:
    for block in (block for region in operation.regions for block in region.blocks):
        for inner in block.operations:
            yield inner.operation
            yield from _operations(inner.operation)


class _Program:
    """One program of the grid: the values it has computed so far, by their names in the module."""

    def __init__(self, arrays: Sequence[np.ndarray], index: tuple[int, ...]) -> None:
        self.arrays, self.index, self.values = [array.reshape(-1) for array in arrays], index, {}

    def start(self, function: Any) -> None:
        (block,) = function.regions[0].blocks
        for number, argument in enumerate(block.arguments):
            self.values[argument] = _Pointers(number, np.int64(0))
        self._run(block)

    def _run(self, block: Any) -> list[Any]:
        """What the block gives back."""
        for one in block.operations:
            given = [self.values[operand] for operand in one.operation.operands]
            if one.operation.name in _ENDS:
                return given
            made = self._compute(one.operation, given)
            self.values.update(zip(one.operation.results, made, strict=True))
        raise AssertionError("a block without an end")

    def _compute(self, op: Any, given: list[Any]) -> list[Any]:
        if op.name == "tt.store":
            self._store(*given)
            return []
        if op.name == "scf.for":
            return self._loop(op.regions[0].blocks[0], *given)
        result = op.results[0].type
        if op.name == "tt.load":
            return [self._load(*given)]
        if op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            return [_reshaped(op, given[0])]
        if op.name in _CASTS:
            return [np.asarray(given[0]).astype(_dtype(result))]
        if op.name in _PLAIN:
            return [_PLAIN[op.name](*given)]
        return [self._other(op, given)]

    def _other(self, op: Any, given: list[Any]) -> Any:
        attributes = op.attributes
        match op.name:
            case "arith.constant":
                return _dtype(op.results[0].type)(attributes["value"].value)
            case "arith.cmpi":
                return _COMPARED[attributes["predicate"].value](*given)
            case "arith.cmpf" if attributes["predicate"].value == _LARGER:
                return np.greater(*given)
            case "tt.get_program_id":
                return np.int32(self.index[attributes["axis"].value])
            case "tt.make_range":
                return np.arange(attributes["start"].value, attributes["end"].value, dtype=np.int32)
            case "tt.addptr":
                return given[0].map(lambda offsets: offsets + np.asarray(given[1], np.int64))
            case "tt.trans":
                return np.transpose(given[0], list(ir.DenseI32ArrayAttr(attributes["order"])))
            case "tt.reduce":
                first, *_ = op.regions[0].blocks[0].operations
                reduce = _REDUCED[first.operation.name]
                return reduce(given[0], axis=attributes["axis"].value).astype(given[0].dtype)
            case "tt.extern_elementwise" if attributes["symbol"].value == "__nv_expf":
                return np.exp(given[0])
        raise NotImplementedError(f"{op.name} of a Triton module")

    def _loop(self, block: Any, start: Any, stop: Any, step: Any, *carry: Any) -> list[Any]:
        found = list(carry)
        for index in range(int(start), int(stop), int(step)):
            self.values.update(zip(block.arguments, [np.int32(index), *found], strict=True))
            found = self._run(block)
        return found

    def _load(self, pointers: _Pointers, mask: Any = True, other: Any = 0) -> Any:
        array, offsets = self.arrays[pointers.array], pointers.offsets
        self._check(pointers, mask)
        return np.where(mask, array[np.where(mask, offsets, 0)], other).astype(array.dtype)

    def _store(self, pointers: _Pointers, values: Any, mask: Any = True) -> None:
        self._check(pointers, mask)
        mask = np.broadcast_to(mask, pointers.offsets.shape)
        self.arrays[pointers.array][pointers.offsets[mask]] = values[mask]

    def _check(self, pointers: _Pointers, mask: Any) -> None:
        inside = (pointers.offsets >= 0) & (pointers.offsets < self.arrays[pointers.array].size)
        assert np.all(inside | ~np.asarray(mask)), f"array {pointers.array} has no such elements"


def _dtype(result: Any) -> Any:
    return _DTYPES[str(result).removesuffix(">").removeprefix("tensor<").split("x")[-1]]


def _reshaped(op: Any, value: Any) -> Any:
    if isinstance(value, _Pointers):
        return value.map(lambda offsets: _reshaped(op, offsets))
    if op.name == "tt.expand_dims":
        return np.expand_dims(value, op.attributes["axis"].value)
    return np.broadcast_to(value, ir.RankedTensorType(op.results[0].type).shape)
