# SPDX-License-Identifier: Apache-2.0
"""Text that others wrote (a policy, a data set, a checkpoint's name), made safe for where it is shown.

A terminal obeys escape codes, Markdown obeys brackets and backticks, YAML obeys its document marks. Files of JSON lines
need none of this: JSON escapes what it must, and they hold every text as it was.
"""

from __future__ import annotations

import re
import unicodedata

_KEPT = "\n\t"
# Bidirectional overrides and isolates turn the rest of a line around; line and paragraph separators begin a new one.
_INVISIBLE = frozenset("\u2028\u2029\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&#~$!])")
_TICKS = re.compile(r"`+")


def for_terminal(text: str) -> str:
    r"""A text without a character that a terminal obeys; line breaks and tabs stay.

    Control characters (C0, DEL and C1, so every escape code), characters that turn the direction of writing and lone
    surrogates appear as Python writes them, such as `\x1b`.

    Example:
      >>> print(for_terminal("a\x1b[2Jb\x9b1mc"))
      a\x1b[2Jb\x9b1mc
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(letter) if _is_unsafe(letter) else letter for letter in text)


def for_markdown(text: str) -> str:
    r"""A text as one line of Markdown that shows it and does nothing: no link, no HTML, no cell of a table ends.

    Example:
      >>> print(for_markdown("[x](javascript:y) <script>"))
      \[x\](javascript:y) \<script\>
    """
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def code_span(text: str) -> str:
    """A text as code in a line of Markdown, in a table as elsewhere; backticks in it do not end it."""
    shown = one_line(text).replace("|", "\\|")
    longest = max((len(run) for run in _TICKS.findall(shown)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not shown.strip() else ""
    return f"{fence}{space}{shown}{space}{fence}"


def code_block(text: str, language: str = "") -> str:
    """A text as a block of code in Markdown, its fence longer than any in the text."""
    safe = for_terminal(text)
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(safe)), default=0))
    return f"{fence}{language}\n{safe.rstrip()}\n{fence}"


def one_line(text: str) -> str:
    """A text as `for_terminal` gives it, on one line."""
    return " ".join(for_terminal(text).split())


def _is_unsafe(letter: str) -> bool:
    if letter in _KEPT:
        return False
    return letter in _INVISIBLE or unicodedata.category(letter) in ("Cc", "Cs")


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
