# SPDX-License-Identifier: Apache-2.0
"""Texts of others on a terminal, in Markdown and in YAML: shown, and obeyed by nobody."""

from __future__ import annotations

import re
import unicodedata

import pytest

from jrl.trainers.loggers.safe_text import code_block, code_span, for_markdown, for_terminal, one_line

ESCAPES = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "c1": "\x9b2J\x9d0;t\x9c",
    "carriage return": "good\rbad",
    "backspace": "rm\b\bls",
    "delete": "\x7f",
    "nul": "\x00",
    "bidi": "\u202egnp.exe\u202c",
    "lines": "a\u2028b\u2029c\x85d",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("text", ESCAPES.values(), ids=ESCAPES)
def test_nothing_that_a_terminal_obeys_is_left(text):
    found = for_terminal(f"a {text} b")
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Cf", "Zl", "Zp") for letter in found)
    assert found.encode("utf-8") and found.startswith("a ") and found.endswith(" b")


def test_ordinary_text_is_left_alone():
    text = "naïve café\n\t日本語 👩‍🔬 नमस्ते [bold]x[/bold] \\n"
    assert for_terminal(text) == text
    assert one_line("a\n  b\x1b[0m") == r"a b\x1b[0m"


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "![x](https://tracker/pixel.png)",
        "a | b\n---\n# head",
        "`x` **y** ~~z~~ &lt;",
    ],
)
def test_markdown_is_escaped_letter_by_letter(text):
    found = for_markdown(text)
    assert "\n" not in found
    assert re.sub(r"\\(.)", r"\1", found) == " ".join(text.split())
    assert not re.search(r"(?<!\\)[`*_\[\]<>|&#~!]", found)


@pytest.mark.parametrize("text", ["a`b", "``", "`` ` ```", "a|b", "", "x\n---\ny"])
def test_a_span_of_code_ends_where_it_should(text):
    found = code_span(text)
    fence = re.match("`+", found)[0]
    inside = found[len(fence) : -len(fence)]
    assert found.endswith(fence) and "\n" not in found and not re.search(r"(?<!\\)\|", inside)
    assert fence not in re.findall("`+", inside)


def test_a_block_of_code_ends_where_it_should():
    lines = code_block("a\n```\n````\n</details>", "yaml").split("\n")
    assert lines[0] == "`````yaml" and lines[-1] == "`````" and "`````" not in lines[1:-1]
