# SPDX-License-Identifier: Apache-2.0
"""Writes short news and their summaries: the machine behind `articles.jsonl` (`python examples/write_data.py`)."""

from __future__ import annotations

import random
from pathlib import Path

from sentiment.grammar import Grammar, Writer, load_grammar

RULES_FOLDER = Path(__file__).parent / "rules"


def write_article(grammar: Grammar, rng: random.Random) -> dict[str, str]:
    """One record.

    Args:
      grammar: Of `rules/*.txt`.
      rng: Source of all choices.
    Returns:
      `prompt`: four to five sentences in no order, one of which says what happened; `summary`: that alone.
    """
    writer = Writer(grammar, rng)
    kind = rng.choice(sorted(name.partition(".")[0] for name in grammar.rules if name.endswith(".fact")))
    sentences = [writer.expand(f"{kind}.fact")]
    sentences += [writer.expand(f"{kind}.detail") for _ in range(2)]
    sentences += [writer.expand("filler") for _ in range(rng.choice((1, 2)))]
    rng.shuffle(sentences)
    return {"prompt": " ".join(sentences), "summary": writer.expand(f"{kind}.summary")}


def write_articles(count: int, *, seed: int) -> list[dict[str, str]]:
    """Records with different articles."""
    grammar, rng = load_grammar(sorted(RULES_FOLDER.glob("*.txt"))), random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        record = write_article(grammar, rng)
        found[record["prompt"]] = record
    return list(found.values())
