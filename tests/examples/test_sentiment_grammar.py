# SPDX-License-Identifier: Apache-2.0
"""The grammar machine: what it remembers, what it avoids, and how it refuses a broken file."""

import random

import pytest

from examples.sentiment.grammar import Writer, load_grammar, tidy

RULES = """
# a comment
[greeting]
(hi|hello) {name}, {thing} and {thing}

[name once]
Ann
Bob
Cid

[thing]
apple
pear
"""


def write(tmp_path, text):
    path = tmp_path / "rules.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def grammar(tmp_path):
    return load_grammar([write(tmp_path, RULES)])


def test_rules_are_read(grammar):
    assert grammar.rules["name"] == ("Ann", "Bob", "Cid")
    assert grammar.once == {"name"}


def test_once_rules_are_remembered_and_others_not_repeated(grammar):
    for seed in range(20):
        writer = Writer(grammar, random.Random(seed))
        first, second = writer.expand("greeting"), writer.expand("greeting")
        name = writer.remembered["name"]
        assert first.split()[0] in ("hi", "hello")
        assert name in first and name in second
        assert sorted(first.split(", ")[1].split(" and ")) == ["apple", "pear"]


def test_an_exhausted_rule_starts_again(grammar):
    writer = Writer(grammar, random.Random(0))
    assert {writer.expand("thing") for _ in range(2)} == {"apple", "pear"}
    assert writer.expand("thing") in ("apple", "pear")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\n{b}\n", r"rule \[a\] inserts \{b\}, which no file defines"),
        ("[a]\nx\n[a]\ny\n", r"rules.txt:3: rule \[a\] is defined twice"),
        ("x\n", r"rules.txt:1: 'x' stands before the first \[rule\]"),
        ("[a]\n[b]\nx\n", r"rule \[a\] has no alternative"),
    ],
)
def test_a_broken_grammar_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_grammar([write(tmp_path, text)])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a awful film. but a hundred", "An awful film. But a hundred"),
        ("other mysterys and documentarys, two boys", "Other mysteries and documentaries, two boys"),
        ("is it? it is", "Is it? It is"),
    ],
)
def test_tidy(raw, expected):
    assert tidy(raw) == expected
