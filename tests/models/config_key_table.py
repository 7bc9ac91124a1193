# SPDX-License-Identifier: Apache-2.0
"""Changes every key of every family's config class and rewrites the table of keys in docs/models.md.

`python tests/models/config_key_table.py` takes ten minutes or more; with names it measures these families alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.models.test_config_keys import FINE, PLAIN, walk  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- key table: begin -->", "<!-- key table: end -->"
HEAD = (
    "| family | keys | agree | same in torch | no other value | refused |",
    "|---|---|---|---|---|---|",
)


def row(family: str, outcomes: Mapping[str, str]) -> str:
    """One line of the table."""
    counts = {what: sum(found == what for found in outcomes.values()) for what in FINE}
    refused = [f"`{key}`" for key, what in outcomes.items() if what == "refused"]
    wrong = [f"`{key}`: {what}" for key, what in outcomes.items() if what not in FINE]
    none = counts["no other value"] + counts["torch refuses"]
    last = "; ".join([", ".join(refused) or "–", *(["WRONG", *wrong] if wrong else [])])
    return (
        f"| {family} | {len(outcomes)} | {counts['agree']} | {counts['silent in torch']} | {none} | {last} |"
    )


def insert(page: str, rows: Mapping[str, str]) -> str:
    """The page with new lines between its markers, and the old ones of families that were not measured."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[len(HEAD) :]}
    lines = kept | dict(rows)
    table = "\n".join([*HEAD, *(lines[family] for family in PLAIN if family in lines)])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(chosen: Sequence[str]) -> None:
    """Walks the families that are named, all without one, and writes the page."""
    rows = {}
    for family in chosen or PLAIN:
        with tempfile.TemporaryDirectory() as folder:
            rows[family] = row(family, walk(family, Path(folder)))
        print(rows[family], flush=True)
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
