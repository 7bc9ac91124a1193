# SPDX-License-Identifier: Apache-2.0
"""A small context-free grammar that remembers: the machine that writes the reviews of `corpus.py`.

A grammar is a text file. `[name]` opens a rule and each line below it is one alternative; in an alternative
`{name}` inserts another rule and `(a|b)` one of the two. A rule opened by `[name once]` is drawn once a text
and remembered, so that a film keeps its title. The other rules do not repeat an alternative within a text
while they have a fresh one. That is what keeps a review of five sentences from saying the same thing twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HEADING = re.compile(r"\[(?P<name>[^\s\]]+)(?P<once> once)?\]")
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SYMBOL = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Grammar:
    """Rules of a text.

    Attributes:
      rules: Alternatives by rule name.
      once: Names of the rules that are drawn once a text.
    """

    rules: Mapping[str, tuple[str, ...]]
    once: frozenset[str]

    def __post_init__(self) -> None:
        for name, alternatives in self.rules.items():
            if not alternatives:
                raise ValueError(f"grammar rule [{name}] has no alternative")
            for symbol in {s for text in alternatives for s in _SYMBOL.findall(text)}:
                if symbol not in self.rules:
                    raise ValueError(f"grammar rule [{name}] inserts {{{symbol}}}, which no file defines")


def load_grammar(paths: Iterable[Path]) -> Grammar:
    """Reads one grammar from several files.

    Args:
      paths: Text files in the format of the module's docstring; `#` starts a comment line.
    Returns:
      The rules of all files together.
    Raises:
      ValueError: If a rule is opened twice, is empty, inserts an unknown rule, or a line stands before any
        rule.
    """
    rules: dict[str, list[str]] = {}
    once: set[str] = set()
    for path in paths:
        current: list[str] | None = None
        for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            line = raw.strip()
            heading = _HEADING.fullmatch(line)
            if not line or line.startswith("#"):
                continue
            if heading is None:
                if current is None:
                    raise ValueError(f"{path.name}:{number}: {line!r} stands before the first [rule]")
                current.append(line)
                continue
            if heading["name"] in rules:
                raise ValueError(f"{path.name}:{number}: rule [{heading['name']}] is defined twice")
            current = rules.setdefault(heading["name"], [])
            if heading["once"]:
                once.add(heading["name"])
    return Grammar({name: tuple(lines) for name, lines in rules.items()}, frozenset(once))


@dataclass
class Writer:
    """One text in the making: what has been drawn, and what has been said.

    Attributes:
      grammar: The rules.
      rng: Source of all choices.
      remembered: Text of each `once` rule drawn so far.
      said: Alternatives used so far, by rule.
    """

    grammar: Grammar
    rng: random.Random
    remembered: dict[str, str] = field(default_factory=dict)
    said: dict[str, set[str]] = field(default_factory=dict)

    def expand(self, name: str) -> str:
        """Text of rule `name`, with everything inserted."""
        if name in self.remembered:
            return self.remembered[name]
        said = self.said.setdefault(name, set())
        alternatives = self.grammar.rules[name]
        fresh = [text for text in alternatives if text not in said]
        text = self.rng.choice(fresh or alternatives)
        said.add(text)
        text = self.fill(text)
        if name in self.grammar.once:
            self.remembered[name] = text
        return text

    def fill(self, text: str) -> str:
        """`text` with its choices made and its symbols inserted, left to right."""
        text = _CHOICE.sub(lambda match: self.rng.choice(match[1].split("|")), text)
        return _SYMBOL.sub(lambda match: self.expand(match[1]), text)


def tidy(text: str) -> str:
    """Repairs what insertion leaves behind: `a` before a vowel, `mysterys`, a sentence in lower case."""
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    text = re.sub(r"([^aeiou])ys\b", r"\1ies", text)
    return re.sub(r"(?:^|(?<=[.?!] ))[a-z]", lambda match: match[0].upper(), text)
