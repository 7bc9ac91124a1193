# SPDX-License-Identifier: Apache-2.0
"""Writes the data that `hh_dialogue.py` and `summarize_t5.py` come with, each with the grammar beside it.

    python examples/write_data.py

The files are part of the repository; the same seed writes the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dialogue.write import write_dialogues
from summaries.write import write_articles

FOLDER = Path(__file__).resolve().parent
SEED, NUM_DIALOGUES, NUM_ARTICLES = 0, 800, 1500


def to_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def files() -> dict[Path, str]:
    """The files and what they hold."""
    return {
        FOLDER / "dialogue" / "dialogues.jsonl": to_lines(write_dialogues(NUM_DIALOGUES, seed=SEED)),
        FOLDER / "summaries" / "articles.jsonl": to_lines(write_articles(NUM_ARTICLES, seed=SEED)),
    }


def main() -> int:
    """Writes them."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text.splitlines())} records")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
