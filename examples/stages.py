# SPDX-License-Identifier: Apache-2.0
"""What examples of several stages share: flags, overrides of each stage's recipe, and what a run leaves behind."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

RECIPES = Path(__file__).resolve().parents[1] / "configs"
MAIN = ""
"""The stage of an override that names none."""


def add_flags(top: argparse.ArgumentParser, *, run: str) -> None:
    """The flags of every example: `--seed`, `--output-dir`, `--model`.

    Args:
      top: Receives them.
      run: Name of the example: run folders are `runs/<run>/<date>`.
    """
    top.epilog = (
        "Any other --a.b flag overrides a field of the recipe; with --sft. in front, of the SFT recipe."
    )
    top.add_argument("--seed", type=int, default=0, help="of data, weights, data order and samples")
    top.add_argument("--output-dir", default=time.strftime(f"runs/{run}/%Y%m%d-%H%M%S"), help="run folder")
    top.add_argument("--model", help="checkpoint to start from (directory or hub id); skips the SFT stage")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the main recipe, and those of the SFT recipe, whose `--sft.` is taken off."""
    found = split_by_stage(words, ["sft"])
    return found[MAIN], found["sft"]


def split_by_stage(words: Sequence[str], stages: Iterable[str]) -> dict[str, list[str]]:
    """Overrides by the stage whose name, as in `--sft.`, stands in front and is taken off; others are `MAIN`'s."""
    found: dict[str, list[str]] = {MAIN: [], **{stage: [] for stage in stages}}
    current = MAIN
    for word in words:
        if word.startswith("--"):
            name, dot, rest = word[2:].partition(".")
            current = name if dot and name in found else MAIN
            word = f"--{rest}" if current != MAIN else word
        found[current].append(word)
    return found


def stopped(console: Console, argv: Sequence[str], folder: Path, *resume: str | Path) -> int:
    """Says how to go on after Ctrl-C: the same flags, and `resume`; of a flag given twice, the last one counts."""
    words = [sys.executable, sys.argv[0], *argv, "--output-dir", folder, *resume]
    console.print("Stopped early; all is saved. To go on:\n")
    console.print(shlex.join(map(str, words)), style="bold", soft_wrap=True, highlight=False, markup=False)
    return 0


def report(
    console: Console,
    folder: Path,
    history: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Prints the figures of the first and the last evaluation and writes them to `summary.json`.

    Args:
      console: Where they are printed.
      folder: Where they are written.
      history: A trainer's records.
      names: Of the figures, as the evaluations' records have them.
      seconds: Wall-clock time of the whole run.
    Returns:
      What was written: `before`, `after` (both by name) and `seconds`.
    """
    evaluations = [record for record in history if "evaluation" in record]
    first, last = ({name: round(e[name], 4) for name in names} for e in (evaluations[0], evaluations[-1]))
    summary = {"before": first, "after": last, "seconds": round(seconds, 1)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    changes = [f"{name.rpartition('/')[2]} {first[name]:+.3f} -> {last[name]:+.3f}" for name in names]
    line = ", ".join([*changes, f"{seconds:.0f} s"])
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return summary
