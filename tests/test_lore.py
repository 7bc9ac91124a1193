# SPDX-License-Identifier: Apache-2.0
"""Rules, tests, mutations and the page about them agree."""

from __future__ import annotations

import pytest

from tests.lore import RULES, TABLE, WAITS, lore_table, lore_tests
from tests.mutations import load_patches, problems

MUTATIONS = load_patches()


def test_there_are_ninety_five_rules() -> None:
    assert len(RULES) == 95


def test_every_lore_test_names_a_rule() -> None:
    assert set(lore_tests()) <= set(RULES)


def test_every_rule_has_a_test_or_waits_for_something() -> None:
    assert [rule for rule in RULES if rule not in lore_tests() and rule not in WAITS] == []


def test_every_rule_with_a_test_has_a_mutation() -> None:
    assert [rule for rule in lore_tests() if rule not in {mutation.rule for mutation in MUTATIONS}] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rule}-{m.target}")
def test_a_mutation_still_fits_the_source(mutation: object) -> None:
    assert problems(mutation) is None


def test_the_page_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == lore_table(), "run: python tests/mutations.py --write-table"
