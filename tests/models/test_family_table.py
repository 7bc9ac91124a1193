# SPDX-License-Identifier: Apache-2.0
"""The table of families: its lines follow the other tables of the page, and what a report of pytest says."""

from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")  # the other tables of the page, which give it cells, are made with it

from jrl.models.families import FAMILIES
from tests.models import family_table
from tests.models.family_table import BEGIN, END, PAGE, cells, insert, outcomes, row
from tests.models.family_training import CONFIGS

pytestmark = pytest.mark.parity

REPORT = """<testsuite>
<testcase name="test_one_ppo_iteration[gpt2-hydra]"/><testcase name="test_one_ppo_iteration[gpt2-lora]"/>
<testcase name="test_one_ppo_iteration[llama-hydra]"/>
<testcase name="test_one_ppo_iteration[llama-lora]"><failure/></testcase>
<testcase name="test_one_ppo_iteration[phi-hydra]"><skipped/></testcase>
<testcase name="test_another[opt-hydra]"/></testsuite>"""


def test_a_family_has_passed_where_all_its_tests_have():
    found = outcomes("ppo", ElementTree.fromstring(REPORT))
    assert found == {("gpt2", "ppo"): "yes", ("llama", "ppo"): "FAILED"}


def test_a_line_keeps_what_was_not_run_again():
    page = PAGE.read_text(encoding="utf-8")
    (old,) = (line for line in cells(page, BEGIN, END) if line[0] == "gpt2")
    new = row("gpt2", page, {("gpt2", "mesh"): "FAILED"}).strip("| ").split(" | ")
    assert new[6] == "FAILED" and new[:6] + new[7:] == old[:6] + old[7:]


def test_the_page_has_the_lines_that_its_other_tables_make():
    """Run `python tests/models/family_table.py --columns ""` where this fails."""
    page = PAGE.read_text(encoding="utf-8")
    assert [line[0] for line in cells(page, BEGIN, END)] == sorted(CONFIGS)
    assert insert(page, {}) == page
    assert "FAILED" not in page and "DIFFERENT" not in page and "WRONG" not in page


def test_the_page_has_every_family_that_writes_text():
    page = PAGE.read_text(encoding="utf-8")
    writers = sorted(name for name, family in FAMILIES.items() if family.kind != "encoder")
    assert [line[0] for line in cells(page, BEGIN, END)] == writers


def test_every_column_has_tests():
    assert len(family_table.HEAD[0].split("|")) - 2 == 4 + len(family_table.COLUMNS) + 1
