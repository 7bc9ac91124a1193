# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: answers before and after, the curve of pass@k on held-out problems, one line of figures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jrl

Samples = Mapping[int, Sequence[Mapping[str, Any]]]
"""Samples of each evaluation, by optimizer step: dicts with `prompt`, `output` and `reward`."""


def read_samples(run: Path) -> Samples:
    """The samples of all evaluations, as a trainer keeps them in its run folder."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with open(run / "rollouts" / "samples.jsonl", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            found[row["step"]].append(row)
    return found


def pass_at(samples: Sequence[Mapping[str, Any]], k: int) -> float:
    """pass@k over the problems of an evaluation, each of which was answered n ≥ k times."""
    right: dict[str, list[float]] = defaultdict(list)
    for row in samples:
        right[row["prompt"]].append(row["reward"])
    counts = jnp.array([int(sum(rewards)) for rewards in right.values()])
    num_samples = len(next(iter(right.values())))
    return float(np.mean(jrl.ops.pass_at_k(counts, num_samples=num_samples, k=k)))


def comparison_table(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Table:
    """The first held-out problems with an answer of each policy."""
    table = Table(title="Held-out problems, before and after GRPO", show_lines=True)
    table.add_column("problem", ratio=2, style="bold")
    for name in ("before", "after"):
        table.add_column(name, ratio=4)
        table.add_column("right", justify="center")
    for old, new in list(zip(before, after, strict=True))[:10]:
        cells = [old["prompt"]]
        for row in (old, new):
            cells += [row["output"].strip(), "yes" if row["reward"] else "no"]
        table.add_row(*cells)
    return table


def plot_curves(samples: Samples, history: Sequence[Mapping[str, Any]], path: Path, *, k: int) -> None:
    """Draws pass@1 and pass@k of held-out problems, and below the share of problems that a group still learns from.

    Args:
      samples: Of all evaluations.
      history: The trainer's records.
      path: PNG to write.
      k: Samples of each held-out problem.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rollouts = [record for record in history if "group/zero_std_fraction" in record]
    steps = [record["step"] for record in rollouts]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    top.plot(
        steps, [record["reward/mean"] for record in rollouts], color="tab:blue", alpha=0.4, label="rollouts"
    )
    for count, style in ((1, "o-"), (k, "s--")):
        values = [pass_at(rows, count) for rows in samples.values()]
        top.plot(list(samples), values, style, color="tab:orange", label=f"pass@{count}, held-out problems")
    top.set_ylabel("share of right answers")
    top.set_ylim(top=1.02)
    top.legend(frameon=False, loc="lower right")
    bottom.plot(
        steps, [1 - record["group/zero_std_fraction"] for record in rollouts], label="groups with contrast"
    )
    bottom.plot(steps, [record["grpo/entropy"] for record in rollouts], label="entropy (nats a token)")
    bottom.set_xlabel("optimizer steps")
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(
    console: Console, folder: Path, history: Sequence[Mapping[str, Any]], *, k: int, seconds: float
) -> dict[str, float]:
    """Prints the table and a line of figures; writes `curves.png` and `summary.json`.

    Args:
      console: Where it is printed.
      folder: Run folder; the run of GRPO is in `grpo`.
      history: The trainer's records.
      k: Samples of each held-out problem.
      seconds: Wall-clock time of the whole run.
    Returns:
      pass@1 and pass@k before and after, and `seconds`.
    """
    samples = read_samples(folder / "grpo")
    before, after = samples[min(samples)], samples[max(samples)]
    console.print(comparison_table(before, after))
    plot_curves(samples, history, folder / "curves.png", k=k)
    figures = {
        f"pass@{count}_{name}": pass_at(rows, count)
        for count in (1, k)
        for name, rows in (("before", before), ("after", after))
    }
    summary = {name: round(value, 4) for name, value in figures.items()} | {"seconds": round(seconds, 1)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"pass@1 {summary['pass@1_before']:.3f} -> {summary['pass@1_after']:.3f}, "
        f"pass@{k} {summary[f'pass@{k}_before']:.3f} -> {summary[f'pass@{k}_after']:.3f}, {seconds:.0f} s",
        soft_wrap=True,
        highlight=False,
    )
    return summary
