# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hardware.md is what `jrl plan` counts."""

from pathlib import Path

import pytest

from benchmarks.hardware_plans import METHODS, MODELS, at_most, cell

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")


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
