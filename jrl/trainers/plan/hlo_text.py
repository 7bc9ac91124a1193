# SPDX-License-Identifier: Apache-2.0
"""Optimized HLO text as data: computations, their instructions, what calls what, and how often a loop goes round.

The text is what `compiled.as_text()` gives on every platform (https://openxla.org/xla/operation_semantics names the
operations); JAX has no public reader of it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_CLOSED = re.compile(r"\}(, execution_thread=\"[^\"]*\")?$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?[=:]\s*\{"?n"?[=:]\s*"?(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_IN_PLACE = re.compile(r"output_to_operand_aliasing=\{(.*?)\)\}")


class Array(NamedTuple):
    """An array as HLO writes it: `bf16[8,128]` is ("bf16", (8, 128))."""

    dtype: str
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Size in bytes; of types below eight bits, rounded up."""
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)
        return -(-math.prod(self.shape) * int(bits[0]) // 8) if bits else 0

    @property
    def is_float(self) -> bool:
        """It holds real floating-point numbers of whatever width."""
        return re.match(r"b?f\d", self.dtype) is not None


@dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      name: Unique in its module.
      opcode: Such as "fusion".
      result: Its type, as text.
      literal: What stands between its parentheses.
      attributes: What stands behind them.
    """

    name: str
    opcode: str
    result: str
    literal: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it is given."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        named = re.findall(r"%([\w.\-]+)", self.literal)
        return tuple(named or re.findall(r"[\w.\-]+", self.literal))

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """Computations that it names, by the attribute's name; lists of branches under "branches"."""
        found: dict[str, list[str]] = {}
        for match in _CALLED.finditer(self.attributes):
            found.setdefault(match[0].split("=")[0], []).append(match[1])
        for match in _CALLED_LISTS.finditer(self.attributes):
            found.setdefault("branches", []).extend(re.findall(r"[\w.\-]+", match[1]))
        return found

    @property
    def op_name(self) -> str:
        """Path of the traced operation, such as `jit(update)/while/body/dot_general`; empty where none is written."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """Name of the kernel that a custom call calls; empty for any other instruction."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def in_place(self) -> dict[int | None, int]:
        """Operands that a custom call writes its result into, by elements of the result; by None where it has none."""
        match = _IN_PLACE.search(self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), ", match[1]) if match else ()
        return {int(element) if element else None: int(operand) for element, operand in pairs}


@dataclass(frozen=True)
class Computation:
    """Instructions by name; `root` names the one whose result is the computation's."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters in the order of their numbers."""
        found = [it for it in self.instructions.values() if it.opcode == "parameter"]
        return tuple(it.name for it in sorted(found, key=lambda it: int(it.literal)))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that are given an instruction, by its name."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for it in self.instructions.values():
            for name in dict.fromkeys(it.operands):
                found[name].append(it)
        return found


@dataclass(frozen=True)
class Module:
    """All computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation


@functools.lru_cache(maxsize=4)
def read_module(text: str) -> Module:
    """Reads optimized HLO; of the last texts, from memory.

    Raises:
      ValueError: If there is no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", list[str]()
    for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
        if not name:
            if opened := _COMPUTATION.match(line):
                name, lines = opened[2], []
                entry = name if opened[1] else entry
        elif _CLOSED.match(line):
            computations[name] = _computation(name, lines)
            name = ""
        elif _INSTRUCTION.match(line):
            lines.append(line)
        else:
            # Attributes of a kernel's own may go on over lines.
            lines[-1] += line
    if not entry:
        raise ValueError(
            "`text` must be optimized HLO with an ENTRY computation, as `compiled.as_text()` gives it; got "
            f"{len(text)} characters that begin with {text[:60]!r}."
        )
    return Module(computations, computations[entry])


def _computation(name: str, lines: list[str]) -> Computation:
    instructions, root = {}, ""
    for line in lines:
        head = _INSTRUCTION.match(line)
        assert head is not None, "it was matched before"
        instructions[head[2]] = _instruction(head[2], line[head.end() :])
        root = head[2] if head[1] else root
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
    """From `bf16[8]{0} add(%a, %b), metadata=...`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    return Instruction(name, rest[:opened], result, rest[opened + 1 : closed - 1], rest[closed:])


def _closing(text: str, start: int) -> int:
    """Index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"parentheses do not close in {text[start : start + 80]!r}")


def elements_of(result: str) -> list[str]:
    """Types of a tuple's elements; of anything else, itself."""
    if not result.startswith("("):
        return [result]
    found, depth, begin = [], 0, 1
    for match in re.finditer(r"[(){}\[\],]", result):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        if match[0] == "," and depth == 1:
            found.append(result[begin : match.start()].strip())
            begin = match.end()
    last = result[begin:-1].strip()
    return [*found, last] if last else found


def arrays_of(result: str) -> list[Array]:
    """Every array of a type, those of nested tuples too."""
    return [
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(result)
    ]


def array_of(result: str) -> Array:
    """The first array of a type."""
    return arrays_of(result)[0]


# Where an instruction stands, and how often it runs.


@dataclass(frozen=True)
class Frame:
    """A computation, and the instruction that calls it from another frame."""

    module: Module
    computation: Computation
    caller: Frame | None = None
    call: Instruction | None = None

    def enter(self, call: Instruction, name: str) -> Frame:
        """The computation `name`, which an instruction of this one calls."""
        return Frame(self.module, self.module.computations[name], self, call)


class Trips(NamedTuple):
    """Rounds of a loop.

    Attributes:
      exact: Their number, where the program says it.
      most: As many at most, where it says so: a loop to a condition has a limit beside it.
    """

    exact: int | None
    most: int | None


class Site(NamedTuple):
    """An instruction where it runs: the loops around it, outermost first, and whether a fusion holds it."""

    instruction: Instruction
    frame: Frame
    trips: tuple[Trips, ...]
    is_fused: bool

    @property
    def place(self) -> tuple[int | None, ...]:
        """Trip counts of the loops around it."""
        return tuple(trips.exact for trips in self.trips)


def sites(module: Module) -> Iterator[Site]:
    """Every instruction that runs, with where it stands; functions of a reduction or a sort are left out."""
    yield from _sites_within(Frame(module, module.entry), (), False)


def _sites_within(frame: Frame, around: tuple[Trips, ...], is_fused: bool) -> Iterator[Site]:
    for it in frame.computation.instructions.values():
        yield Site(it, frame, around, is_fused)
        if it.opcode == "while":
            inner = (*around, trips_of(frame, it))
            for name in (*it.called["condition"], *it.called["body"]):
                yield from _sites_within(frame.enter(it, name), inner, is_fused)
        elif it.opcode in ("fusion", "call", "conditional", "async-start", "custom-call"):
            for name in (name for names in it.called.values() for name in names):
                yield from _sites_within(frame.enter(it, name), around, is_fused or it.opcode == "fusion")


_SAME = (
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "convert",
    "reshape",
    "optimization-barrier",
)
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trips_of(frame: Frame, loop: Instruction) -> Trips:
    """Rounds of a loop: as it says itself, or as it counts up or down to a constant."""
    if known := _TRIPS.search(loop.attributes):
        return Trips(int(known[1]), int(known[1]))
    condition = frame.enter(loop, loop.called["condition"][0])
    made = _made(condition, condition.computation.root)
    limits = list(_limits(frame, loop, *made))
    most = min((trips.most for trips in limits if trips.most is not None), default=None)
    return Trips(None if made[1].opcode == "and" or not limits else limits[0].exact, most)


def _limits(frame: Frame, loop: Instruction, within: Frame, it: Instruction) -> Iterator[Trips]:
    """Rounds that each part of a condition lets be."""
    if it.opcode == "and":
        for part in it.operands:
            yield from _limits(frame, loop, *_made(within, part))
    elif it.opcode == "compare":
        yield _counted(frame, loop, *_comparison(within, it))


def _counted(
    frame: Frame, loop: Instruction, counter: _Value | None, direction: str, limit: _Value | None
) -> Trips:
    """Rounds until what a loop counts reaches a limit."""
    unknown = Trips(None, None)
    if counter is None or counter.loop != loop.name or limit is None or limit.loop:
        return unknown
    body = frame.enter(loop, loop.called["body"][0])
    start = _number(_element(frame, loop.operands[0], counter.element))
    after = _number(_element(body, body.computation.root, counter.element))
    if start is None or start.loop or not start.is_exact or after is None or after[:2] != counter[:2]:
        return unknown
    distance, step = limit.offset - counter.offset - start.offset, after.offset
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if step <= 0 or (direction == "NE" and distance % step) or not after.is_exact:
        return unknown
    rounds = max(0, -(-distance // step))
    if limit.is_exact:
        return Trips(rounds, rounds)
    return Trips(None, rounds if direction in ("LT", "LE") else None)


def _comparison(frame: Frame, it: Instruction) -> tuple[_Value | None, str, _Value | None]:
    """(what is counted, direction, limit) of a comparison, the carried number to the left."""
    match = re.search(r"direction=(\w+)", it.attributes)
    direction = match[1] if match else ""
    left, right = (_number(_made(frame, name)) for name in it.operands)
    if direction not in _FLIPPED:
        return None, direction, None
    if right is not None and right.loop:
        return right, _FLIPPED[direction], left
    return left, direction, right


class _Value(NamedTuple):
    """A whole number: `offset`, or what loop `loop` carries as `element` when a round begins, plus `offset`.

    Where it is not exact, the number is as large at most.
    """

    loop: str
    element: int
    offset: int
    is_exact: bool = True


def _number(made: tuple[Frame, Instruction] | None) -> _Value | None:
    """A scalar as a constant, or as what a loop carries."""
    if made is None:
        return None
    frame, it = made
    if it.opcode == "constant":
        return _Value("", 0, int(it.literal)) if re.fullmatch(r"-?\d+", it.literal) else None
    if it.opcode == "get-tuple-element":
        given, carried = _made(frame, it.operands[0])
        if carried.opcode == "parameter" and given.call and given.call.opcode == "while":
            return _Value(given.call.name, index_of(it), 0)
        return None
    if it.opcode not in ("add", "subtract", "minimum", "clamp"):
        return None
    parts = [_number(_made(frame, operand)) for operand in it.operands]
    if it.opcode in ("minimum", "clamp"):
        limits = parts if it.opcode == "minimum" else parts[2:]
        known = [part.offset for part in limits if part is not None and not part.loop]
        return _Value("", 0, min(known), is_exact=False) if known else None
    left, right = parts
    if left is None or right is None or (left.loop and right.loop):
        return None
    if it.opcode == "add":
        moved, by = (left, right) if left.loop else (right, left)
        return moved._replace(offset=moved.offset + by.offset, is_exact=left.is_exact and right.is_exact)
    if right.loop or not right.is_exact:
        return None
    return left._replace(offset=left.offset - right.offset)


def _made(frame: Frame, name: str) -> tuple[Frame, Instruction]:
    """Where a value comes from, behind copies, fusions, calls, tuples and loops that pass it on unchanged."""
    it = frame.computation.instructions[name]
    if it.opcode in _SAME:
        return _made(frame, it.operands[0])
    if it.opcode in ("fusion", "call"):
        inner = frame.enter(it, next(iter(it.called.values()))[0])
        return _made(inner, inner.computation.root)
    if it.opcode == "parameter" and frame.caller and frame.call and frame.call.opcode in ("fusion", "call"):
        return _made(frame.caller, frame.call.operands[int(it.literal)])
    if it.opcode == "get-tuple-element":
        return _element(frame, it.operands[0], index_of(it)) or (frame, it)
    return frame, it


def _element(frame: Frame, name: str, index: int) -> tuple[Frame, Instruction] | None:
    """Where an element of a tuple comes from, if that is to be seen."""
    given, it = _made(frame, name)
    if it.opcode == "tuple":
        return _made(given, it.operands[index])
    if it.opcode == "parameter" and given.caller and given.call and given.call.opcode == "while":
        body = given.module.computations[given.call.called["body"][0]]
        if _passes(body, index):
            return _element(given.caller, given.call.operands[0], index)
    return None


def _passes(body: Computation, index: int) -> bool:
    """A loop's body gives element `index` on as it came."""
    it = body.instructions[body.root]
    if it.opcode != "tuple":
        return False
    it = body.instructions[it.operands[index]]
    while it.opcode in _SAME:
        it = body.instructions[it.operands[0]]
    return it.opcode == "get-tuple-element" and it.operands[0] in body.parameters and index_of(it) == index


def index_of(it: Instruction) -> int:
    """Number of the element that a `get-tuple-element` takes."""
    match = re.search(r"index=(\d+)", it.attributes)
    assert match is not None, it
    return int(match[1])
