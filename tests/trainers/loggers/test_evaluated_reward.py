# SPDX-License-Identifier: Apache-2.0
import pytest

from jrl.trainers.loggers.evaluated_reward import EvaluatedReward

RECORD = {"step": 8, "reward/mean": 0.5941, "reward/standard_error": 0.0312, "sampling/num_prompts": 64}


def test_a_record_in_words():
    assert (
        str(EvaluatedReward.of(RECORD | {"sampling/samples_per_prompt": 1})) == "0.594 +- 0.031 (64 prompts)"
    )
    few = {"sampling/num_prompts": 1, "sampling/samples_per_prompt": 32}
    assert str(EvaluatedReward.of(RECORD | few)) == "0.594 +- 0.031 (1 prompt x 32 samples)"
    assert (
        str(EvaluatedReward.of(RECORD | {"sampling/samples_per_prompt": None}))
        == "0.594 +- 0.031 (64 prompts)"
    )
    assert str(EvaluatedReward.of({"step": 0, "reward/mean": 2})) == "2"


def test_records_without_a_finite_mean():
    assert EvaluatedReward.of({"step": 0}) is None
    assert EvaluatedReward.of({"step": 0, "reward/mean": float("nan")}) is None
    assert EvaluatedReward.of({"step": 0, "reward/mean": None}) is None


@pytest.mark.parametrize(
    ("mean", "error", "within"),
    # The error of the difference of two that are 0.3 and 0.4 is 0.5.
    [(1.49, 0.4, True), (1.51, 0.4, False), (0.51, 0.4, True), (0.49, 0.4, False), (1.01, None, False)],
)
def test_a_difference_within_its_error(mean, error, within):
    assert EvaluatedReward(0, 1.0, 0.3).is_within_error(EvaluatedReward(4, mean, error)) == within


def test_a_swept_value_has_figures_of_its_own():
    record = {"step": 0, "reward/mean@beta=1": 0.5, "reward/standard_error@beta=1": 0.1}
    assert EvaluatedReward.of(record) is None
    assert EvaluatedReward.of(record, suffix="@beta=1").figure == "0.5 +- 0.1"
