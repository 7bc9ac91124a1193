# SPDX-License-Identifier: Apache-2.0
"""Reads programs before XLA has them: their equations, and what their loops take and leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a program and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


class Loop(NamedTuple):
    """Shapes and dtypes around a `scan`.

    Attributes:
      held: What it is given once for all rounds.
      stacked: What it is given a part of in each round, whole.
      left: What each round leaves a part of, whole.
    """

    held: list[Any]
    stacked: list[Any]
    left: list[Any]


def read_loop(scan: Any) -> Loop:
    """What an equation of `scan` takes and leaves.

    JAX's versions keep the number of each kind in other forms. In all of them the body sees one axis less of what is
    stacked, and inputs lie in one order: what is held, what is carried from round to round, what is stacked.
    """
    body = scan.params["jaxpr"]
    given, made = [one.aval for one in scan.invars], [one.aval for one in scan.outvars]
    stacked = [whole for whole, part in zip(given, body.in_avals, strict=True) if whole.ndim > part.ndim]
    left = [whole for whole, part in zip(made, body.out_avals, strict=True) if whole.ndim > part.ndim]
    num_carried = len(made) - len(left)
    return Loop(given[: len(given) - len(stacked) - num_carried], stacked, left)
