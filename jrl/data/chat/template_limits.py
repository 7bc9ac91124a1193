# SPDX-License-Identifier: Apache-2.0
"""Limits on what a chat template may take: it is a program that comes with a tokenizer; jinja's sandbox has none."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

MAX_SECONDS = 10.0
"""Of one rendering."""
MAX_CHARACTERS = 10_000_000
"""Of one rendered dialogue, and the greatest number that a template may name."""
MAX_BYTES = 4 << 30
"""By how much the process may grow while one dialogue is rendered, once that takes longer than `_SECONDS_UNWATCHED`."""
_SECONDS_UNWATCHED = 0.1
"""After which the memory is looked at: ordinary dialogues are long done, whatever other threads allocate meanwhile."""
_FILE = "<template>"
"""What jinja calls the code of a template that was no file."""
_WIDTH = re.compile(r"(?:%|\{[^{}]*:)[^\d{}%]*(\d+)")
"""Widths in `"%10d"` and `"{:>10}"`."""
_ONE_AT_A_TIME = threading.RLock()
"""transformers keeps one compiled template for all threads, which can track the marks of one rendering only."""


@contextlib.contextmanager
def bounded_rendering() -> Iterator[None]:
    """Limits what is rendered inside to `MAX_SECONDS` and, on Linux, to `MAX_BYTES` of additional memory.

    Clock and memory are looked at between the lines of the template, so a loop ends however deep it is. Nothing is
    limited for the process as a whole: another thread, that of an update perhaps, may allocate what it likes.

    Raises:
      ValueError: Inside, when a limit is reached; it does not name the row.
    """
    with _ONE_AT_A_TIME:
        begin, before = time.monotonic(), sys.gettrace()
        bytes_before = _resident_bytes()
        looked = begin

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            del event, argument
            return check if frame.f_code.co_filename == _FILE else None

        def check(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal looked
            del frame, event, argument
            now = time.monotonic()
            if now - begin > MAX_SECONDS:
                raise ValueError(
                    f"the chat template took more than {MAX_SECONDS:g} s: does a loop of it not end?"
                )
            if now - looked > _SECONDS_UNWATCHED:
                looked = now
                if _resident_bytes() - bytes_before > MAX_BYTES:
                    raise ValueError(
                        f"the chat template asks for too much: it took more than {MAX_BYTES >> 30} GiB of memory."
                    )
            return check

        sys.settrace(follow)
        try:
            yield
        except (MemoryError, OverflowError) as error:
            raise ValueError(
                f"the chat template asks for too much: {error or type(error).__name__}."
            ) from error
        finally:
            sys.settrace(before)


def _resident_bytes() -> int:
    """Memory of the process, where the system says it cheaply (Linux); else 0."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.lru_cache(maxsize=64)  # a data set renders one template for every row and turn
def check_template(template: str) -> None:
    """Refuses what a template has no use for and nothing could interrupt: powers, and numbers beyond `MAX_CHARACTERS`.

    Raises:
      ValueError: If there is one.
    """
    from jinja2 import Environment
    from jinja2.exceptions import TemplateSyntaxError

    try:
        tokens = [(kind, value) for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:  # said where it is rendered
        return
    for kind, value in tokens:
        largest = _largest_number(kind, value)
        if largest > MAX_CHARACTERS:
            raise ValueError(
                f"the chat template asks for too much: it names {largest:,.0f}, and a dialogue may have "
                f"{MAX_CHARACTERS:,} characters."
            )
    for before, token in itertools.pairwise(tokens):
        # `f(**names)` is no power.
        if token == ("operator", "**") and before not in (("operator", "("), ("operator", ",")):
            raise ValueError("the chat template raises a number to a power (`**`), which jrl does not run.")


def _largest_number(kind: str, value: str) -> float:
    """The number that a token of a template is, or the largest width that it asks for where it is a format."""
    if kind == "integer":
        return int(value, 0)
    if kind == "float":
        return float(value)
    return max(map(float, _WIDTH.findall(value)), default=0) if kind == "string" else 0


def check_size(text: str) -> str:
    """The text, if it is no longer than `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"the chat template wrote {len(text):,} characters for one dialogue; {MAX_CHARACTERS:,} are allowed."
        )
    return text
