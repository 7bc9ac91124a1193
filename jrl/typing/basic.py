# SPDX-License-Identifier: Apache-2.0
"""Types common to all algorithms: keys, trees of parameters, metrics, updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Key

PRNGKey = Key[Array, ""]
Params = Mapping[str, Any]
"""Nested mapping of arrays, one entry a module, one a layer (`layers_0`, ...); never stacked over layers."""
Frozen = Params
"""Everything that does not train. Never donated: it may share buffers with the reference."""
TRUNCATION_MODES = ("keep_start", "keep_end")
"""Which end of a row that is too long is kept."""


class Mean(NamedTuple):
    """A metric as a sum and its weight, so that means over microbatches, devices and steps are exact."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Max(NamedTuple):
    """A metric that aggregates by its maximum."""

    value: Float[Array, ""]


class Min(NamedTuple):
    """A metric that aggregates by its minimum."""

    value: Float[Array, ""]


class Kept(NamedTuple):
    """Rows that are handed on as they are, one after another, for whoever asked for them; they are not logged."""

    rows: Float[Array, "*rows T"]


Metrics = dict[str, Mean | Max | Min | Kept]


class Update(Protocol):
    """A learner's update: pure; the caller jits it and donates the state.

    One of several optimizer steps may also take `last_step`, the state's counter after the run's last one, and
    `reference`, the parameters of a reference that its loss reads; it is fixed, so no part of the state.
    """

    def __call__(self, state: Any, frozen: Frozen, batch: Any, key: PRNGKey) -> tuple[Any, Metrics]:
        """Returns the new state and what to log of it."""
        ...
