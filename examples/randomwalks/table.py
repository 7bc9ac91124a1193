# SPDX-License-Identifier: Apache-2.0
"""Runs PPO, ILQL and RFT on the random walks and sets what they reach beside trlX's figures, in README.md.

    python examples/randomwalks/table.py --seed 0 1 2 3 4
    python examples/randomwalks/table.py --seed 0 1 2 3 4 --only ilql      # one algorithm; the others keep theirs
    python examples/randomwalks/table.py --only rft --train.total_steps 400    # flags of the recipe go to every run
    python examples/randomwalks/table.py --no-runs                         # only writes the table anew

Each seed runs in a process of its own, as `<algorithm>_randomwalks.py --seed ...`; the summaries are kept as
`results/<algorithm>.json`, with the machine they were measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from curves import Curve, spread, value_at

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
BEGIN, END = "<!-- table.py writes from here -->", "<!-- to here -->"
MARGIN = 0.03  # what the mean may lie below trlX's


@dataclass(frozen=True)
class Reference:
    """What trlX reaches on the same graph, data and model size, each evaluation sampling the 20 starts once.

    Attributes:
      label: Names the algorithm and its decoding in the table.
      version: Of trlX.
      num_seeds: Training seeds behind the figures.
      optimality: Mean over seeds by optimizer step.
      seconds: Of one run, on one CPU thread.
    """

    label: str
    version: str
    num_seeds: int
    optimality: Mapping[int, float]
    seconds: float


TRLX = {
    "ppo": Reference("PPO", "v0.7.0", 5, {0: 0.36, 20: 0.83, 60: 0.92, 100: 0.92, 160: 0.93}, 35),
    "ilql": Reference(
        "ILQL, β = 100", "v0.7.0", 5, {48: 0.35, 80: 0.79, 112: 0.92, 160: 0.99, 200: 0.98}, 50
    ),
    # From step 300 on 0.95 to 1.00 is all that is known; the middle stands for it. Seconds are of 1000 steps.
    "rft": Reference("RFT", "newest", 2, {0: 0.295, 100: 0.82, 200: 0.875, 300: 0.975, 400: 0.975}, 270),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for and writes the table."""
    top = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other --a.b flag overrides a field of every recipe that is run.",
        allow_abbrev=False,
    )
    top.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="training seeds")
    top.add_argument("--only", nargs="+", choices=sorted(TRLX), default=list(TRLX), help="algorithms to run")
    top.add_argument("--no-runs", action="store_true", help="write the table from the results there are")
    top.add_argument("--output-dir", default=time.strftime("runs/randomwalks/%Y%m%d-%H%M%S"))
    flags, overrides = top.parse_known_args(argv)
    if not flags.no_runs:
        for algorithm in flags.only:
            run(algorithm, flags.seed, Path(flags.output_dir) / algorithm, overrides)
    results = stored()
    text = README.read_text(encoding="utf-8")
    README.write_text(with_table(text, tables(results)), encoding="utf-8")
    print(tables(results))
    for line in shortfalls(results):
        print(f"below trlX: {line}")
    return 0


def run(algorithm: str, seeds: Sequence[int], folder: Path, overrides: Sequence[str]) -> None:
    """One algorithm, each seed in a process of its own; the summaries become `results/<algorithm>.json`.

    Overrides are those of the recipe, such as `--train.total_steps 400`. A seed whose summary is in its folder is not
    run again: what was interrupted goes on with the same `--output-dir`.
    """
    runs = []
    for seed in seeds:
        path = folder / str(seed) / "summary.json"
        if not path.exists():
            script = FOLDER / f"{algorithm}_randomwalks.py"
            command = [sys.executable, str(script), "--seed", str(seed), "--output-dir", str(path.parent)]
            command += overrides
            subprocess.run(command, check=True)
        if not path.exists():
            raise SystemExit(f"{algorithm}, seed {seed}: stopped before its end")
        runs.append(json.loads(path.read_text(encoding="utf-8")))
    RESULTS.mkdir(exist_ok=True)
    kept = json.dumps({"hardware": hardware(), "runs": runs}, indent=1, ensure_ascii=False)
    (RESULTS / f"{algorithm}.json").write_text(kept + "\n", encoding="utf-8")


def stored() -> dict[str, dict[str, Any]]:
    """`results/<algorithm>.json` by algorithm, of those that have been run."""
    paths = {name: RESULTS / f"{name}.json" for name in TRLX}
    return {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()
    }


def hardware() -> str:
    """What a run is measured on, such as "2 CPU cores (x86_64)"; processes inherit its cores."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU core{'s' if cores > 1 else ''} ({platform.machine()})"


def curves_of(result: Mapping[str, Any]) -> list[Curve]:
    """Optimality by step, one curve a seed."""
    found = [curve for run in result["runs"] for curve in run["optimality"].values()]
    return [{int(step): value for step, value in curve.items()} for curve in found]


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The two tables of README.md, in Markdown.

    Args:
      results: `results/<algorithm>.json` by algorithm.
    """
    lines = [
        "| algorithm | step | trlX, mean | jrl's step | jrl, mean and range | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        reference, curves = TRLX[name], curves_of(result)
        for step, expected in reference.optimality.items():
            found = [value_at(curve, step) for curve in curves]
            reached = spread([value for _, value in found])
            cells = (reference.label, step, f"{expected:.2f}", found[0][0], reached, len(curves))
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| seconds of a run | trlX, one CPU thread | jrl without compiling | evaluation in it | compiling | jrl on |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        seconds, compiling, evaluating = (
            float(np.mean([run[key] for run in result["runs"]]))
            for key in ("seconds", "compile_seconds", "evaluation_seconds")
        )
        running = seconds - compiling
        cells = (TRLX[name].label, f"{TRLX[name].seconds:.0f}", f"{running:.0f}", f"{evaluating:.0f}")
        lines.append("| " + " | ".join((*cells, f"{compiling:.0f}", str(result["hardware"]))) + " |")
    return "\n".join(lines)


def shortfalls(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the mean over seeds lies more than `MARGIN` below trlX's at its last two steps, in words."""
    found = []
    for name, result in results.items():
        reference = TRLX[name]
        for step in sorted(reference.optimality)[-2:]:
            reached = float(np.mean([value_at(curve, step)[1] for curve in curves_of(result)]))
            if reached < reference.optimality[step] - MARGIN:
                found.append(
                    f"{reference.label} at {step}: {reached:.3f}, trlX {reference.optimality[step]:.3f}"
                )
    return found


def with_table(text: str, table: str) -> str:
    """`text` with what stands between the two marks replaced."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold the lines {BEGIN!r} and {END!r} around its table.")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


if __name__ == "__main__":
    raise SystemExit(main())
