# SPDX-License-Identifier: Apache-2.0
import numpy as np

from jrl.data.ordering import epoch_order, shuffled


def test_every_epoch_is_a_permutation_of_its_own():
    epochs = shuffled(np.arange(60), size=20, seed=0).reshape(3, 20)
    assert all(sorted(one) == list(range(20)) for one in epochs.tolist())
    assert len({tuple(one) for one in epochs.tolist()}) == 3
    np.testing.assert_array_equal(epochs[2], epoch_order(20, seed=0, epoch=2))


def test_seeds_differ():
    first, second = (shuffled(np.arange(20), size=20, seed=seed) for seed in (0, 1))
    assert first.tolist() != second.tolist()


def test_lore_9_1_a_position_does_not_depend_on_when_it_is_asked_for():
    whole = shuffled(np.arange(50), size=7, seed=3)
    np.testing.assert_array_equal(shuffled(np.arange(50)[::-1], size=7, seed=3), whole[::-1])
    assert [int(shuffled(np.array([place]), size=7, seed=3)[0]) for place in range(50)] == whole.tolist()
