# SPDX-License-Identifier: Apache-2.0
"""What the runner adds to pytest in a seed's folder: one JSON line a test, and a time limit for each.

`SEED_REPORT` names the file of lines, `SEED_TEST_LIMIT` the seconds that one test may take. The limit of hypothesis,
0.2 s an example, is off: a first call compiles.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

with suppress(ImportError):  # only some seeds test with it
    from hypothesis import settings

    settings.register_profile("seeds", deadline=None)
    settings.load_profile("seeds")


def _told(**fields: Any) -> None:
    with Path(os.environ["SEED_REPORT"]).open("a") as file:
        file.write(json.dumps(fields) + "\n")


def _line(report: Any) -> str:
    """The last line of what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if crash else lines[-1]) if lines else ""


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _told(test=report.nodeid, outcome="failed", message=_line(report), when="collect")


def pytest_runtest_logreport(report: Any) -> None:
    """One phase of a test; a skip or a failure in setting up counts as the test's own."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        message = "" if report.passed else _line(report)
        _told(test=report.nodeid, outcome=report.outcome, message=message, when=report.when)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """All tests that will run, so that those that a dead process never reached are known."""
    for item in items:
        _told(test=item.nodeid, outcome="collected", message="", when="collect")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Ends a test that takes too long."""
    limit = int(os.environ["SEED_TEST_LIMIT"])

    def late(*_: Any) -> None:
        raise TimeoutError(f"{item.nodeid} took longer than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
