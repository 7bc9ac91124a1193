# SPDX-License-Identifier: Apache-2.0
"""Reading a compiled program: its collectives, over which mesh axes they go, and what its loops carry."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

Shape = tuple[int, ...]

_COLLECTIVE = re.compile(
    r" = (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"(f32|f16|bf16)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=(\{\{.*?\}\})")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? *\{(.*?)\}"
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: Its name in HLO.
      shapes: Of its float results on one device, those of two or more elements.
      axes: Mesh axes over which its devices differ.
      computation: "ENTRY", or the name of a loop's body or the like.
    """

    kind: str
    shapes: tuple[Shape, ...]
    axes: frozenset[str]
    computation: str


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective of an optimized HLO module that moves floating-point arrays over groups of devices."""
    found, computation = [], ""
    for line in text.splitlines():
        opened = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if opened:
            computation = "ENTRY" if opened[1] else opened[2]
        match = _COLLECTIVE.search(line)
        shapes = arrays(match["result"]) if match else ()
        if match and shapes and "replica_groups=" in line:
            found.append(Collective(match["kind"], shapes, _axes(line, mesh), computation))
    return found


def arrays(text: str) -> tuple[Shape, ...]:
    """Shapes of the floating-point arrays of two or more elements that a text names."""
    shapes = (tuple(int(size) for size in sizes.split(",") if size) for _, sizes in _ARRAY.findall(text))
    return tuple(shape for shape in shapes if math.prod(shape) > 1)


def loop_carries(text: str) -> list[tuple[Shape, ...]]:
    """Of each loop, the arrays that it carries or reads."""
    lines = (line for line in text.splitlines() if " while(" in line)
    return [arrays(line.split(" while(")[0]) for line in lines]


def entry_arguments(text: str) -> tuple[Shape, ...]:
    """Arrays that the program is given, as they lie on one device."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    assert layout is not None
    return arrays(layout[1])


def _axes(line: str, mesh: Mesh) -> frozenset[str]:
    """Axes along which the devices of a group differ."""
    places = {device.id: place for place, device in np.ndenumerate(mesh.devices)}
    axes = set()
    for group in _groups(line):
        members = np.array([places[device] for device in group])
        axes |= {name for name, at in zip(mesh.axis_names, members.T, strict=True) if len(set(at)) > 1}
    return frozenset(axes)


def _groups(line: str) -> np.ndarray:
    """Device numbers, one row a group; HLO has three ways to write them."""
    if match := _LISTED.search(line):
        return np.array(
            [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
        )
    if match := _COUNTED.search(line):
        return _numbered(match[2], match[3]).reshape(_sizes(match[1]))
    match = _NAMED.search(line)
    assert match is not None, f"unknown replica groups: {line[:400]}"
    names, sizes = zip(*(part.split("=") for part in match[1].split(",")), strict=True)
    count = math.prod(map(int, sizes))
    devices = _numbered(match[2] or str(count), match[3]).reshape([int(size) for size in sizes])
    moved = [index for index, name in enumerate(names) if name in match[4]]
    kept = [index for index in range(len(names)) if index not in moved]
    width = math.prod(devices.shape[index] for index in moved)
    return devices.transpose(kept + moved).reshape(-1, width)


def _numbered(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, ... in this shape, then transposed."""
    numbers = np.arange(math.prod(_sizes(sizes))).reshape(_sizes(sizes))
    return numbers.transpose(_sizes(order)) if order else numbers


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]
