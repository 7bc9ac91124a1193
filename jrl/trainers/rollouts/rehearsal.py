# SPDX-License-Identifier: Apache-2.0
"""One iteration outside of a run: nothing is logged, saved or counted, and the state is thrown away afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jrl.ops.metrics import finalize


class Rehearsal(NamedTuple):
    """Result of one iteration.

    Attributes:
      batch: Rows that the update read, on the device.
      rows: One dict a sampled completion: prompt, output, reward, tokens; empty where nothing is sampled.
      metrics: Of rollouts and update.
    """

    batch: Any
    rows: Sequence[Mapping[str, Any]]
    metrics: dict[str, float]


def rehearsed(
    batch: Any,
    metrics: Any,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    host: Mapping[str, float] | None = None,
) -> Rehearsal:
    """The result of an update, once it is done.

    Args:
      batch: As for `Rehearsal`.
      metrics: Of the update, still on the device.
      rows: As for `Rehearsal`.
      host: Figures known on the host; they go first.
    """
    return Rehearsal(batch, rows, finalize(jax.device_get(metrics)) | dict(host or {}))
