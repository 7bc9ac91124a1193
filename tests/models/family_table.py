# SPDX-License-Identifier: Apache-2.0
"""Runs what every family must do beyond its logits, and rewrites the table of families in docs/models.md.

`python tests/models/family_table.py` runs, for every family that writes, the tests of hydra, LoRA, a mesh and one PPO
iteration, and reads the other two tables of the page for the rest of a line. With names it runs these families alone,
and with `--columns hydra,lora` these tests alone; other cells stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.models import config_key_table, parity_table  # noqa: E402
from tests.models.family_training import CONFIGS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- family table: begin -->", "<!-- family table: end -->"
TRAINING, ITERATION = "tests/models/test_family_training.py", "tests/trainers/test_train_families.py"
COLUMNS = {
    "hydra": (f"{TRAINING}::test_the_hydra_reference_is_the_model_before_training[{{}}]",),
    "lora": (
        f"{TRAINING}::test_lora_begins_as_the_model_and_a_gradient_reaches_every_target[{{}}]",
        f"{TRAINING}::test_peft_finds_the_modules_that_are_adapted_under_the_same_names[{{}}]",
    ),
    "mesh": (f"{TRAINING}::test_a_mesh_computes_the_logits_of_one_device[{{}}]",),
    "ppo": tuple(f"{ITERATION}::test_one_ppo_iteration[{{}}-{trained}]" for trained in ("hydra", "lora")),
}
"""The tests of each column, with {} for the family."""
HEAD = (
    "| family | compared | worst error | round trip | hydra | LoRA | mesh (2, 2, 2) | PPO | refused keys |",
    "|---|---|---|---|---|---|---|---|---|",
)
NOT_RUN = "not run"


def run(families: Iterable[str], columns: Iterable[str]) -> dict[tuple[str, str], str]:
    """Runs the tests of these columns; the outcome by family and column."""
    found: dict[tuple[str, str], str] = {}
    for column in columns:
        tests = [test.format(family) for family in families for test in COLUMNS[column]]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            devices = 8 if column == "mesh" else 1
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
            command = [sys.executable, "-m", "pytest", "-m", "", f"--junitxml={report}", *tests]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, check=False)
            found |= outcomes(column, ElementTree.parse(report).getroot())
    return found


def outcomes(column: str, report: ElementTree.Element) -> dict[tuple[str, str], str]:
    """What a report of pytest says of a column: "yes" for a family all of whose tests passed."""
    found: dict[tuple[str, str], str] = {}
    for test in COLUMNS[column]:
        name, _, last = test.rpartition("::")[2].partition("[{}")
        for case in report.iter("testcase"):
            match = re.fullmatch(rf"{name}\[(.*){re.escape(last)}", str(case.get("name")))
            if match is None or case.find("skipped") is not None:
                continue
            passed = case.find("failure") is None and case.find("error") is None
            key = match[1], column
            found[key] = "yes" if passed and found.get(key, "yes") == "yes" else "FAILED"
    return found


def cells(page: str, begin: str, end: str) -> list[list[str]]:
    """The cells of a table of the page, without its head."""
    lines = page.partition(begin)[2].partition(end)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def row(family: str, page: str, ran: Mapping[tuple[str, str], str]) -> str:
    """One line of the table."""
    cases = [line for line in cells(page, parity_table.BEGIN, parity_table.END) if line[0] == family]
    keys = [line for line in cells(page, config_key_table.BEGIN, config_key_table.END) if line[0] == family]
    old = next((line for line in cells(page, BEGIN, END) if line[0] == family), None)
    compared, worst, trip = NOT_RUN, NOT_RUN, NOT_RUN
    if cases:
        variants = f", {len(cases)} variants" if len(cases) > 1 else ""
        compared = f"stages, logits, 32 greedy tokens{variants}"
        worst = max((cell for line in cases for cell in line[3:7]), key=float)
        trip = "bit for bit" if all(line[8] == "same logits" for line in cases) else "DIFFERENT"
    done = [
        ran.get((family, column), old[4 + place] if old else NOT_RUN) for place, column in enumerate(COLUMNS)
    ]
    return f"| {' | '.join([family, compared, worst, trip, *done, keys[0][5] if keys else NOT_RUN])} |"


def insert(page: str, ran: Mapping[tuple[str, str], str]) -> str:
    """The page with a line for every family between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join([*HEAD, *(row(family, page, ran) for family in sorted(CONFIGS))])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Runs what is asked for and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    arguments = parser.parse_args()
    columns = [column for column in arguments.columns.split(",") if column]
    ran = run(arguments.families or sorted(CONFIGS), columns)
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), ran), encoding="utf-8")


if __name__ == "__main__":
    main()
