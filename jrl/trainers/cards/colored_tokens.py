# SPDX-License-Identifier: Apache-2.0
"""Tokens of rollouts on a run's page, coloured by a figure that the reader chooses."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

FIGURES = {
    "advantage": "advantage, as the loss reads it",
    "kl": "KL to the reference (nats): log π − log π_ref",
    "value": "value of the state before the token",
    "logprob": "log-probability (nats)",
}
"""What tokens may be coloured by, and what it is called."""
MAX_ROWS = 24
"""Rows that a page shows, evenly spaced over the run."""


def colored_tokens(rows: Sequence[Mapping[str, Any]]) -> str:
    """The part of a page; its colours are put there by `SCRIPT`.

    Args:
      rows: Of the run's `tokens.jsonl`; what is no such row is left out.
    """
    rows = [row for row in rows if _is_whole(row)]
    if not rows:
        return "<p>The run kept no tokens: online algorithms do.</p>"
    there = [name for name in FIGURES if any(_numbers(row, name) for row in rows)]
    choices = "".join(f'<option value="{name}">{FIGURES[name]}</option>' for name in there)
    return (
        f"<div class=tokens><p><label>colour by <select>{choices}</select></label></p>"
        "<p class=scale><span class=low></span><i></i><span class=high></span></p>"
        "<p><output>Point at a token, or tap it, for its figures.</output></p>"
        f"<div class=rows>{''.join(_row(row, there) for row in rows)}</div></div>"
    )


def _row(row: Mapping[str, Any], there: Sequence[str]) -> str:
    """A rollout: where it comes from, and its tokens."""
    figures = {name: _numbers(row, name) for name in there}
    reward = row.get("reward")
    said = f", reward {reward:+.3g}" if isinstance(reward, int | float) else ""
    tokens = "".join(f"<span>{html.escape(str(token))}</span>" for token in row["tokens"])
    return (
        f"<p><b>step {html.escape(str(row.get('step', '')))}{said}</b> "
        f"<q>{html.escape(str(row.get('prompt', '')))}</q> "
        f'<span class=row data-figures="{html.escape(json.dumps(figures))}">{tokens}</span></p>'
    )


def _is_whole(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("tokens"), list) and bool(row["tokens"])


def _numbers(row: Mapping[str, Any], name: str) -> list[float | None]:
    """A figure of each token, None where there is none; empty where the row has no such figure."""
    values = row.get(name)
    if not isinstance(values, list) or len(values) != len(row["tokens"]):
        return []
    return [value if isinstance(value, int | float) and math.isfinite(value) else None for value in values]


STYLE = """
.tokens .row span { border-radius: 2px; padding: 1px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens .row span.none { opacity: .55; } .tokens .row span:hover { outline: 1px solid currentColor; }
.tokens q { opacity: .7; overflow-wrap: anywhere; } .tokens .rows { overflow: auto; max-height: 75vh; }
.tokens .row { font-family: ui-monospace, monospace; font-size: .9em; }
.tokens select { font: inherit; max-width: 100%; } .tokens label { overflow-wrap: anywhere; }
.scale { display: flex; gap: 8px; align-items: center; max-width: 30em; }
.scale i { flex: 1; height: 12px; border-radius: 3px; }
"""
# Blue is above 0 and orange below; what can be of one sign alone goes from clear to orange. The colours let the text
# through, so they serve on light pages and dark ones.
SCRIPT = """
for (const part of document.querySelectorAll(".tokens")) {
  const choice = part.querySelector("select"), said = part.querySelector("output");
  if (!choice) continue;
  const rows = [...part.querySelectorAll(".row")].map((row) => [JSON.parse(row.dataset.figures), [...row.children]]);
  const short = (value) => value === undefined || value === null ? "none" : String(+value.toPrecision(3));
  const paint = (share) => `rgba(${share < 0 ? "235,120,20" : "40,110,235"},${(0.75 * Math.abs(share)).toFixed(3)})`;
  const color = () => {
    const name = choice.value;
    const values = rows.flatMap(([figures]) => figures[name]).filter((value) => value !== null);
    const most = values.reduce((found, value) => Math.max(found, Math.abs(value)), 0) || 1;
    const signed = values.some((value) => value > 0);
    for (const [figures, tokens] of rows) tokens.forEach((token, place) => {
      const value = figures[name][place] ?? null;
      token.classList.toggle("none", value === null);
      token.style.background = value === null ? "" : paint(value / most);
      token.title = Object.entries(figures).filter(([, all]) => all.length)
        .map(([figure, all]) => `${figure} ${short(all[place])}`).join(", ");
    });
    part.querySelector(".low").textContent = short(-most);
    part.querySelector(".high").textContent = short(signed ? most : 0);
    part.querySelector(".scale i").style.background =
      `linear-gradient(to right, ${paint(-1)}, ${paint(0)}${signed ? `, ${paint(1)}` : ""})`;
  };
  const say = (event) => {
    if (event.target.parentElement?.classList.contains("row"))
      said.textContent = `"${event.target.textContent}": ${event.target.title}`;
  };
  part.addEventListener("mouseover", say);
  part.addEventListener("click", say);
  choice.addEventListener("change", color);
  color();
}
"""
"""Colours the tokens, and says the figures of the one that is pointed at."""
