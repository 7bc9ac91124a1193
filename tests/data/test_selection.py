# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.data.selection import (
    KeptSamples,
    best_of_each,
    distinct,
    rising_percentiles,
    score_thresholds,
    select,
)

NAN = float("nan")
# Three prompts of four samples each: solved half of the time, once, never; "ab" comes twice for the first one.
GROUPS = np.repeat([0, 1, 2], 4)
COMPLETIONS = [[1, 2], [3], [1, 2], [4], [1, 2], [5], [6], [7], [8], [9], [10], [11]]
PASSES = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def kept_indices(kept, step=0):
    return kept.at_step(step).indices.tolist()


def chosen(scores, percentiles=(0.5,), *, groups=GROUPS, completions=COMPLETIONS, limit=None):
    return select(
        np.asarray(groups),
        completions,
        np.asarray(scores, float),
        np.asarray(percentiles),
        num_groups=int(np.max(groups)) + 1,
        max_samples_per_prompt=limit,
    )


class TestPercentiles:
    def test_they_rise_evenly_and_reach_the_end(self):
        np.testing.assert_allclose(rising_percentiles(0.7, 0.95, 6), [0.7, 0.75, 0.8, 0.85, 0.9, 0.95])

    def test_a_single_step_takes_the_start(self):
        assert rising_percentiles(0.9, 0.95, 1).tolist() == [0.9]


class TestThresholds:
    def test_golden(self):
        # Quantiles 0.5 and 0.75 of (0 1 2 3): 1.5, 2.25; of (10 20): 15, 17.5; of (5): 5, 5. The lowest of a step is
        # raised and the highest lowered by 1e-3.
        scores, groups = np.array([3.0, 10, 1, 0, 5, 2, 20]), np.array([0, 1, 0, 0, 2, 0, 1])
        found = score_thresholds(scores, groups, np.array([0.5, 0.75]), num_groups=3)
        np.testing.assert_allclose(found, [[1.501, 14.999, 5.0], [2.251, 17.499, 5.0]], rtol=1e-12)

    def test_scores_of_two_values_lose_the_worse_and_keep_the_better(self):
        # Medians 0.5, 0, 0: within [0.001, 0.499].
        np.testing.assert_allclose(
            score_thresholds(PASSES, GROUPS, np.array([0.5]), num_groups=3), [[0.499, 0.001, 0.001]]
        )

    def test_where_the_two_limits_cross_the_upper_one_holds(self):
        found = score_thresholds(
            np.array([2.0, 2.0, 2.0]), np.array([0, 1, 1]), np.array([0.9]), num_groups=2
        )
        np.testing.assert_allclose(found, [[1.999, 1.999]])

    def test_a_prompt_without_scores_has_none(self):
        found = score_thresholds(np.array([0.0, 1.0]), np.array([0, 2]), np.array([0.5]), num_groups=4)
        np.testing.assert_array_equal(np.isnan(found), [[False, True, False, True]])


class TestDistinct:
    def test_of_equal_ones_the_best_stays_and_of_equally_good_ones_the_first(self):
        completions = [[1, 2], [1, 2], [1, 2], [3], [3]]
        scores = np.array([0.0, 2.0, 2.0, 1.0, 1.0])
        assert distinct(np.zeros(5, int), completions, scores).tolist() == [1, 3]

    def test_the_same_completion_of_two_prompts_is_two(self):
        assert distinct(np.array([0, 1]), [[1], [1]], np.zeros(2)).tolist() == [0, 1]

    def test_a_prompt_number_is_not_taken_for_a_token(self):
        assert distinct(np.array([1, 1]), [[1, 2], [2]], np.zeros(2)).tolist() == [0, 1]


def test_the_best_of_each_prompt_and_of_equals_the_first():
    groups, scores = np.array([1, 0, 1, 1, 0]), np.array([2.0, 5, 3, 3, 5])
    assert best_of_each(groups, scores, 1).tolist() == [False, True, True, False, False]
    assert best_of_each(groups, scores, 2).tolist() == [False, True, True, True, True]


class TestSelect:
    def test_lore_8_7_a_known_pass_table_gives_the_exact_set(self):
        # The easy prompt passes twice with one completion, the hard one once, the impossible one never.
        kept = chosen(PASSES)
        assert kept_indices(kept) == [0, 4]
        assert kept.groups.tolist() == [0, 1] and kept.completions == [[1, 2], [1, 2]]
        assert kept.scores.tolist() == [1.0, 1.0]
        assert (kept.num_samples, kept.num_duplicates) == (12, 1)
        np.testing.assert_allclose(kept.threshold_means, [(0.499 + 0.001 + 0.001) / 3])

    def test_lore_8_7_a_cap_keeps_an_easy_prompt_from_flooding_the_set(self):
        scores = [1.0, 1.0, 1.0, 0.9, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert kept_indices(chosen(scores, [0.0])) == [0, 1, 3, 4]
        assert kept_indices(chosen(scores, [0.0], limit=2)) == [0, 1, 4]
        # What repeats another sample takes no place of it.
        assert kept_indices(chosen(scores, [0.0], limit=3)) == [0, 1, 3, 4]

    def test_lore_8_7_the_bar_rises_with_every_improve_step(self):
        groups, completions = [0] * 5 + [1] * 5, [[i] for i in range(10)]
        scores = [0.0, 1, 2, 3, 4, 10, 20, 30, 40, 50]
        kept = chosen(scores, [0.25, 0.5, 1.0], groups=groups, completions=completions)
        # Thresholds: 1 and 20, 2 and 30, 4 and 50; the lowest is raised by 1e-3, which leaves out the sample on it.
        assert [kept_indices(kept, step) for step in range(3)] == [
            [2, 3, 4, 6, 7, 8, 9],
            [3, 4, 7, 8, 9],
            [9],
        ]
        assert kept.num_passes.tolist() == [1, 2, 2, 1, 2, 2, 3]

    def test_repetitions_count_in_the_percentile(self):
        # The median of (1 1 1 0 0.5) is 1, that of the distinct ones (1 0 0.5) would be 0.5.
        completions, groups = [[1], [1], [1], [2], [3], [4], [5]], [0, 0, 0, 0, 0, 1, 2]
        scores = [1, 1, 1, 0, 0.5, 2, -1]
        assert kept_indices(chosen(scores, groups=groups, completions=completions)) == [0, 5]

    def test_samples_without_a_score_are_in_nothing(self):
        kept = chosen([NAN, 0.0, 1.0, NAN] + [NAN] * 4 + [0.0] * 4)
        assert kept_indices(kept) == [2]
        assert (kept.num_samples, kept.num_duplicates) == (6, 0)
        np.testing.assert_allclose(kept.threshold_means, [(0.499 + 0.001) / 2])

    def test_without_any_score_there_is_nothing(self):
        assert chosen([NAN] * 12) is None

    def test_constant_scores_keep_everything_that_differs(self):
        assert kept_indices(chosen([0.0] * 12)) == [0, 1, *range(3, 12)]

    @settings(max_examples=60, deadline=None)
    @given(
        samples=st.lists(
            st.tuples(
                st.integers(0, 3),
                st.lists(st.integers(0, 1), min_size=1, max_size=2),
                st.sampled_from([NAN, 0.0, 0.5, 1.0, -1e6, 1e9]),
            ),
            min_size=1,
            max_size=30,
        ),
        limit=st.sampled_from([None, 1, 3]),
    )
    def test_every_step_keeps_something_and_nothing_twice(self, samples, limit):
        groups, completions, scores = (list(column) for column in zip(*samples, strict=True))
        kept = chosen(
            scores, rising_percentiles(0.5, 1.0, 3), groups=groups, completions=completions, limit=limit
        )
        if np.all(np.isnan(scores)):
            assert kept is None
            return
        before = set(range(len(samples)))
        for step in range(3):
            found = kept.at_step(step)
            keys = {(group, *row) for group, row in zip(found.groups, found.completions, strict=True)}
            assert 0 < len(found.groups) == len(keys) and np.isfinite(found.scores).all()
            assert limit is None or np.bincount(found.groups).max() <= limit
            assert set(found.indices) <= before
            before = set(found.indices)


@pytest.mark.parametrize("step", [0, 1])
def test_kept_samples_survive_json(step):
    kept = chosen([0.1, 0, 0.3, 1 / 3, *PASSES[4:]], [0.25, 0.75]).at_step(step)
    again = KeptSamples.from_plain(json.loads(json.dumps(kept.to_plain())))
    for name in ("groups", "scores", "num_passes", "indices"):
        np.testing.assert_array_equal(vars(again)[name], vars(kept)[name], err_msg=name)
    for name in ("completions", "threshold_means", "num_samples", "num_duplicates"):
        assert vars(again)[name] == vars(kept)[name], name
    assert all(isinstance(token, int) for row in again.completions for token in row)
    assert [again.at_step(s).indices.tolist() for s in range(2)] == [
        kept.at_step(s).indices.tolist() for s in range(2)
    ]
