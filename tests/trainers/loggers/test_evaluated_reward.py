# SPDX-License-Identifier: Apache-2.0
import numpy as np
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


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_equal_means_are_no_difference(error):
    assert not EvaluatedReward(4, 0.5, error).is_within_error(EvaluatedReward(0, 0.5, error))


def evaluated(means, *, step=0, error=0.2):
    figures = {"reward/mean": float(np.nanmean(means)), "reward/standard_error": error}
    told = [None if np.isnan(mean) else float(mean) for mean in means]
    return EvaluatedReward.of({"step": step, "evaluation": 0, "sampling/reward_means": told} | figures)


def test_two_evaluations_are_compared_prompt_by_prompt():
    """Prompts that differ much, each of which gains a little: the gain is certain, and both means are not."""
    first = np.linspace(0, 1, 16)
    gains = np.tile([0.01, 0.03], 8)
    found = evaluated(first + gains, step=4).change_from(evaluated(first))
    # Mean 0.02, deviation 0.01 * sqrt(16 / 15), over the root of 16.
    np.testing.assert_allclose(found, (0.02, 0.01 / np.sqrt(15)), rtol=1e-9)
    assert not evaluated(first + gains).is_within_error(evaluated(first))
    assert evaluated(first + np.tile([-0.99, 1.01], 8)).is_within_error(evaluated(first))
    assert evaluated(first - 0.5).change_from(evaluated(first)) == (-0.5, pytest.approx(0, abs=1e-12))


def test_prompts_without_a_reward_are_in_no_pair():
    first, last = np.arange(10.0), np.arange(10.0) + np.tile([1.0, 3.0], 5)
    first[0] = last[1] = np.nan
    mean, error = evaluated(last[2:]).change_from(evaluated(first[2:]))
    assert mean == 2.0 and evaluated(last).change_from(evaluated(first)) == (mean, error)


@pytest.mark.parametrize(("firsts", "lasts"), [(7, 7), (9, 8), (9, 0)], ids=["few", "others", "an older run"])
def test_without_pairs_the_errors_are_independent(firsts, lasts):
    first, last = (
        evaluated(np.arange(9.0))._replace(prompt_means=[1.0] * firsts),
        evaluated(np.arange(9.0) + 1)._replace(prompt_means=[2.0] * lasts),
    )
    assert last.change_from(first) == (1.0, pytest.approx(0.2 * np.sqrt(2)))
    assert last._replace(error=0.0).change_from(first._replace(error=0.0)) is None


def test_a_swept_value_has_figures_of_its_own():
    record = {"step": 0, "reward/mean@beta=1": 0.5, "reward/standard_error@beta=1": 0.1}
    assert EvaluatedReward.of(record) is None
    assert EvaluatedReward.of(record, suffix="@beta=1").figure == "0.5 +- 0.1"
