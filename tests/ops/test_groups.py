# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import group_statistics, smallest_of_group, sum_of_group

GROUPS = jnp.array([9, -4, 9, 9, 2, -4])


class TestStatistics:
    @pytest.mark.parametrize("ddof", [0, 1])
    def test_against_numpy(self, ddof):
        scores = jnp.array([1.0, 5.0, 2.0, 4.0, 3.0, 6.0])
        found = group_statistics(scores, GROUPS, jnp.ones(6, bool), ddof=ddof)
        for row, group in enumerate(np.asarray(GROUPS)):
            members = np.asarray(scores)[np.asarray(GROUPS) == group]
            assert float(found.mean[row]) == pytest.approx(members.mean())
            wanted = members.std(ddof=ddof) if len(members) > 1 else 0.0
            assert float(found.std[row]) == pytest.approx(wanted)
            assert int(found.size[row]) == len(members)
        assert found.is_mixed.tolist() == [True, True, True, True, False, True]

    def test_large_scores_keep_their_spread(self):
        """Deviations are taken from the mean before they are squared."""
        scores = jnp.array([10000.0, 0.0, 10001.0, 10002.0, 0.0, 0.0])
        found = group_statistics(scores, GROUPS, jnp.ones(6, bool))
        assert float(found.std[0]) == pytest.approx(np.sqrt(2 / 3), rel=1e-3)

    def test_a_group_without_valid_rows_has_nothing(self):
        found = group_statistics(jnp.full(6, jnp.nan), GROUPS, jnp.zeros(6, bool))
        for array in found:
            np.testing.assert_array_equal(array, np.zeros(6))


def test_sums_are_those_of_the_group_under_jit():
    found = jax.jit(sum_of_group)(jnp.arange(6, dtype=jnp.float32), GROUPS)
    np.testing.assert_array_equal(found, [5, 6, 5, 5, 4, 6])


def test_lore_4_17_groups_without_contrast_are_found():
    scores = jnp.array([1.0, 0.1, 1.0, 0.0, 5.0, 0.1])
    every = jnp.ones(6, bool)
    assert group_statistics(scores, GROUPS, every).is_mixed.tolist() == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    # Without the one failure, the first group has no contrast either.
    assert not group_statistics(scores, GROUPS, every.at[3].set(False)).is_mixed.any()


class TestSmallestOfGroup:
    def test_ties_go_to_the_first_row_and_invalid_rows_are_never_kept(self):
        x = jnp.array([3.0, 1.0, 2.0, 3.0, 7.0, 1.0])
        every = jnp.ones(6, bool)
        assert smallest_of_group(x, GROUPS, every, num_kept=1).tolist() == [0, 1, 1, 0, 1, 0]
        assert smallest_of_group(x, GROUPS, every, num_kept=2).tolist() == [1, 1, 1, 0, 1, 1]
        without = every.at[2].set(False)
        assert smallest_of_group(x, GROUPS, without, num_kept=1).tolist() == [1, 1, 0, 0, 1, 0]

    def test_nan_of_an_invalid_row_is_not_read(self):
        x, valid = jnp.array([jnp.nan, 1.0, 2.0, 3.0, 7.0, 1.0]), jnp.array([0, 1, 1, 1, 1, 1], bool)
        assert smallest_of_group(x, GROUPS, valid, num_kept=1).tolist() == [0, 1, 1, 0, 1, 0]

    def test_none_to_keep_is_refused(self):
        with pytest.raises(ValueError, match="`num_kept` must be at least 1, got 0"):
            smallest_of_group(jnp.zeros(6), GROUPS, jnp.ones(6, bool), num_kept=0)
