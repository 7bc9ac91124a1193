# SPDX-License-Identifier: Apache-2.0
"""The one command that measures a GPU runs what its page says."""

import re
import runpy
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_command_of_the_table_is_a_row():
    rows = {" ".join(row) for row in runpy.run_path(str(FOLDER / "accelerator.py"))["ROWS"]}
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## On a GPU$(.*?)^## ", page, re.DOTALL | re.MULTILINE)[1]
    commands = re.findall(r"^\|.*?`python benchmarks/([^`]*)`", section, re.MULTILINE)
    told = {command for command in commands if not command.startswith("compare.py")}
    assert len(told) >= 8 and told <= rows
