# SPDX-License-Identifier: Apache-2.0
"""The collectives, loops and arguments of a compiled program, as far as they are floating-point arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from jax.sharding import Mesh

from jrl.trainers.plan import hlo
from jrl.trainers.plan.hlo import Collective
from jrl.trainers.plan.hlo_text import Array, Shape

__all__ = ["Collective", "Shape", "collectives", "entry_arguments", "loop_carries"]


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective that moves floating-point arrays of two or more elements, with those alone."""
    found = (dataclasses.replace(one, arrays=_floats(one.arrays)) for one in hlo.collectives(text, mesh))
    return [one for one in found if one.arrays]


def loop_carries(text: str) -> list[tuple[Shape, ...]]:
    """Of each loop, the arrays that it carries or reads."""
    return [tuple(array.shape for array in _floats(loop.carried)) for loop in hlo.loops(text)]


def entry_arguments(text: str) -> tuple[Shape, ...]:
    """Arrays that the program is given, as they lie on one device."""
    return tuple(array.shape for array in _floats(hlo.entry_arguments(text)))


def _floats(arrays: Iterable[Array]) -> tuple[Array, ...]:
    return tuple(array for array in arrays if array.is_float and math.prod(array.shape) > 1)
