# SPDX-License-Identifier: Apache-2.0
"""`jrl report`: a run, or several, as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jrl.trainers.cards.report import read_run, report


def add_flags(command: argparse.ArgumentParser) -> None:
    """Flags of `jrl report`."""
    command.add_argument(
        "run", nargs="+", help="folder of a run (`train.checkpoint_dir`), finished or at work"
    )
    command.add_argument("--output", metavar="HTML", help="default: report.html in the first run's folder")


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl report RUN [RUN ...]`: writes the page and says where it is.

    Raises:
      ValueError: If a folder holds no run, or there are unknown flags.
    """
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    folders = [Path(name) for name in flags.run]
    runs = [read_run(folder) for folder in folders]
    target = folders[0] / "report.html" if flags.output is None else Path(flags.output)

    def work() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(report(runs), encoding="utf-8", errors="backslashreplace")
        print(target)

    return work
