# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.mistakes` prints each mistake with the message that a user reads, for people who judge them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.mistakes.table import MISTAKES, Place


def main() -> None:
    """Makes all mistakes in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for number, mistake in enumerate(MISTAKES, start=1):
            print(f"{number}. {mistake.name}\n{mistake.message(place)}\n", flush=True)


if __name__ == "__main__":
    main()
