# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hardware.md is what `jrl plan` counts, and what a compiler reserved."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hardware_plans import METHODS, MODELS, TRAINED, at_most, cell, on_file

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
    name, trained = "GPT-2, 0.1B", "all layers" if frozen_dtype is None else "LoRA"
    found = row(name, trained)[list(METHODS).index(method)]
    assert cell(at_most(MODELS[name], method, frozen_dtype), on_file()[name, trained, method]) == found


def shown() -> dict[tuple[str, str, str], tuple[float, float | None, str]]:
    """GiB planned and compiled, and the card, of each cell."""
    cells = {}
    for name, trained in product(MODELS, TRAINED):
        for method, text in zip(METHODS, row(name, trained), strict=True):
            planned, reserved, card = re.fullmatch(r"([\d.]+) / ([\d.]+|-) \((\w+)\)", text).groups()
            cells[name, trained, method] = float(planned), None if reserved == "-" else float(reserved), card
    return cells


def test_what_a_compiler_reserved_is_what_is_on_file():
    reserved = on_file()
    for case, (planned, found, card) in shown().items():
        assert found == (round(reserved[case], 1) if case in reserved else None), case
        # A rounded plan may lie on the other side of a card's limit.
        assert card in {cell(planned + off, reserved.get(case)).split("(")[1][:-1] for off in (-0.05, 0.05)}


def test_how_far_the_tables_plans_are_off_is_as_the_page_says():
    said = re.search(
        r"Of the (\d+) cases .* between (\d+) % too low and (\d+) % too high, and all others of 1 GiB and more "
        r"between (\d+) % too low and (\d+) % too high",
        PAGE,
    )
    off: dict[bool, list[float]] = {True: [], False: []}
    cells = shown()
    compiled = {case: found for case, (_, found, _) in cells.items() if found is not None}
    for case, reserved in on_file().items():
        planned, *_ = cells[case]
        if reserved >= 1:
            off[case[0].endswith(("7B", "13B"))].append(100 * (planned / reserved - 1))
    bounds = [round(sign * end(off[kind])) for kind in (True, False) for sign, end in ((-1, min), (1, max))]
    assert [int(number) for number in said.groups()] == [len(compiled), *bounds]


@pytest.mark.parametrize(
    ("planned", "reserved", "expected"),
    [
        (7.2, None, "7.2 / - (8)"),
        (7.2, 7.3, "7.2 / 7.3 (16)"),
        (7.3, 7.2, "7.3 / 7.2 (16)"),
        (126.9, None, "126.9 / - (141)"),
        (127.0, None, "127.0 / - (several)"),
    ],
)
def test_a_card_keeps_a_tenth_free(planned, reserved, expected):
    assert cell(planned, reserved) == expected


def test_the_readme_says_the_same():
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    said = re.search(
        r"LoRA takes ([\d.]+) GiB at 0.5B parameters, ([\d.]+) at 1B and (\d+) at 7B, or (\d+) with", readme
    )
    small, middle, large, rounded = (
        on_file()[name, trained, "PPO"]
        for name, trained in (
            ("Qwen2.5 0.5B", "LoRA"),
            ("Llama 3.2 1B", "LoRA"),
            ("Llama 2 7B", "LoRA"),
            ("Llama 2 7B", "LoRA, base in 4 bits"),
        )
    )
    assert said.groups() == (f"{small:.1f}", f"{middle:.1f}", f"{large:.0f}", f"{rounded:.0f}")
