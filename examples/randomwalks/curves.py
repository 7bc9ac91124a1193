# SPDX-License-Identifier: Apache-2.0
"""What a random-walks run leaves behind: optimality over steps, beside trlX's, and the seconds it took.

Every script of this folder writes `summary.json`: `optimality` (by seed, then by optimizer step), `seconds` (wall-clock
time of the training runs of all seeds, evaluations included, without the pre-training of the language model),
`compile_seconds` (of those) and `evaluation_seconds` (of those).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

GRAPH_SEED = 1000
SAMPLES_PER_START = 50
Curve = dict[int, float]
"""Optimality by optimizer step."""

_COMPILING = "/jax/core/compile/"  # tracing, lowering, and the compiler itself


class Clock:
    """Wall-clock seconds while entered, and those of them that JAX spent on tracing, lowering and compiling.

    It may be entered several times; the seconds add up.

    Attributes:
      seconds: All of them.
      compile_seconds: Those of compilation; what is compiled inside of a compilation counts once.
    """

    def __init__(self) -> None:
        self.seconds = self.compile_seconds = 0.0
        self._compiling: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        """Starts."""
        self._began = time.perf_counter()
        self._compiling = []
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops, and adds."""
        jax.monitoring.unregister_event_duration_listener(self._heard)
        self.seconds += time.perf_counter() - self._began
        self.compile_seconds += total_length(self._compiling)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.startswith(_COMPILING):
            now = time.perf_counter()
            self._compiling.append((now - duration_secs, now))


def total_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end).

    Example:
      >>> total_length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
      4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def curve_of(history: Sequence[Mapping[str, Any]], *, metric: str = "metrics/optimality") -> Curve:
    """Optimality over steps from a trainer's records; a sweep's values are told by the metric's suffix."""
    return {record["step"]: record[metric] for record in history if metric in record}


def evaluation_seconds(history: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the evaluations that a trainer's records know of: all but the last."""
    return float(sum(record.get("time/evaluation", 0.0) for record in history))


def value_at(curve: Curve, step: int) -> tuple[int, float]:
    """The first evaluation at or after `step`, an update being atomic, or the last one there is: (its step, value)."""
    found = min((known for known in curve if known >= step), default=max(curve))
    return found, curve[found]


def spread(values: Sequence[float]) -> str:
    """Mean and range, such as "0.92 [0.87..0.98]"."""
    return f"{np.mean(values):.2f} [{min(values):.2f}..{max(values):.2f}]"


def report(
    console: Console,
    folder: Path,
    curves: Mapping[int, Curve],
    *,
    clock: Clock,
    trlx: Mapping[int, str],
    trlx_title: str,
    evaluating: float = 0.0,
    **figures: Any,
) -> None:
    """Prints optimality over steps beside trlX's and writes `summary.json`.

    Args:
      console: Where it is printed.
      folder: Where it is written.
      curves: By seed.
      clock: Of the training runs.
      trlx: What trlX reaches, by step.
      trlx_title: Heads its column.
      evaluating: Seconds of `clock` that went into evaluations.
      **figures: Further entries of `summary.json`.
    """
    table = Table(title="Random walks: mean optimality and its range over seeds")
    for column in ("step", f"jrl, {len(curves)} seed(s)", "step", trlx_title):
        table.add_column(column, justify="right")
    for trlx_step, reached in trlx.items():
        found = [value_at(curve, trlx_step) for curve in curves.values()]
        table.add_row(str(found[0][0]), spread([value for _, value in found]), str(trlx_step), reached)
    best = spread([max(curve.values()) for curve in curves.values()])
    table.add_row("best", best, "", "")
    console.print(table)
    summary = {
        "optimality": {str(seed): curve for seed, curve in curves.items()},
        "seconds": round(clock.seconds, 1),
        "compile_seconds": round(clock.compile_seconds, 1),
        "evaluation_seconds": round(evaluating, 1),
        **figures,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    first = spread([curve[min(curve)] for curve in curves.values()])
    last = spread([curve[max(curve)] for curve in curves.values()])
    console.print(
        f"optimality {first} -> {last}, best {best}, {clock.seconds:.0f} s of training "
        f"({clock.compile_seconds:.0f} s compiling)",
        soft_wrap=True,
        highlight=False,
    )
