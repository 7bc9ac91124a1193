# SPDX-License-Identifier: Apache-2.0
"""All benchmarks by name, and the record that one of them gives."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jrl.bench.counts import floor_seconds, total
from jrl.bench.decode import decode
from jrl.bench.dpo_step import dpo_step
from jrl.bench.measure import MIN_ROUNDS, hardware, measure_machine, peak_bytes, time_calls, versions
from jrl.bench.models import Shapes, Subject
from jrl.bench.ppo_iteration import ppo_iteration
from jrl.bench.score import score
from jrl.bench.sft_step import sft_step
from jrl.bench.update import update
from jrl.bench.work import Work

BENCHMARKS: dict[str, Callable[[Subject, Shapes], Work]] = {
    "decode": decode,
    "score": score,
    "update": update,
    "ppo_iteration": ppo_iteration,
    "dpo_step": dpo_step,
    "sft_step": sft_step,
}


def run_benchmark(name: str, subject: Subject, shapes: Shapes, *, rounds: int = MIN_ROUNDS) -> dict[str, Any]:
    """Measures one benchmark on the first device.

    Args:
      name: Of `BENCHMARKS`.
      subject: The model.
      shapes: Sizes of the run.
      rounds: Calls after the first.
    Returns:
      A record of plain numbers and texts; benchmarks/README.md describes every field.
    Raises:
      ValueError: If rows are longer than the model has positions.
    """
    if shapes.length > subject.lm.max_positions:
        raise ValueError(
            f"`shapes` asks for rows of {shapes.length} tokens, but {subject.name} has {subject.lm.max_positions} "
            "positions: shorten prompt or response."
        )
    with _no_compilation_cache(), jax.default_device(jax.devices()[0]):
        work = BENCHMARKS[name](subject, shapes)
        timing = time_calls(work.call, rounds=rounds)
    peak = peak_bytes()
    # The probes come last, so that their arrays are no part of the peak, and have the memory to themselves.
    work = replace(work, call=lambda: None)
    gc.collect()
    machine = measure_machine(subject.options.compute_dtype)
    needed, seconds = total(work.phases), timing.median
    floor = floor_seconds(work.phases, machine)
    return {
        "benchmark": name,
        "model": subject.name,
        "shapes": asdict(shapes),
        "options": asdict(subject.options),
        "seconds": round(seconds, 5),
        "rounds": rounds,
        "all_seconds": [round(value, 5) for value in timing.seconds],
        **{f"seconds_{part}": round(statistics.median(values[1:]), 5) for part, values in work.parts.items()},
        "tokens_per_second": round(work.tokens / seconds, 1),
        "samples_per_second": round(work.samples / seconds, 2),
        "flops": needed.flops,
        "bytes": needed.num_bytes,
        "matrix_rate": round(machine.matrix_rate),
        "bandwidth": round(machine.bandwidth),
        "floor_seconds": round(floor, 5),
        "floor_share": round(floor / seconds, 4),
        "mfu": round(needed.flops / seconds / (machine.peak_rate or machine.matrix_rate), 4),
        "mfu_of": "data sheet" if machine.peak_rate else "measured rate",
        "bandwidth_share": round(needed.num_bytes / seconds / machine.bandwidth, 4),
        "compile_seconds": round(timing.compile_seconds, 2),
        "peak_bytes": peak,
        "attention": subject.decoding if name == "decode" else subject.attention,
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Has JAX compile anew what is run inside, so that `compile_seconds` is that of compiling."""
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]

    def switch(enabled: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", enabled)
        # JAX asks once whether it has a cache, and remembers the answer.
        compilation_cache.reset_cache()

    switch(False)
    try:
        yield
    finally:
        switch(cached)
