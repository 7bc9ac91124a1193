# SPDX-License-Identifier: Apache-2.0
"""Reward functions that compare an answer with the known solution: `--reward jrl.rewards:accuracy_reward`.

A policy under training attacks its verifier, so these are strict and bounded. Nothing is evaluated: a number is read
by a grammar of digits, sign, point, exponent and fraction, never computed from powers, products or names. At most the
last `MAX_TEXT` characters of a completion are looked at, and an answer of more than `MAX_ANSWER` characters is none.
Only what is marked as the answer counts, and only the last such mark: naming several candidates gains nothing. What
the grammar does not know is compared as text, so the error made is to miss a right answer (`1024` for `2^{10}`), not to
reward a wrong one. `docs/verifiers.md` lists what is taken for equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import NamedTuple

from jrl.isolation import isolated, isolated_environment

__all__ = [
    "Number",
    "accuracy_reward",
    "final_answer",
    "isolated",
    "isolated_environment",
    "number_reward",
    "read_number",
    "think_format_reward",
]

MAX_TEXT = 20_000
"""Characters at the end of a completion in which its answer is looked for."""
MAX_ANSWER = 200
"""Characters of an answer."""

_BOXES, _MARKER = ("\\boxed{", "\\fbox{"), "####"
_OPEN, _CLOSE = "<think>", "</think>"
# Digits are ASCII: `\d` and `int` also take those of every other script. Exponents have two digits, so that no answer
# makes a number of a million digits.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?) ?"
    rf"(?:\\[dt]?frac ?\{{(?P<above>-?{_DIGITS})\}} ?\{{(?P<below>{_DIGITS})\}}"
    rf"|(?P<over>{_DIGITS}) ?/ ?(?P<under>{_DIGITS})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}})(?![0-9])"
    r"| ?\\(?:times|cdot) ?10\^\{?(?P<power>[-+]?[0-9]{1,2})\}?(?![0-9]))?)"
)
_UNIT = re.compile(r"(?:[^\W\d_]|[°%\\]).*")
# `\leftarrow` is another command than `\left`. `~` is a space before a unit; elsewhere it negates or relates.
_SILENT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,; $()]|\$|(?<=[0-9])~(?= ?(?:[^\W\d_]|[°%\\]))")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}]*)\}")
_LISTED = re.compile(r",\s|\s,")
_SPACES = re.compile(r"\s+")
_LOOSE = re.compile(r"(?<![\w.]) | (?![\w.\\])")


class Number(NamedTuple):
    """A number as it is written.

    Attributes:
      value: Exactly.
      unit: What stands behind it, such as "km" or "%"; "" without.
    """

    value: Fraction
    unit: str


def accuracy_reward(
    outputs: Sequence[str], solution: Sequence[str | int | float], prompts: Sequence[str] | None = None
) -> list[float]:
    r"""1 where a completion's final answer is the solution, 0 elsewhere.

    Answers are equal if both are the same number with the same unit (`0.5`, `\frac{1}{2}` and `1/2` are), or the same
    text but for spaces, `$`, `\text{}` and the like.

    Args:
      outputs: Completions; each marks its answer as `final_answer` reads it.
      solution: Column of the prompts' metadata: the answer, or a worked solution that marks it in the same way.
      prompts: What was asked: a completion that repeats it is read from behind it, since prompts hold examples.
    Raises:
      TypeError: If a solution is neither text nor number; None and booleans are none.
      ValueError: If a solution is empty, no finite number, or longer than an answer may be (`MAX_ANSWER`).
    Example:
      >>> accuracy_reward([r"Half: \boxed{\frac{1}{2}}", "It is 0.5"], ["0.5", "0.5"])
      [1.0, 0.0]
    """
    asked = [""] * len(outputs) if prompts is None else prompts
    known = [_solution(value, row) for row, value in enumerate(solution)]
    return [
        float(_agree(final_answer(_behind(text, prompt)), value))
        for text, prompt, value in zip(outputs, asked, known, strict=True)
    ]


def number_reward(outputs: Sequence[str], solution: Sequence[str | int | float]) -> list[float]:
    r"""1 where the whole completion is nothing but the solution's number, 0 elsewhere: for tasks of bare numbers.

    Args:
      outputs: Completions; only spaces around the number are forgiven, no `$`, `\text{}` or full stop.
      solution: Column of the prompts' metadata: a number, or a text that is one.
    Raises:
      TypeError: If a solution is neither text nor number; None and booleans are none.
      ValueError: If a solution is no finite number.
    Example:
      >>> number_reward(["42", " 42.0 ", "42 or 43", "the answer is 42"], [42, 42, 42, 42])
      [1.0, 1.0, 0.0, 0.0]
    """
    known = [(value, read_number(_solution(value, row))) for row, value in enumerate(solution)]
    for row, (value, number) in enumerate(known):
        if number is None:
            raise ValueError(f"`solution` must be numbers, got {value!r:.80} in row {row}.")
    return [float(_parse(text.strip()) == number) for text, (_, number) in zip(outputs, known, strict=True)]


def think_format_reward(outputs: Sequence[str]) -> list[float]:
    """1 where a completion is `<think>...</think>...` with one opening tag, at its very beginning; 0 elsewhere.

    Args:
      outputs: Completions.
    Example:
      >>> think_format_reward(["<think>so</think>42", "42", "<think>so <think>so</think>42"])
      [1.0, 0.0, 0.0]

    Reference: `think_format_reward` of TRL.
    """
    return [float(text.startswith(_OPEN) and text.count(_OPEN) == 1 and _CLOSE in text) for text in outputs]


def final_answer(text: str) -> str | None:
    r"""The answer that a text marks as final, as it is written; None if it marks none.

    That is the content of the last `\boxed{...}` (or `\fbox`), whose braces must close; without a box, the rest of the
    line behind the last `####`. Where a text reasons in `<think>...</think>`, only what follows counts.

    Example:
      >>> final_answer(r"\boxed{41}, no: \boxed{\frac{1}{2}}."), final_answer("#### 18"), final_answer("I guess 18")
      ('\\frac{1}{2}', '18', None)
    """
    if _OPEN in text or _CLOSE in text:
        _, closed, rest = text.rpartition(_CLOSE)
        text = rest.partition(_OPEN)[0] if closed else ""
    text = text[-MAX_TEXT:]
    start, box = max((text.rfind(box), box) for box in _BOXES)
    if start >= 0:
        return _braced(text, start + len(box))
    _, marker, rest = text.rpartition(_MARKER)
    return (rest.split("\n", 1)[0].strip() or None) if marker else None


def read_number(text: str) -> Number | None:
    r"""The number that a text is, with its unit; None where it is anything more or anything else.

    Example:
      >>> read_number("1,250 km"), read_number(r"-\frac{1}{4}"), read_number("2^{10}"), read_number("4 2")
      (Number(value=Fraction(1250, 1), unit='km'), Number(value=Fraction(-1, 4), unit=''), None, None)
    """
    if len(text) > MAX_ANSWER:
        return None
    spaced = _spaced(text)
    # "4, 200" and "$4$,$200$" are lists of two; beside a comma that groups digits is no space.
    return None if _LISTED.search(spaced) else _parse(_joined(spaced))


def _parse(plain: str) -> Number | None:
    """The number that a text is to the letter, with its unit."""
    if len(plain) > MAX_ANSWER:
        return None
    found = _NUMBER.match(plain)
    if found is None:
        return None
    unit = plain[found.end() :].strip()
    if unit and not _UNIT.fullmatch(unit):
        return None
    value = _value(found)
    return None if value is None else Number(-value if found["sign"] in ("-", "\u2212") else value, unit)


def _value(found: re.Match[str]) -> Fraction | None:
    """The number without its sign; None where it divides by 0."""
    if found["decimal"] is not None:
        power = int(found["exponent"] or found["power"] or 0)
        return Fraction(found["decimal"].replace(",", "")) * Fraction(10) ** power
    above, below = found["above"] or found["over"], found["below"] or found["under"]
    divisor = int(below.replace(",", ""))
    return Fraction(int(above.replace(",", "")), divisor) if divisor else None


def _braced(text: str, start: int) -> str | None:
    """Text between an opening brace, which is passed, and the one that closes it."""
    depth, escaped = 1, False
    for place in range(start, min(len(text), start + MAX_ANSWER + 1)):
        letter = text[place]
        if escaped or letter == "\\":
            escaped = not escaped
            continue
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[start:place].strip() or None
    return None


def _behind(text: str, prompt: str) -> str:
    """A completion without the prompt that it repeats: prompts show how an answer is marked, and may mark some."""
    echoed = prompt.strip()
    marks = (*_BOXES, _MARKER, _CLOSE)
    # Not `rpartition`, whose search backwards takes the product of both lengths where a text is made for it.
    return text.split(echoed)[-1] if any(mark in echoed for mark in marks) else text


def _solution(value: str | int | float, row: int) -> str:
    """A solution as text; of a worked one, what it marks as its answer."""
    # NumPy's numbers are numbers too.
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise TypeError(
            f"`solution` must be texts or numbers, got {value!r:.80} in row {row}: is the column what was meant?"
        )
    if not isinstance(value, str | Integral) and not math.isfinite(value):
        raise ValueError(f"`solution` must be texts or finite numbers, got {value!r} in row {row}.")
    text = str(value)
    found = (final_answer(text) or text).strip()
    if len(found) > MAX_ANSWER:
        raise ValueError(
            f"`solution` must have at most {MAX_ANSWER} characters, got {len(found)} in row {row}: no answer would be "
            "right. A worked solution must mark its answer (`\\boxed{...}` or `####`)."
        )
    if not _normalise(found):
        raise ValueError(
            f"`solution` must not be empty, got {value!r} in row {row}: an empty answer would be right."
        )
    return found


def _agree(answer: str | None, solution: str) -> bool:
    """True where an answer equals the solution."""
    if answer is None or len(answer) > MAX_ANSWER:
        return False
    number = read_number(solution)
    if number is not None:
        return read_number(answer) == number
    return _normalise(answer) == _normalise(solution)


def _normalise(text: str) -> str:
    """A text without what says nothing: math delimiters, spacing commands, a full stop at the end, spare spaces."""
    return _joined(_spaced(text))


def _spaced(text: str) -> str:
    """A text with spaces where there was what says nothing."""
    plain = _WORDS.sub(r" \1", text).replace("\\!", "").replace("{,}", ",").replace("\\%", "%")
    return _SPACES.sub(" ", _SILENT.sub(" ", plain)).strip()


def _joined(spaced: str) -> str:
    """Drops the spaces that say nothing: between two words or numbers one tells ("4 2" is not 42)."""
    return _LOOSE.sub("", spaced).removesuffix(".")
