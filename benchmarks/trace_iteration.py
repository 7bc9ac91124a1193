# SPDX-License-Identifier: Apache-2.0
"""Where the time of one whole PPO iteration goes: a trace of it, by program and by kind of operation.

    python benchmarks/trace_iteration.py [--model gpt2-124m] [--num-layers-unfrozen -1]

Prints a table: seconds of the wall clock that each compiled program's operations took (time in which several ran is
divided between them), how much of that were matrix products, and what was left in which no operation ran: the host.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from pathlib import Path

import jax

from jrl.bench.models import PRESETS, Options, find_subject
from jrl.bench.ppo_iteration import ppo_iteration

PRODUCTS = ("dot", "ynn", "matmul", "gemm")
"""Parts of the names that XLA gives operations with a matrix product inside."""
CONTROL = ("while", "conditional", "call")
"""Operations that only contain others."""

Span = tuple[int, int, str, bool]
"""(start, end, program, whether it is a matrix product) of one operation, in nanoseconds."""


def main() -> None:
    """Warms up, traces one iteration, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2-124m", choices=sorted(PRESETS))
    parser.add_argument("--num-layers-unfrozen", type=int, default=-1, help="last layers trained; -1: all")
    flags = parser.parse_args()
    subject = find_subject(flags.model, Options(num_layers_unfrozen=flags.num_layers_unfrozen))
    work = ppo_iteration(subject, PRESETS[flags.model].shapes)
    for _ in range(2):
        jax.block_until_ready(work.call())
    began = time.perf_counter()
    jax.block_until_ready(work.call())
    untraced = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with jax.profiler.trace(folder):
            jax.block_until_ready(work.call())
        traced = time.perf_counter() - began
        spans = read_spans(Path(folder))
    print(f"one iteration: {untraced:.2f} s, {traced:.2f} s with the trace")
    busy = 0.0
    shares = exclusive(spans)
    programs = sorted({program for program, _ in shares}, key=lambda name: -total(shares, name))
    for program in programs:
        seconds = total(shares, program)
        busy += seconds
        if seconds >= 0.01:
            products = shares[program, True] / 1e9
            print(
                f"{program:40s}{seconds:8.2f} s{100 * seconds / traced:6.1f} %   products {products:7.2f} s"
            )
    print(f"{'no operation':40s}{traced - busy:8.2f} s{100 * (traced - busy) / traced:6.1f} %")


def read_spans(folder: Path) -> list[Span]:
    """All operations of a trace, in the order in which they began."""
    data = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    found: list[Span] = []
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = str(stats.get("hlo_op", ""))
                if name and not name.startswith(CONTROL):
                    start, product = int(event.start_ns), any(part in name for part in PRODUCTS)
                    end = start + int(event.duration_ns)
                    found.append((start, end, str(stats.get("hlo_module", "?")), product))
    return sorted(found)


def exclusive(spans: list[Span]) -> collections.Counter[tuple[str, bool]]:
    """Wall time of each (program, product or not); where operations overlap, the time is divided between them."""
    points = sorted(
        [(start, 1, index) for index, (start, *_) in enumerate(spans)]
        + [(end, 0, index) for index, (_, end, *_) in enumerate(spans)]
    )
    shares: collections.Counter[tuple[str, bool]] = collections.Counter()
    running: set[int] = set()
    last = 0
    for now, begins, index in points:
        for other in running:
            shares[spans[other][2:]] += round((now - last) / len(running))
        last = now
        if begins:
            running.add(index)
        else:
            running.discard(index)
    return shares


def total(shares: collections.Counter[tuple[str, bool]], program: str) -> float:
    """Seconds of a program."""
    return (shares[program, True] + shares[program, False]) / 1e9


if __name__ == "__main__":
    main()
