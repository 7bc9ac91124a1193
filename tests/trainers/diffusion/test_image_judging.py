# SPDX-License-Identifier: Apache-2.0
"""Which images a process judges; that several get all rewards is in `tests/processes/test_processes_diffusion.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jrl.mesh import make_mesh
from jrl.rollout.rewards import RewardError
from jrl.trainers.diffusion.image_judging import _OwnBatches, judge_images, own_images

IMAGES = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
BATCH = [IMAGES, tuple("abcd"), (0, 1, 2, 3)]


def judge(answers: Any) -> Any:
    return judge_images(
        lambda batches, is_async: answers,
        [BATCH],
        False,
        counts=[4],
        own=np.arange(4),
        name_batch=lambda number: f"batch {number}",
        skip_errors=False,
    )


@pytest.mark.parametrize("on_main", [False, True])
def test_one_process_judges_all(on_main: bool) -> None:
    mesh = make_mesh(1, 1, 1)
    np.testing.assert_array_equal(own_images(mesh, 5, on_main=on_main), np.arange(5))


def test_a_process_sees_its_own_images_of_each_batch() -> None:
    mine = _OwnBatches([BATCH, BATCH, BATCH], [np.asarray([1, 3]), np.asarray([1])])
    assert len(mine) == 2
    images, prompts, metadata = mine[0]
    assert images.ravel().tolist() == [1.0, 3.0] and prompts == ("b", "d") and metadata == (1, 3)
    assert [batch[1] for batch in mine[:]] == [("b", "d"), ("b",)] and mine[-1][2] == (1,)


def test_what_any_compute_rewards_returns_is_checked() -> None:
    (rewards,), found = judge((([1, 2, 3, 4],), ({"a": 1},)))
    assert rewards.dtype == np.float32 and rewards.tolist() == [1.0, 2.0, 3.0, 4.0] and found == [{"a": 1}]
    with pytest.raises(RewardError, match=r"must return \(reward vectors, reward metadata\), got list"):
        judge([1])
    with pytest.raises(RewardError, match="one entry a sampling batch, got 2 and 1 for 1"):
        judge((([1] * 4, [2] * 4), ({},)))
    with pytest.raises(RewardError, match=r"batch 0: .*got 3 for 4 images"):
        judge((([1, 2, 3],), ({},)))
