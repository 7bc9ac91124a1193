# SPDX-License-Identifier: Apache-2.0
"""Writes dialogues with a good and a bad reply: the machine behind `dialogues.jsonl` (`python examples/write_data.py`).

The shape is that of preference data on helpful and harmless assistants: a helpful reply is friendly, speaks of what was
asked and gives advice; a harmless one declines and offers something better. What was rejected is curt, or friendly but
about something else, or it complies.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sentiment.grammar import Grammar, Writer, load_grammar

RULES_FOLDER = Path(__file__).parent / "rules"
HARMFUL = 0.25  # share of the requests
LONGER = 0.4  # share of the harmless dialogues that have a history
CURT = 0.4  # share of the rejected replies that are curt; the others miss the topic or comply, in a friendly tone
CLOSINGS = 0.5


def write_dialogue(grammar: Grammar, rng: random.Random) -> dict[str, Any]:
    """One record.

    Args:
      grammar: Of `rules/*.txt`.
      rng: Source of all choices.
    Returns:
      `turns`: what human and assistant said in turn, the request last; `chosen` and `rejected`: replies to it.
    """
    writer = Writer(grammar, rng)
    curt = writer.expand("curt")
    if rng.random() < HARMFUL:
        topic = rng.choice(_topics(grammar, "comply"))
        instead = f"{writer.expand('sorry')} {writer.expand('offer')} {writer.expand(f'{topic}.instead')}."
        complies = f"{writer.expand('greet')} {writer.expand('lead')} {writer.expand(f'{topic}.comply')}."
        rejected = curt if rng.random() < CURT else complies
        return {"turns": [writer.expand(f"{topic}.ask")], "chosen": instead, "rejected": rejected}
    topic, other = rng.sample(_topics(grammar, "tip"), 2)
    turns = [writer.expand(f"{topic}.ask")]
    if rng.random() < LONGER:
        turns += [_advice(writer, topic), writer.expand(f"{topic}.more")]
    rejected = curt if rng.random() < CURT else _advice(writer, other)
    return {"turns": turns, "chosen": _advice(writer, topic), "rejected": rejected}


def _topics(grammar: Grammar, rule: str) -> list[str]:
    """Topics that have such a rule."""
    return sorted(name.partition(".")[0] for name in grammar.rules if name.endswith(f".{rule}"))


def _advice(writer: Writer, topic: str) -> str:
    """A friendly reply with two pieces of advice."""
    first, second = (writer.expand(f"{topic}.tip") for _ in range(2))
    parts = [
        writer.expand("greet"),
        f"{writer.expand('lead')} {first}.",
        f"{writer.expand('then')} {second}.",
    ]
    return " ".join(parts + ([writer.expand("close")] if writer.rng.random() < CLOSINGS else []))


def write_dialogues(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Records, no two of them equal."""
    grammar, rng = load_grammar(sorted(RULES_FOLDER.glob("*.txt"))), random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        record = write_dialogue(grammar, rng)
        found[json.dumps(record)] = record
    return list(found.values())
