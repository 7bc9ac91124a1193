# SPDX-License-Identifier: Apache-2.0
"""Measures every tiny language model of the tests against torch and rewrites the table in docs/models.md.

`python tests/models/parity_table.py` takes some minutes. With names, as in `parity_table.py granite "falcon*"`, it
measures these cases and keeps the lines of the others.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# As in the tests: compiling these tiny programs fast matters more than how fast they run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.models import (  # noqa: E402
    family_cases,
    multimodal_cases,
    parity,
    seq2seq_cases,
    seq2seq_parity,
)

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- parity table: begin -->", "<!-- parity table: end -->"
HEAD = (
    "| family | variant | torch class | embeddings | blocks | final norm | logits | greedy tokens | jrl → torch |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(case: str, report: parity.Report) -> str:
    """One line of the table."""
    family, _, variant = case.partition("-")
    logits = max(report.logits, report.right_padded or 0.0)
    stages = (report.embeddings, max(report.blocks), report.final_norm, logits)
    back = "same logits" if report.returned == 0.0 and report.round_trip else f"{report.returned:.0e}"
    cells = [
        family,
        variant or "–",
        report.torch_class,
        *(f"{error:.0e}" if error else "0" for error in stages),
    ]
    return f"| {' | '.join([*cells, 'equal' if report.generation else 'DIFFERENT', back])} |"


def insert(page: str, rows: Mapping[str, str], order: Sequence[str]) -> str:
    """The page with new lines between its markers, and the old ones of cases that were not measured.

    Args:
      page: As it is.
      rows: Lines of the measured cases.
      order: All cases.
    """
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = dict(row_of(line) for line in old.strip().splitlines()[len(HEAD) :])
    table = "\n".join([*HEAD, *((kept | dict(rows))[case] for case in order if case in kept or case in rows)])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def row_of(line: str) -> tuple[str, str]:
    """The case that a line of the table is about, and the line."""
    family, variant = (cell.strip() for cell in line.split("|")[1:3])
    return (family if variant == "–" else f"{family}-{variant}"), line


def main(chosen: Sequence[str]) -> None:
    """Runs the cases that a pattern names, all without one, and writes the page."""
    cases = family_cases.CASES | multimodal_cases.CASES
    runs = [(case, config, parity.compare) for case, config in cases.items()]
    runs += [(case, config, seq2seq_parity.compare) for case, config in seq2seq_cases.CASES.items()]
    rows = {}
    for case, config, compare in runs:
        if chosen and not any(fnmatch.fnmatch(case, pattern) for pattern in chosen):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[case] = row(case, compare(config, Path(folder)))
        print(rows[case], flush=True)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(insert(page, rows, [case for case, _, _ in runs]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
