# SPDX-License-Identifier: Apache-2.0
"""Raw scores of groups: which are mixed, and what was solved."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.ops.groups import group_statistics
from jrl.ops.pass_rates import pass_at_k
from jrl.rollout.group_scores import GroupScores, pass_rates


def groups(scores: list[list[float]], lengths: list[list[int]] | None = None) -> GroupScores:
    """Of scores, NaN where the reward function failed."""
    found = np.asarray(scores, np.float64)
    return GroupScores(found, ~np.isnan(found), np.asarray(lengths if lengths else np.ones(found.shape), int))


def test_lore_4_17_the_host_finds_the_groups_without_contrast() -> None:
    nan = np.nan
    found = groups([[0.1] * 3, [0.1, 0.1, 0.2], [1, nan, 1], [1, nan, 0], [1, nan, nan], [nan] * 3]).mixed
    assert found.tolist() == [False, True, False, True, False, False]


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.0, np.nan]), min_size=4, max_size=4),
        min_size=3,
        max_size=3,
    )
)
def test_it_is_the_rule_of_the_op(scores: list[list[float]]) -> None:
    found = groups(scores)
    flat = jnp.asarray(found.scores.reshape(-1), jnp.float32)
    of_op = group_statistics(flat, jnp.arange(flat.size) // 4, jnp.asarray(found.valid.reshape(-1))).is_mixed
    np.testing.assert_array_equal(of_op, np.repeat(found.mixed, 4))


def test_solve_rates_are_a_histogram_with_bins_of_their_own_for_none_and_all() -> None:
    solved = [0, 1, 2, 3, 4, 4, 2, 2]
    found = groups([[1.0] * count + [0.0] * (4 - count) for count in solved]).figures()
    names = ["0", "q1", "q2", "q3", "q4", "1"]
    shares = [found[f"group/solve_rate_{name}"] for name in names]
    assert shares == [1 / 8, 1 / 8, 3 / 8, 1 / 8, 0, 2 / 8] and sum(shares) == 1
    assert found["group/zero_std_fraction"] == 3 / 8 and found["group/valid_mean"] == 4


def test_pass_rates_are_those_of_the_estimator_and_of_whole_groups_alone() -> None:
    nan = np.nan
    found = groups([[1, 1, 1, nan], [1, 0, 0, 0], [0, 0, 0, 0]]).figures()
    for k in (1, 2, 4):
        wanted = float(jnp.mean(pass_at_k(jnp.array([1, 0]), num_samples=4, k=k)))
        assert found[f"reward/pass_at_{k}"] == pytest.approx(wanted)
    assert list(pass_rates(6)) == [1, 2, 4, 6] and list(pass_rates(8)) == [1, 2, 4, 8]
    assert "reward/pass_at_1" not in groups([[1, 0, nan]]).figures()


def test_what_an_update_leaves_out_was_an_attempt() -> None:
    """Cut rows have no part in a group's statistics, and the first of these groups no contrast without them."""
    scores = np.asarray([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    valid = np.asarray([[True, True, False, False], [True, True, False, False]])
    found = GroupScores(scores, valid, np.ones((2, 4), int)).figures()
    assert found["group/zero_std_fraction"] == 0.5 and found["group/valid_mean"] == 2
    assert found["reward/pass_at_1"] == pytest.approx(3 / 8) and found["group/solve_rate_1"] == 0
    assert found["group/solve_rate_q2"] == 0.5 and found["group/solve_rate_q1"] == 0.5


def test_lengths_of_right_and_of_wrong_completions() -> None:
    nan = np.nan
    found = groups([[1, 0], [1, nan]], [[4, 9], [6, 100]]).figures()
    assert found["completion/length_right"] == 5 and found["completion/length_wrong"] == 9
    assert "completion/length_wrong" not in groups([[1.0, 1.0]]).figures()


@pytest.mark.parametrize("scores", [[[0.5, 1.0]], [[2.0, 0.0]], [[np.nan, np.nan]]])
def test_of_other_scores_than_0_and_1_nothing_is_called_solved(scores: list[list[float]]) -> None:
    assert set(groups(scores).figures()) == {"group/zero_std_fraction", "group/valid_mean"}
