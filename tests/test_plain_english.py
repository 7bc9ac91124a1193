# SPDX-License-Identifier: Apache-2.0
"""Sentences that once stood here and say in a riddle what a plain sentence says stay away."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENDINGS = (".md", ".py", ".yaml")
RIDDLES = {
    "what trains is a choice of": "every algorithm can train all weights, the last k layers, or an adapter",
    "no algorithm knows of it": "every algorithm can use it",
    "that has read imdb": "fine-tuned on IMDB",
    "that are not here": "that you don't have (yet)",
    "nobody knows": "say what is missing: a stream has no length",
    "on a thread of its own": "in a background thread",
    "on a thread of their own": "in a background thread",
    "cannot hold the run up": "never blocks training",
    "come once for all processes": "only process 0 prints",
    "or in what they name, is one line": "bad flags print one line to stderr",
}
"""What is not written, in lower case and on one line, and what is."""


def riddles(text: str) -> list[str]:
    """Riddles of a text, wherever its lines (and the signs that begin comments and quotes) break."""
    flat = re.sub(r"\s+(?:# |> )?\s*", " ", text.lower())
    return [riddle for riddle in RIDDLES if riddle in flat]


def texts() -> list[Path]:
    """What users read: the README, the changelog, docs, recipes, examples and the package."""
    rooms = [
        path for room in ("docs", "configs", "examples", "jrl") for path in sorted((ROOT / room).rglob("*"))
    ]
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *(path for path in rooms if path.suffix in ENDINGS)]


def test_riddles_stay_away():
    found = {str(path.relative_to(ROOT)): riddles(path.read_text(encoding="utf-8")) for path in texts()}
    assert len(found) > 400
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.parametrize(
    "text", ["a GPT-2 that\nhas read  IMDB", "# a GPT-2 that has\n# read IMDB", "Nobody knows why"]
)
def test_a_riddle_is_seen_across_lines(text):
    assert len(riddles(text)) == 1
