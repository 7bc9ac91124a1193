# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hardware.md is what `jrl plan` counts."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hardware_plans import METHODS, MODELS, at_most, cell

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "hardware.md").read_text(encoding="utf-8")


def test_how_far_plans_are_off_is_as_the_other_page_says():
    """Of GPUs: plans, those within a fifth, too low and too high, over all kinds."""
    compiled = (DOCS / "compiled.md").read_text(encoding="utf-8")
    said = re.search(
        r"in (\d+) of (\d+) cases\..* in (\d+) of (\d+); of the others (\d+) are too low and (\d+) too", PAGE
    )
    sample, update = (
        np.sum([[*map(int, found)] for found in re.findall(pattern, compiled, re.MULTILINE)], axis=0).tolist()
        for pattern in (rf"^\| gpu:\w+ \| {name}" + r" \| (\d+)" * 4 for name in ("sample", "update"))
    )
    assert [int(number) for number in said.groups()] == [
        sample[1],
        sample[0],
        update[1],
        update[0],
        *update[2:],
    ]


def row(model: str, trained: str) -> list[str]:
    """Cells of a row of the page, one for each method."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {model} | {trained} |")]
    return [text.strip() for text in line.split("|")[3:-1]]


@pytest.mark.parametrize(("method", "frozen_dtype"), [("PPO", None), ("SFT", "bfloat16")])
def test_a_cell_is_planned_anew(method, frozen_dtype):
    name = "GPT-2, 0.1B"
    found = row(name, "all layers" if frozen_dtype is None else "LoRA")[list(METHODS).index(method)]
    assert cell(at_most(MODELS[name], method, frozen_dtype)) == found


@pytest.mark.parametrize(
    ("gib", "expected"),
    [(7.2, "7.2 (8)"), (7.3, "7.3 (16)"), (126.9, "126.9 (141)"), (127.0, "127.0 (several)")],
)
def test_a_card_keeps_a_tenth_free(gib, expected):
    assert cell(gib) == expected
