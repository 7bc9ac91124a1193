# SPDX-License-Identifier: Apache-2.0
"""docs/compiled.md and the predicted seconds of docs/scaling.md are what the files of results say."""

import re

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


def test_kernels_of_a_token_are_as_written():
    """Of 0.5B, from two layers and three. A further layer has a few kernels for prompts, too, once a call."""
    (shape,) = (each for each in DECODING if each.model == "0.5B")
    rows = list(recorded(SECONDS))
    starts = {row["layers"]: row["programs"]["sample"]["starts"] for row in rows if shape_of(row) == shape}
    layer, of_prompts = divmod(starts[3] - starts[2], shape.response)
    assert of_prompts < 100, "rounds of the loop are not the response's"
    total = round(whole(shape, rows)["sample"]["starts"] / shape.response)
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"takes (\d+) kernels a layer in place of 13, and \[(\d+) in all\]", text)
    assert [*map(int, said)] == [layer, total]
