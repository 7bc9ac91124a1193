# SPDX-License-Identifier: Apache-2.0
"""Measures every tiny language model of the tests against torch and rewrites the table in docs/models.md.

`python tests/models/parity_table.py`; it takes a few minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# As in the tests: compiling these tiny programs fast matters more than how fast they run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.models import family_cases, parity, seq2seq_parity, test_seq2seq_parity  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- parity table: begin -->", "<!-- parity table: end -->"
HEAD = (
    "| family | variant | torch class | embeddings | blocks | final norm | logits | greedy tokens | jrl → torch |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(case: str, report: parity.Report) -> str:
    """One line of the table."""
    family, _, variant = case.partition("-")
    stages = (report.embeddings, max(report.blocks), report.final_norm, report.logits)
    back = "same logits" if report.returned == 0.0 and report.round_trip else f"{report.returned:.0e}"
    cells = [
        family,
        variant or "–",
        report.torch_class,
        *(f"{error:.0e}" if error else "0" for error in stages),
    ]
    return f"| {' | '.join([*cells, 'equal' if report.generation else 'DIFFERENT', back])} |"


def insert(page: str, reports: Mapping[str, parity.Report]) -> str:
    """The page with a new table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([*HEAD, *(row(case, report) for case, report in reports.items())])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Runs all cases and writes the page."""
    runs = [(case, config, parity.compare) for case, config in family_cases.CASES.items()]
    runs += [(case, config, seq2seq_parity.compare) for case, config in test_seq2seq_parity.CASES.items()]
    reports = {}
    for case, config, compare in runs:
        with tempfile.TemporaryDirectory() as folder:
            reports[case] = compare(config, Path(folder))
        print(row(case, reports[case]), flush=True)
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), reports), encoding="utf-8")


if __name__ == "__main__":
    main()
