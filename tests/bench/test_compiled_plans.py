# SPDX-License-Identifier: Apache-2.0
"""docs/compiled.md and the predicted seconds of docs/scaling.md are what the files of results say."""

import re

import pytest

from benchmarks.compiled_plans import (
    PAGE,
    RESULTS,
    ROOT,
    SECONDS,
    SHAPES,
    page,
    recorded,
    seconds_lines,
    shape_of,
    whole,
)

DECODING = [shape for shape in SHAPES if shape.only == ("sample",)]


def test_the_page_of_recipes_is_its_file():
    assert PAGE.read_text(encoding="utf-8") == page(list(recorded(RESULTS)))


def test_the_tables_of_seconds_are_their_file():
    """But for what is measured, which is written by hand. Some shapes on TPUs are not compiled yet."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = [line for line in seconds_lines(list(recorded(SECONDS))) if line.endswith("- |")]
    assert len(lines) > len(DECODING)
    for line in lines:
        assert line.removesuffix("- |") in page


@pytest.mark.parametrize("shape", DECODING, ids=lambda shape: shape.model)
def test_kernels_of_a_token_are_as_written(shape):
    """Of those of a layer one is no token's: a prompt is read by fewer than a token is, once a call."""
    rows = list(recorded(SECONDS))
    two, three = (
        row["programs"]["sample"]["starts"]
        for layers in (2, 3)
        for row in rows
        if shape_of(row) == shape and row["layers"] == layers
    )
    layer, of_prompts = divmod(three - two, shape.response)
    assert of_prompts < 100, "rounds of the loop are not the response's"
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    if shape.model == "0.5B":
        (said,) = re.findall(r"takes (\d+) kernels a layer in place of 13, and \[(\d+) in all\]", text)
        total = round(whole(shape, rows)["sample"]["starts"] / shape.response)
        assert [*map(int, said)] == [layer, total]
