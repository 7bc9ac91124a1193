# SPDX-License-Identifier: Apache-2.0
"""Every mistake is refused in words that name argument, expectation, what came, and what to do."""

import re

import pytest

from tests.mistakes.table import MISTAKES, Place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = Place(tmp_path_factory.mktemp("mistakes"))
    assert found.model and found.t5  # before a test is timed
    return found


@pytest.fixture(scope="module")
def judging(place):
    """The trainer that judges completions, with its programs compiled."""
    place.trainer.evaluate()
    return place


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_the_message_has_its_parts(mistake, place, judging):
    message = " ".join(mistake.message(place).split())
    missing = {
        part: text
        for part, text in vars(mistake).items()
        if part in ("argument", "expected", "got", "remedy") and " ".join(text.split()) not in message
    }
    assert not missing, message


def test_each_remedy_names_something_to_write():
    """A flag, a field, a command or a value: in backticks or quotes, in capitals, a number, a call or a pair."""
    written = re.compile(
        r"`[^`]+`|'[^']+'|\d|\w\(|\w+: \w+|\.(?:txt|csv)\b|\b[A-Z_]{4,}\b|python -c|\bnull\b|\{\""
    )
    assert [mistake.name for mistake in MISTAKES if not written.search(mistake.remedy)] == []


def test_there_are_enough_and_each_has_all_parts():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 40
    assert all(
        mistake.argument and mistake.expected and mistake.got and mistake.remedy for mistake in MISTAKES
    )
