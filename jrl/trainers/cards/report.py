# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page: curves with their healthy ranges, findings, completions before and after, samples, recipe.

The page is one file. It needs no network and no server, and all texts in it are escaped: a policy may write anything.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jrl.trainers.cards.colored_tokens import MAX_ROWS, SCRIPT, STYLE, colored_tokens
from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.config.method import entry_of
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loggers.evaluated_reward import EvaluatedReward
from jrl.trainers.loggers.jsonl import ROLLOUTS, SAMPLES, SAMPLING, TOKENS
from jrl.trainers.loggers.safe_text import one_line
from jrl.trainers.loggers.watch import FOUND, HEALTHY, say

Record = Mapping[str, Any]

MAX_SAMPLES = 300
"""Samples that a page shows, evenly spaced over the run."""
MAX_PAIRS = 12
"""Prompts whose completions are shown before and after."""
MAX_POINTS = 500
"""Points of a curve that are drawn."""
_READ = 4 * MAX_SAMPLES
"""Samples of a file that are held in memory."""
_UNSHOWN = ("output_tokens", "turns")
"""Fields of samples that no page shows, and that are most of a file."""
_LONGEST_INTEGER = 300
"""Digits of an integer that is read as one: what has more is no float either."""
_REWARD = f"{SAMPLING}reward"
_STEP = re.compile(rb'\{"step": *(-?\d+)[,}]')
_COLORS = ("#1f6feb", "#d2691e", "#2e8b57", "#a0307f", "#777777")
# Title -> endings of names, of which a run's first one is drawn; an algorithm's prefix may stand before them.
_PANELS: Mapping[str, tuple[str, ...]] = {
    "mean reward": ("reward/mean", "rewards/accuracies"),
    "KL per sequence (nats)": ("kl/per_sequence",),
    "KL per token (nats)": ("kl/per_token",),
    "clip fraction": ("/clip_fraction",),
    "entropy (nats)": ("/entropy",),
    "length of completions (tokens)": ("completion/length_mean",),
    "truncated completions": ("completion/truncated_fraction",),
    "approximate KL of an update": ("/approx_kl",),
    "explained variance of values": ("/explained_variance",),
    "loss": ("/policy_loss", "/loss", "loss"),
    "gradient norm": ("optim/grad_norm",),
}


@dataclass(frozen=True)
class RunRecords:
    """Records, samples and configuration in a run's folder.

    Attributes:
      name: The folder's.
      history: Its records, one an iteration or evaluation.
      evaluated: Samples of evaluations, by step; of many some, evenly spaced, with the first and the last step's.
      num_evaluated: Those that there are.
      rollouts: Samples of training, by step; of many some, evenly spaced.
      num_rollouts: Those that there are.
      tokens: Rollouts token by token, by step; of many some, evenly spaced.
      config: Its resolved configuration; None: no checkpoint holds one.
      saved: Steps of its checkpoints.
    """

    name: str
    history: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    num_evaluated: int
    rollouts: list[dict[str, Any]]
    num_rollouts: int
    tokens: list[dict[str, Any]]
    config: dict[str, Any] | None
    saved: frozenset[int]


def read_run(folder: Path) -> RunRecords:
    """Reads records, samples and configuration of a run, which may be at work.

    Args:
      folder: `train.checkpoint_dir`.
    Raises:
      ValueError: If there is no run, or its configuration cannot be read.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(
            f"`run` must be the folder of a run, which holds metrics.jsonl; {folder} has none. It is what the recipe "
            "names as `train.checkpoint_dir`."
        )
    config = _config(folder)
    records, samples, rollouts, tokens = _files(folder, config)
    kept, num_rollouts = _some_lines(rollouts, _READ)
    evaluated, num_evaluated = _evaluated(samples)
    return RunRecords(
        name=folder.resolve().name,
        history=_lines(records),
        evaluated=evaluated,
        num_evaluated=num_evaluated,
        rollouts=kept,
        num_rollouts=num_rollouts,
        tokens=_thinned(_some_lines(tokens, _READ)[0], MAX_ROWS),
        config=config,
        saved=frozenset(checkpoints_in(folder)),
    )


def run_files(folder: Path) -> tuple[Path, ...]:
    """Files of a run that a page is made of: records, samples of evaluations, samples of training, tokens.

    Args:
      folder: `train.checkpoint_dir`.
    Raises:
      ValueError: If its configuration cannot be read.
    """
    return _files(folder, _config(folder))


def _files(folder: Path, config: Mapping[str, Any] | None) -> tuple[Path, Path, Path, Path]:
    """As `run_files`, of a configuration that is read."""
    named = None if config is None else config.get("train", {}).get("rollout_logging_dir")
    samples = folder / "rollouts" if named is None else Path(named)
    names = (SAMPLES, ROLLOUTS, TOKENS)
    evaluated, rollouts, tokens = (samples / f"{name}.jsonl" for name in names)
    return folder / "metrics.jsonl", evaluated, rollouts, tokens


def _config(folder: Path) -> dict[str, Any] | None:
    """Resolved configuration of the newest checkpoint; None: there is none yet."""
    newest = max(checkpoints_in(folder), default=None)
    if newest is None or not (folder / f"checkpoint_{newest}" / "config.yaml").is_file():
        return None
    path = folder / f"checkpoint_{newest}" / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {one_line(str(error))}") from error
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise ValueError(f"{path} must hold the sections of a configuration, got {found!r:.80}.")
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file; a last line that is being written is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:  # as bytes, a line ends at its newline alone, and not at U+2028 in a text
        return _parsed(file)


def _some_lines(path: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """So many records of a file at most, evenly spaced and with the last one, and how many lines it has.

    A long run's file may be larger than memory: it is read line by line, and of those that are kept every other one
    goes whenever there are too many.
    """
    if not path.is_file():
        return [], 0
    kept: list[bytes] = []
    every, count, line = 1, 0, b""
    with path.open("rb") as file:
        for line in file:
            if count % every == 0:
                kept.append(line)
            count += 1
            if len(kept) == most:
                kept, every = kept[::2], 2 * every
    if count and (count - 1) % every:
        kept.append(line)
    return _parsed(kept), count


def _evaluated(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Samples of evaluations: some, with the beginning of the first and the last step's; and how many there are."""
    some, count = _some_lines(path, _READ)
    if count < _READ:
        return some, count
    first: list[bytes] = []
    last: list[bytes] = []
    step: bytes | None = None
    first_step: bytes | None = None
    with path.open("rb") as file:
        for line in file:
            found = _STEP.match(line)
            if found is None:
                continue
            if found[1] != step:
                step, last = found[1], []
            first_step = first_step or step
            for rows in (last, first) if step == first_step else (last,):
                if len(rows) < MAX_SAMPLES:
                    rows.append(line)
    ends = _parsed(first), _parsed(last)
    steps = {row.get("step") for rows in ends for row in rows}
    return [*ends[0], *(row for row in some if row.get("step") not in steps), *ends[1]], count


def _parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Records of lines of JSON, without the fields that are not shown; what is none is left out."""
    found = []
    for line in lines:
        try:
            record = json.loads(line.decode("utf-8", "replace"), parse_int=_integer)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append({name: value for name, value in record.items() if name not in _UNSHOWN})
    return found


def _integer(digits: str) -> int | float:
    """An integer, or infinity in the place of one that is larger than any float."""
    return int(digits) if len(digits) < _LONGEST_INTEGER else float(digits)


def report(runs: Sequence[RunRecords], *, live_version: str | None = None) -> str:
    """The page of one run, or of several side by side.

    Args:
      runs: At least one; the first's recipe is shown in full.
      live_version: Of the files that it was made of, where a server gives it: the page then asks for the present one
        every few seconds, and reloads where it is another. None: the page never changes.
    Returns:
      HTML, whole.
    """
    parts = [f"<h1>{_text('; '.join(_title(run) for run in runs))}</h1>"]
    parts += [f"<p class=verdict>{_text(_verdict(run))}</p>" for run in runs]
    parts += ["<h2>Findings</h2>", *(_findings(run, named=len(runs) > 1) for run in runs)]
    charts, constant = _charts(runs)
    parts += [
        "<h2>Curves</h2>",
        _legend(runs),
        f"<div class=grid>{''.join(charts)}</div>",
        _constant(constant),
    ]
    for run in runs:
        of_run = f" of {_text(run.name)}" if len(runs) > 1 else ""
        parts += [f"<h2>Before and after{of_run}</h2>", _pairs(run)]
        parts += [f"<h2>Samples{of_run}</h2>", _samples(run)]
        parts += [f"<h2>Tokens{of_run}</h2>", _age_of_tokens(run), colored_tokens(run.tokens)]
        parts += [f"<h2>Recipe{of_run}</h2>", _recipe(run)]
    live = "" if live_version is None else _LIVE.replace("@VERSION@", json.dumps(live_version))
    page = _PAGE.replace("@TITLE@", _text(_title(runs[0]))).replace("@LIVE@", live)
    return page.replace("@BODY@", "\n".join(parts))


def _title(run: RunRecords) -> str:
    """Name of a run, with its model, its algorithm and its reward as far as they are known."""
    facts = []
    if run.config is not None:
        path = str(run.config.get("model", {}).get("model_path", ""))
        facts += [Path(path).name] if path else []
        facts += [str(run.config.get("method", {}).get("name", "")).removesuffix("Config")]
    reward = next((record[_REWARD] for record in run.history if record.get(_REWARD)), None)
    facts += [f"reward {one_line(str(reward))}"] if reward else []
    told = ", ".join(fact for fact in facts if fact)
    return f"{run.name} ({told})" if told else run.name


def _age_of_tokens(run: RunRecords) -> str:
    """Says whose figures the tokens show, where rollouts were collected ahead of the updates."""
    ahead = (run.config or {}).get("train", {}).get("rollouts_ahead", 0)
    if not run.tokens or not ahead:
        return ""
    one = "1 iteration" if ahead == 1 else f"{ahead} iterations"
    return (
        f"<p><code>train.rollouts_ahead</code> is {_text(ahead)}: log-probabilities, values, KL and advantages are of "
        f"the policy that sampled, up to {_text(one)} older than the one that then learned.</p>"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _number(value: float) -> str:
    return f"{value:.3g}"


def change_of_reward(history: Sequence[Record]) -> str:
    """Mean reward at the beginning and at the end, and where it was measured; "" where there are not two.

    Args:
      history: Records of a run; its evaluations go first, for the others are of other prompts each time.
    """
    of_training = any(record.get(f"{SAMPLING}prompts") == "training" for record in history)
    evaluated = f"on the {'training' if of_training else 'evaluation'} prompts"
    for kind, where in (("evaluation", evaluated), ("iteration", "over the rollouts")):
        rewards = mean_rewards(history, kind)
        if len(rewards) > 1:
            first, last = rewards[0], rewards[-1]
            unsure = ", a difference within error" if last.is_within_error(first) else ""
            return f"{first.figure} to {last} {where}{unsure}"
    return ""


def best_evaluation(history: Sequence[Record], saved: Collection[int]) -> EvaluatedReward | None:
    """Mean reward of the first best evaluation; None where the last one is as good.

    Args:
      history: Records of a run.
      saved: Steps of its checkpoints: others are passed over, for their models are gone.
    """
    rewards = mean_rewards(history, "evaluation")
    kept = [reward for reward in rewards if reward.step in saved]
    best = max(kept, key=lambda reward: reward.mean, default=None)
    if best is None or best.mean <= rewards[-1].mean:
        return None
    return best


def within_error(best: EvaluatedReward, history: Sequence[Record], words: str) -> str:
    """The words where an evaluation differs from the last one by no more than the error; else ""."""
    return words if best.is_within_error(mean_rewards(history, "evaluation")[-1]) else ""


def start_was_best(history: Sequence[Record]) -> str:
    """Words on the first evaluation, made before any step, where every later one is below it; else ""."""
    rewards = mean_rewards(history, "evaluation")
    start = next((reward for reward in rewards if reward.step == 0), None)
    best = max(
        (reward for reward in rewards if reward.step > 0), key=lambda reward: reward.mean, default=None
    )
    if start is None or best is None or best.mean >= start.mean:
        return ""
    unsure = ", but within error" if best.is_within_error(start) else ""
    return f"no evaluation was better than the one before training, {start.figure}{unsure}"


def mean_rewards(history: Sequence[Record], kind: str) -> list[EvaluatedReward]:
    """Finite mean rewards with their errors; `kind` is "iteration" or "evaluation"."""
    found = [EvaluatedReward.of(record) for record in history if kind in record]
    return [reward for reward in found if reward is not None]


def series(history: Sequence[Record], name: str, kind: str) -> list[tuple[float, float]]:
    """Finite values of a metric by step; `kind` is "iteration" or "evaluation"."""
    found = [(record["step"], record[name]) for record in history if kind in record and name in record]
    return [
        (float(step), float(value))
        for step, value in found
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _verdict(run: RunRecords) -> str:
    """Summary of a run in a sentence."""
    steps = max((record.get("step", 0) for record in run.history), default=0)
    change = change_of_reward(run.history)
    if not change:
        return f"{run.name}: {steps} optimizer steps."
    said = f"{run.name}: the mean reward went from {change}, in {steps} optimizer steps."
    start = start_was_best(run.history)
    if start:
        said = f"{said} {start[0].upper()}{start[1:]}."
    best = best_evaluation(run.history, run.saved)
    if best is None:
        return said
    unsure = within_error(best, run.history, ", within error of the last")
    return f"{said} It was best at step {best.step}, {best.figure}{unsure}: checkpoint_{best.step}/hf_model."


def _findings(run: RunRecords, *, named: bool) -> str:
    found = [record for record in run.history if FOUND in record]
    before = f"{_text(run.name)}: " if named else ""
    if not found:
        return f"<p>{before}The watch found nothing wrong. It cannot see whether the reward is what you want.</p>"
    return "<ul>" + "".join(f"<li>{before}{_text(say(record))}</li>" for record in found) + "</ul>"


def _legend(runs: Sequence[RunRecords]) -> str:
    names = [
        f'<span style="color:{_COLORS[i % len(_COLORS)]}">&#9632;</span> {_text(run.name)}'
        for i, run in enumerate(runs)
    ]
    return (
        f"<p>{' &nbsp; '.join(names)} &nbsp; lines: training; dots: evaluation; green: the healthy range</p>"
    )


def _charts(runs: Sequence[RunRecords]) -> tuple[list[str], dict[str, float]]:
    """A chart for each panel of which a run has values; beside them the metrics whose value never changes."""
    names = dict.fromkeys(name for run in runs for record in run.history for name in record)
    charts: list[str] = []
    constant: dict[str, float] = {}
    for title, endings in _PANELS.items():
        name = next((name for ending in endings for name in names if name.endswith(ending)), None)
        if name is None:
            continue
        drawn = [
            (series(run.history, name, "iteration"), series(run.history, name, "evaluation")) for run in runs
        ]
        values = {value for line, dots in drawn for _, value in (*line, *dots)}
        if not any(len(line) + len(dots) > 1 for line, dots in drawn):
            continue
        if len(values) == 1:
            constant[name] = values.pop()
        else:
            charts.append(_chart(title, name, drawn))
    return charts, constant


def _constant(values: Mapping[str, float]) -> str:
    """A line that names the metrics without a curve; "" where there are none."""
    told = ", ".join(f"<code>{_text(name)}</code> {_number(value)}" for name, value in values.items())
    return f"<p>The same at every step: {told}.</p>" if told else ""


def _chart(title: str, name: str, drawn: Sequence[tuple[list[Any], list[Any]]]) -> str:
    """One panel as SVG: the healthy range shaded, a line and dots a run."""
    width, height, left, bottom, top = 360, 200, 52, 24, 8
    points = [point for line, dots in drawn for point in (*line, *dots)]
    steps, values = [x for x, _ in points], [y for _, y in points]
    (x0, x1), (y0, y1) = (min(steps), max(steps)), (min(values), max(values))
    x1, margin = (x1 if x1 > x0 else x0 + 1), 0.06 * (y1 - y0) or max(abs(y1), 1) * 0.06
    y0, y1 = y0 - margin, y1 + margin

    def place(x: float, y: float) -> str:
        across = left + (x - x0) / (x1 - x0) * (width - left - 8)
        return f"{across:.1f},{_up(y):.1f}"

    def _up(y: float) -> float:
        return top + (y1 - y) / (y1 - y0) * (height - top - bottom)

    body = []
    healthy = HEALTHY.get(name)
    if healthy is not None:
        low = y0 if healthy.low is None else max(y0, healthy.low)
        high = y1 if healthy.high is None else min(y1, healthy.high)
        if high > low:
            body.append(
                f'<rect x="{left}" y="{_up(high):.1f}" width="{width - left - 8}" height="{_up(low) - _up(high):.1f}" '
                'fill="#2e8b57" opacity="0.12"/>'
            )
    for value in (y0 + margin, (y0 + y1) / 2, y1 - margin):
        y = _up(value)
        body.append(f'<line x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        body.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for step, anchor in ((x0, "start"), (x1, "end")):
        x = place(step, y0).split(",")[0]
        body.append(f'<text x="{x}" y="{height - 6}" text-anchor="{anchor}">{step:g}</text>')
    for i, (line, dots) in enumerate(drawn):
        color = _COLORS[i % len(_COLORS)]
        path = " ".join(place(*point) for point in _thinned(line, MAX_POINTS))
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        body += [
            f'<circle cx="{across}" cy="{up}" r="3" fill="{color}"/>'
            for across, up in (place(*point).split(",") for point in _thinned(dots, MAX_POINTS))
        ]
    said = f" &middot; healthy: {_text(healthy)}" if healthy is not None else ""
    return (
        f'<figure><figcaption><b>{_text(title)}</b><br><code>{_text(name)}</code>{said}</figcaption><svg viewBox="0 0 '
        f'{width} {height}" role="img" aria-label="{_text(title)}">{"".join(body)}</svg></figure>'
    )


def _thinned(rows: Sequence[Any], most: int) -> list[Any]:
    """So many rows at most, evenly spaced, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _pairs(run: RunRecords) -> str:
    """Completions of the same prompts in the first and the last evaluation."""
    steps = [row["step"] for row in run.evaluated if "step" in row]
    if not steps or min(steps) == max(steps):
        return "<p>The run has not evaluated twice yet.</p>"
    first, last = (
        {row.get("prompt"): row for row in reversed(run.evaluated) if row.get("step") == step}
        for step in (min(steps), max(steps))
    )
    rows = []
    for prompt in [prompt for prompt in reversed(first) if prompt in last][:MAX_PAIRS]:
        cells = [prompt]
        for row in (first[prompt], last[prompt]):
            cells += [row.get("output", ""), _reward(row)]
        rows.append(cells)
    head = ["prompt", f"step {min(steps)}", "reward", f"step {max(steps)}", "reward"]
    return _table(head, rows)


def _samples(run: RunRecords) -> str:
    """Samples of training, or of evaluations where none were kept, with a field to search them."""
    rows = run.rollouts or run.evaluated
    if not rows:
        return "<p>The run kept no samples.</p>"
    shown = _thinned(rows, MAX_SAMPLES)
    cells = [
        [row.get("step", ""), row.get("prompt", ""), row.get("output", ""), _reward(row)] for row in shown
    ]
    there = run.num_rollouts if run.rollouts else run.num_evaluated
    left_out = f", of {there}" if there > len(shown) else ""
    table = _table(["step", "prompt", "completion", "reward"], cells)
    return f"<p>{len(shown)} samples{left_out}. <input type=search placeholder='search'></p>{table}"


def _reward(row: Record) -> str:
    value = row.get("reward")
    if isinstance(value, list):
        value = sum(x for x in value if isinstance(x, int | float))
    return f"{value:+.3g}" if isinstance(value, int | float) else ""


def _table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _recipe(run: RunRecords) -> str:
    """Difference from the default configuration, and the whole."""
    if run.config is None:
        return "<p>No checkpoint holds the configuration yet.</p>"
    whole = _text(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
    return f"{_difference(run.config)}<details><summary>all fields</summary><pre>{whole}</pre></details>"


def _difference(config: Mapping[str, Any]) -> str:
    try:
        entry = entry_of(TRLConfig.from_dict(config).method)
    except (ValueError, TypeError):  # of another release, or of an algorithm that this process does not know
        entry = None
    if entry is None:
        return "<p>There is no default configuration to compare with.</p>"
    default = entry.default().to_dict()
    rows = [
        [f"{section}.{name}", value, default[section].get(name)]
        for section, values in config.items()
        for name, value in values.items()
        if _plain(value) != _plain(default[section].get(name))
    ]
    return _table(["field", "here", f"default of jrl {entry.name}"], rows)


def _plain(value: Any) -> Any:
    """As a file holds it: tuples are lists."""
    return json.loads(json.dumps(value, default=str))


VERSION_PATH = "/version"
"""Where a server of the page answers with the version of the present one."""
# While something is searched for, the page stays.
_LIVE = """
setInterval(async () => {
  if ([...document.querySelectorAll("input[type=search]")].some((field) => field.value)) return;
  try {
    const answer = await fetch("/version" + location.search);
    if (answer.ok && (await answer.text()) !== @VERSION@) location.reload();
  } catch { document.title = "(run over) " + document.title.replace("(run over) ", ""); }
}, 3000);
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 0 auto; padding: 0 14px 60px; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.verdict { font-size: 1.1em; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-size: .85em; } svg { width: 100%; height: auto; }
svg text { font-size: 10px; fill: currentColor; }
.wide { overflow: auto; max-height: 75vh; }
thead { position: sticky; top: 0; background: Canvas; }
table { border-collapse: collapse; font-size: .88em; }
th, td { border: 1px solid #8886; padding: 4px 7px; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 4em; } pre { overflow-x: auto; font-size: .85em; }
@STYLE@
</style></head><body>
@BODY@
<script>
for (const field of document.querySelectorAll("input[type=search]")) {
  const rows = field.closest("p").nextElementSibling.querySelectorAll("tbody tr");
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
@SCRIPT@
@LIVE@
</script>
</body></html>
""".replace("@STYLE@", STYLE).replace("@SCRIPT@", SCRIPT)
