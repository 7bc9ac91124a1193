# SPDX-License-Identifier: Apache-2.0
"""What the chain leaves behind: policies by learned and true reward, and the curve of over-optimisation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sentiment.judge import Checkpoint, distinct_2

from .preferences import true_scores

LEARNED, TRUE = "metrics/learned", "metrics/true"
"""Names of the two scores in the records of evaluations."""


@dataclass(frozen=True)
class Verdict:
    """What one policy's completions of the held-out prompts are worth.

    Attributes:
      name: Of the policy.
      learned: Mean score of the reward model, in nats of preference.
      true: Mean score of the hidden judge, likewise.
      kl: Estimate of the KL divergence to the first policy in nats a completion: 0 for that policy itself.
      length: Mean length in tokens.
      distinct_2: Distinct bigrams of words over all bigrams.
    """

    name: str
    learned: float
    true: float
    kl: float
    length: float
    distinct_2: float


def scores_of(reward_model: Callable[..., Any]) -> Callable[..., dict[str, list[float]]]:
    """A metric function for `jrl.train`: both scores of every sample. The true one is only looked at, never learned."""

    def metric_fn(samples: list[str], **_: Any) -> dict[str, list[float]]:
        return {"learned": list(reward_model(samples=samples)), "true": true_scores(samples)}

    return metric_fn


def assess(
    name: str,
    policy: Checkpoint,
    first: Checkpoint,
    prompts: Sequence[str],
    reward_model: Callable[..., Any],
    *,
    gen_kwargs: Mapping[str, Any],
    seed: int,
) -> Verdict:
    """Samples one completion a prompt and scores it.

    Args:
      name: Of the policy.
      policy: Who writes.
      first: The policy that all others come from.
      prompts: Held-out prompts.
      reward_model: The learned one.
      gen_kwargs: As `Checkpoint.complete` takes them.
      seed: Of the samples.
    """
    texts = policy.complete(list(prompts), seed=seed, gen_kwargs=dict(gen_kwargs))
    samples = [prompt + output for prompt, output in zip(texts.prompts, texts.outputs, strict=True)]
    length = float(np.mean(texts.lengths))
    # E[log π − log π₁] over sampled tokens, times their number in a completion.
    nats = math.log(first.perplexity(texts)) - math.log(policy.perplexity(texts))
    return Verdict(
        name,
        learned=float(np.mean(reward_model(samples=samples))),
        true=float(np.mean(true_scores(samples))),
        kl=nats * length,
        length=length,
        distinct_2=distinct_2(texts.outputs),
    )


def curve(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """(optimizer steps, learned score, true score) of every evaluation of a run."""
    return [(record["step"], record[LEARNED], record[TRUE]) for record in history if TRUE in record]


def table(verdicts: Sequence[Verdict]) -> Table:
    """The closing table, gains over the first policy in brackets."""
    found = Table(title="Held-out prompts: what was learned, and what was meant")
    found.add_column("policy", style="bold")
    for column in ("learned reward", "true reward", "KL to SFT (nats)", "length", "distinct-2"):
        found.add_column(column, justify="right")
    for verdict in verdicts:
        gains = [
            f"{value:+.2f} ({value - start:+.2f})"
            for value, start in ((verdict.learned, verdicts[0].learned), (verdict.true, verdicts[0].true))
        ]
        found.add_row(
            verdict.name, *gains, f"{verdict.kl:.2f}", f"{verdict.length:.1f}", f"{verdict.distinct_2:.3f}"
        )
    return found


def plot(runs: Mapping[str, Sequence[tuple[int, float, float]]], path: Path) -> None:
    """Draws learned and true reward over the optimizer steps of each run, on one scale.

    Args:
      runs: Name → what `curve` gives.
      path: PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(runs), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (name, points) in zip(panels, runs.items(), strict=True):
        steps, learned, true = zip(*points, strict=True)
        axes.plot(steps, learned, "o-", markersize=3, color="tab:blue", label="learned reward")
        axes.plot(steps, true, "o-", markersize=3, color="tab:orange", label="true (hidden) reward")
        axes.set_title(name)
        axes.set_xlabel("optimizer steps")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean score (nats of preference)")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(
    console: Console,
    folder: Path,
    verdicts: Sequence[Verdict],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    reward_model: Mapping[str, float],
    *,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Prints the table and what it means; writes `curves.png` and `summary.json`.

    Args:
      console: Where it is printed.
      folder: Where it is written.
      verdicts: The first policy's, then the others'.
      histories: A run's records by its name.
      reward_model: Figures of the reward model.
      seconds: Wall-clock time by stage; a stage that was taken over from an earlier call took none.
    Returns:
      What was written.
    """
    runs = {name: curve(history) for name, history in histories.items()}
    plot(runs, folder / "curves.png")
    peaks = {name: max(points, key=lambda point: point[2]) for name, points in runs.items()}
    summary = {
        "reward_model": dict(reward_model),
        "policies": {verdict.name: asdict(verdict) for verdict in verdicts},
        "best_true_reward": {name: {"step": step, "true": true} for name, (step, _, true) in peaks.items()},
        "seconds": dict(seconds),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(table(verdicts))
    for name, (step, _, true) in peaks.items():
        last_step, _, last = runs[name][-1]
        console.print(
            f"{name}: true reward {true:+.2f} at best (step {step}), {last:+.2f} at the end (step {last_step})"
        )
    console.print(
        "reward model: {accuracy:.1%} of the held-out pairs in order, {best:.1%} at best; {agreement:.1%} as the "
        "hidden judge orders them".format(**reward_model),
        soft_wrap=True,
        highlight=False,
    )
    console.print(
        f"{sum(seconds.values()):.0f} s, curves in {folder / 'curves.png'}", soft_wrap=True, highlight=False
    )
    return summary
