# SPDX-License-Identifier: Apache-2.0
"""A reward model on preferences whose best attainable accuracy and true probabilities are known.

`benchmarks/reward_calibration.py` does it at full size, and keeps what it found beside it.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reward_calibration import draw_pairs, hidden_weights, measure, sigmoid, train_and_measure

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_it_comes_near_the_best_attainable_and_knows_how_sure_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_CACHE", str(tmp_path / "cache"))
    found = train_and_measure(tmp_path, num_pairs=12_000, held_out=3_000, batch_size=64)
    assert found["accuracy"] > found["best_accuracy"] - 0.03
    assert found["true_ece"] < 0.05 and found["ece"] < found["best_ece"] + 0.05
    assert found["loss"] < found["best_loss"] + 0.03


def test_the_kept_result_is_within_a_hundredth_of_the_best_attainable_and_calibrated():
    found = json.loads((ROOT / "benchmarks" / "reward_calibration.json").read_text())
    assert found["best_accuracy"] - found["accuracy"] < 0.01
    assert found["ece"] < 0.02 and found["true_ece"] < 0.01
    assert sum(row["pairs"] for row in found["bins"]) == found["held_out_pairs"]


def test_the_hidden_score_measures_as_the_best_and_doubling_it_as_too_sure():
    _, odds = draw_pairs(0, 4_000, hidden_weights())
    best, sure, random = (
        measure(odds, odds),
        measure(2 * odds, odds),
        measure(np.full(odds.shape, 1e-9), odds),
    )
    assert best["accuracy"] == best["best_accuracy"] and best["true_ece"] < 0.005
    assert best["probability_error"] == 0.0 and best["ece"] == best["best_ece"] < 0.03
    assert sure["accuracy"] == best["accuracy"] and sure["true_ece"] > 0.03 and sure["loss"] > best["loss"]
    assert random["loss"] == pytest.approx(np.log(2), abs=1e-4)
    # Labels are drawn with the true probabilities.
    expected = sigmoid(np.abs(odds)).mean()
    assert (odds > 0).mean() == pytest.approx(expected, abs=0.03)
