# SPDX-License-Identifier: Apache-2.0
"""Scores of several reward functions: their weighted sum, their metrics, and what is refused."""

import math

import numpy as np
import pytest

from jrl.rollout.reward_call import RewardCall
from jrl.rollout.reward_columns import (
    check_weights,
    combined_rewards,
    mean_and_std,
    prompt_means,
    reward_columns,
    standard_error,
)
from jrl.rollout.rewards import RewardError
from jrl.rollout.text import Texts

NAMES = ("right", "short")
# Row 0: both; 1: the second does not apply; 2: the first failed; 3: nobody speaks.
REWARDS = [[1.0, 0.0, math.nan, None], [0.25, None, 0.5, math.nan]]


@pytest.mark.parametrize(
    ("scores", "mean", "std"),
    [([2.0, 4.0, 9.0], 5.0, math.sqrt((9 + 1 + 16) / 2)), ([3.0], 3.0, 0.0), ([], math.nan, 0.0)],
    ids=["several", "one", "none"],
)
def test_mean_and_deviation_of_known_scores(scores, mean, std):
    np.testing.assert_allclose(mean_and_std(np.asarray(scores)), (mean, std), rtol=1e-15)


def test_lore_4_14_a_reward_that_does_not_apply_is_absent_from_the_sum():
    found = combined_rewards(REWARDS, (2.0, -4.0))
    np.testing.assert_array_equal(found, [2 * 1 - 4 * 0.25, 2 * 0.0, -4 * 0.5, np.nan])


def test_it_is_summed_in_float64():
    given = [[1e8], [1.0], [-1e8]]
    assert combined_rewards(given, (1.0, 1.0, 1.0)) == [1.0]


def test_one_function_may_speak_of_tokens():
    dense = np.array([1.0, 2.0], np.float32)
    alone = combined_rewards([[dense, None, 3.0]], (2.0,))
    np.testing.assert_array_equal(alone[0], [2.0, 4.0])
    np.testing.assert_array_equal(alone[1:], [np.nan, 6.0])
    assert combined_rewards([[dense]], (1.0,))[0] is dense


def test_beside_one_that_does_the_others_speak_of_the_last_token():
    dense = [np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32), 5.0, None]
    first, second, third, last = combined_rewards([[1.0, None, 2.0, math.nan], dense], (10.0, 2.0))
    np.testing.assert_array_equal(first, [2.0, 14.0])
    np.testing.assert_array_equal(second, [6.0])
    assert third == 30.0 and math.isnan(last)


def test_columns_hold_what_was_said():
    columns = reward_columns(NAMES, REWARDS)
    np.testing.assert_array_equal(
        columns.scores, [[1.0, 0.25], [0.0, np.nan], [np.nan, 0.5], [np.nan, np.nan]]
    )
    assert columns.not_applicable.tolist() == [[False, False], [False, True], [False, False], [True, False]]
    assert columns.metrics() == {
        "reward/right/mean": 0.5,
        "reward/right/std": pytest.approx(math.sqrt(0.5)),
        "reward/right/not_applicable": 1.0,
        "reward/short/mean": 0.375,
        "reward/short/std": pytest.approx(math.sqrt(0.03125)),
        "reward/short/not_applicable": 1.0,
    }
    assert columns.cells() == {
        "reward/right": [1.0, 0.0, None, None],
        "reward/short": [0.25, None, 0.5, None],
    }


def test_a_function_that_is_silent_has_no_mean():
    columns = reward_columns(NAMES, [[None, None], [1.0, 1.0]])
    assert columns.metrics() == {
        "reward/right/not_applicable": 2.0,
        "reward/short/mean": 1.0,
        "reward/short/std": 0.0,
        "reward/short/not_applicable": 0.0,
    }


def test_one_function_has_no_columns_of_its_own():
    columns = reward_columns(["a"], [[1.0, np.ones(2, np.float32)]])
    assert (columns.metrics(), columns.cells(), columns.scores.tolist()) == ({}, {}, [[1.0], [2.0]])


def test_weights_fit_the_functions():
    assert check_weights(None, 2) == (1.0, 1.0) and check_weights([0, 2], 2) == (0.0, 2.0)
    with pytest.raises(ValueError, match=r"`method.reward_weights` must have one entry .*, 2, got 1: \[3\]"):
        check_weights([3], 2)


TEXTS = Texts(["ab", "cd"], ["a", "c"], ["b", "d"], [[1], [2]], np.array([1, 1]), np.array([False] * 2))


def right(outputs):
    return [1.0, None]


def broken(outputs):
    raise OSError("no judge")


def call(tmp_path, functions, **options):
    return RewardCall(functions, None, skip_errors=False, timeout=None, failures=tmp_path, **options)


def test_a_call_weighs_and_names(tmp_path):
    judged = call(tmp_path, [right, right], weights=[1.0, 0.5])(TEXTS, {}, label="x")
    np.testing.assert_array_equal(judged.rewards, [1.5, np.nan])
    assert judged.columns.names == ("right", "right_2")


def test_completions_are_kept_where_one_fails(tmp_path):
    with pytest.raises(RewardError, match=r"`reward_fn\[broken\]` raised OSError: no judge") as caught:
        call(tmp_path, [right, broken])(TEXTS, {}, label="x")
    assert "failed_rollouts_x.jsonl" in caught.value.__notes__[0]


def test_weights_of_a_wrong_length_are_refused_before_a_call(tmp_path):
    with pytest.raises(ValueError, match="one entry a reward function, 2, got 3"):
        call(tmp_path, [right, broken], weights=[1.0] * 3)


def test_the_standard_error_of_a_mean() -> None:
    # Mean 3, deviations -2, -1, 0, 3: variance 14 / 3, over four scores 14 / 12.
    scores = np.array([1.0, np.nan, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(standard_error(scores), np.sqrt(14 / 12), rtol=1e-12)
    assert standard_error(np.array([2.0, np.nan])) is None  # nothing to tell it from
    assert standard_error(np.array([])) is None


def test_scores_of_a_prompt_are_averaged() -> None:
    scores = np.array([1.0, 5.0, 2.0, np.nan, np.nan])
    np.testing.assert_array_equal(prompt_means(scores, ["b", "a", "b", "a", "c"]), [1.5, 5.0, np.nan])
    alone = np.array([0.1, 0.7, 0.2])
    np.testing.assert_array_equal(prompt_means(alone, ["c", "a", "b"]), alone)  # one sample each: as they are


def test_the_error_of_repeated_prompts_is_that_of_new_prompts() -> None:
    """Prompts differ by a deviation of 1 and their samples by 0.1: 32 samples of each tell little of new prompts."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1, (4000, 2, 1)) + rng.normal(0, 0.1, (4000, 2, 32))
    prompts = ["a"] * 32 + ["b"] * 32
    errors = [standard_error(prompt_means(row.ravel(), prompts)) for row in scores]
    # Four deviations of a mean of 4000 variances with a degree of freedom each.
    np.testing.assert_allclose(np.mean(np.square(errors)), (1 + 0.01 / 32) / 2, rtol=4 * np.sqrt(2 / 4000))
    assert standard_error(prompt_means(scores[0, 0], prompts[:32])) is None
