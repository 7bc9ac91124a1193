# SPDX-License-Identifier: Apache-2.0
"""Against torch transformers, for every decoder family: each stage, greedy decoding, and the way back."""

import pytest

from tests.models import family_cases, multimodal_cases

CASES = family_cases.CASES | multimodal_cases.CASES
pytestmark = pytest.mark.parity
pytest.importorskip("torch", reason="needs the parity extra")


@pytest.mark.parametrize("case", CASES)
def test_every_stage_equals_torch(case, tmp_path):
    from tests.models.parity import compare

    report = compare(CASES[case], tmp_path)
    errors = (report.embeddings, *report.blocks, report.final_norm, report.logits, report.right_padded)
    assert max(errors) < 1e-4, report
    assert report.generation, report
    # The way back loses nothing at all: torch computes with the very numbers it wrote.
    assert report.returned == 0.0 and report.round_trip, report
