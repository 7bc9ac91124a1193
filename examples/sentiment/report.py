# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: a table of completions before and after, the curves, and one line of figures."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .judge import Judgement


def comparison_table(before: Judgement, after: Judgement, *, num_rows: int = 8) -> Table:
    """The first prompts with what each policy wrote, and its reward."""
    table = Table(title="Held-out prompts, before and after PPO", show_lines=True)
    table.add_column("prompt", ratio=2, style="bold")
    for name in ("before", "after"):
        table.add_column(name, ratio=5)
        table.add_column("reward", justify="right")
    for row in range(min(num_rows, len(before.prompts))):
        cells = [before.prompts[row]]
        for judgement in (before, after):
            cells += [judgement.outputs[row].strip(), f"{judgement.rewards[row]:+.2f}"]
        table.add_row(*cells)
    return table


def plot_run(
    before: Judgement,
    after: Judgement,
    history: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    target_kl: float | None,
) -> None:
    """Draws reward and KL over optimizer steps, above a few completions before and after.

    Args:
      before: Of the policy that PPO started from.
      after: Of the trained one, on the same prompts.
      history: The trainer's records: rollouts have `kl/per_sequence`, evaluations have `evaluation`.
      path: PNG to write.
      target_kl: Set-point of the KL controller in nats per sequence, drawn as a line; None: not drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rollouts = [record for record in history if "kl/per_sequence" in record]
    evaluations = [record for record in history if "evaluation" in record]
    figure, places = plt.subplot_mosaic(
        [["reward", "kl"], ["texts", "texts"]],
        figsize=(10, 6.4),
        height_ratios=(1.25, 1),
        layout="constrained",
    )
    reward, kl = places["reward"], places["kl"]
    reward.plot(*_series(rollouts, "reward/mean"), color="tab:blue", label="rollouts")
    reward.plot(*_series(evaluations, "reward/mean"), "o", color="tab:orange", label="held-out prompts")
    reward.set_title("mean reward")
    kl.plot(*_series(rollouts, "kl/per_sequence"), color="tab:blue", label="KL to the reference")
    if target_kl is not None:
        kl.axhline(target_kl, color="gray", linestyle="--", linewidth=1, label="target")
    kl.set_title("KL per sequence (nats)")
    for axes in (reward, kl):
        axes.set_xlabel("optimizer steps")
        axes.legend(frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    _draw_completions(places["texts"], before, after)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_completions(axes: Any, before: Judgement, after: Judgement, *, num_rows: int = 3) -> None:
    """The first completions of both policies as a table, with their rewards."""
    axes.axis("off")
    rows = []
    for row in range(min(num_rows, len(before.prompts))):
        cells = [before.prompts[row]]
        for judgement in (before, after):
            cells += [judgement.outputs[row].strip(), f"{judgement.rewards[row]:+.2f}"]
        rows.append(cells)
    widths = (18, 54, 7, 54, 7)  # characters
    table = axes.table(
        [
            [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
            for cells in (["prompt", "before", "reward", "after", "reward"], *rows)
        ],
        cellLoc="left",
        colWidths=[width / sum(widths) for width in widths],
        bbox=(0, 0, 1, 1),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor("lightgray")
        cell.set_text_props(fontweight="bold" if row == 0 else "normal", parse_math=False)
        cell.set_height(0.4 if row == 0 else 1)
        cell.PAD = 0.02


def _wrapped(text: str, width: int, *, num_lines: int = 4) -> str:
    """Lines of so many characters; what does not fit is left out, and dots say so."""
    return textwrap.fill(text, width, max_lines=num_lines, placeholder=" ...")


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    found = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in found], [value for _, value in found]


def summarize(
    before: Judgement, after: Judgement, history: Sequence[Mapping[str, Any]], *, seconds: float
) -> dict[str, float]:
    """The figures of `summary.json`.

    Args:
      before: Of the policy that PPO started from.
      after: Of the trained one, on the same prompts.
      history: The trainer's records.
      seconds: Wall-clock time of the whole run.
    Returns:
      Rewards on held-out prompts; `kl_per_sequence`, the mean of the last five rollouts in nats; sampled
      `tokens_per_second` over all of PPO; and, for variety, length and perplexity, both values.
    """
    rollouts = [record for record in history if "kl/per_sequence" in record]
    busy = sum(record["time/iteration"] for record in rollouts)
    tokens = sum(record["time/iteration"] * record["perf/tokens_per_second"] for record in rollouts)
    figures = {
        "reward_before": before.reward,
        "reward_after": after.reward,
        "kl_per_sequence": float(np.mean([record["kl/per_sequence"] for record in rollouts[-5:]])),
        "tokens_per_second": tokens / busy,
        "seconds": seconds,
        "distinct_2_before": before.distinct_2,
        "distinct_2_after": after.distinct_2,
        "length_before": before.length,
        "length_after": after.length,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
    }
    return {name: round(value, 4) for name, value in figures.items()}


def report(
    console: Console,
    folder: Path,
    before: Judgement,
    after: Judgement,
    history: Sequence[Mapping[str, Any]],
    *,
    target_kl: float | None,
    seconds: float,
) -> dict[str, float]:
    """Prints the table and the summary line; writes `curves.png`, `completions.jsonl` and `summary.json`."""
    console.print(comparison_table(before, after))
    plot_run(before, after, history, folder / "curves.png", target_kl=target_kl)
    with open(folder / "completions.jsonl", "w", encoding="utf-8") as file:
        for row in zip(
            before.prompts, before.outputs, before.rewards, after.outputs, after.rewards, strict=True
        ):
            names = ("prompt", "before", "reward_before", "after", "reward_after")
            file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
    summary = summarize(before, after, history, seconds=seconds)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(
        "reward {reward_before:+.3f} -> {reward_after:+.3f}, KL {kl_per_sequence:.2f} nats, "
        "distinct-2 {distinct_2_before:.3f} -> {distinct_2_after:.3f}, "
        "length {length_before:.1f} -> {length_after:.1f}, "
        "perplexity {perplexity_before:.2f} -> {perplexity_after:.2f}, "
        "{tokens_per_second:.0f} tokens/s, {seconds:.0f} s".format(**summary),
        soft_wrap=True,
        highlight=False,
    )
    return summary
