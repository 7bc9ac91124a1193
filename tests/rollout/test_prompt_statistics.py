# SPDX-License-Identifier: Apache-2.0
"""Advantages of samples: worked-out figures, TRL's statistics, what must not matter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jrl.rollout.prompt_statistics import (
    global_advantages,
    group_advantages,
    prompt_advantages,
    prompt_key,
    prompt_stats,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "trl_ddpo_0231.npz"
EPOCHS = (
    ("ababac", [1, 10, 2, 20, 3, 5], [-1.224743, 0.482134, 0, 2.004663, 1.224743, -0.279130]),
    ("aabc", [4, 8, 30, 7], [-0.109764, 1.646463, 1.224745, -0.507093]),
)


class TestByPrompt:
    def test_lore_8_8_statistics_are_kept_by_prompt(self) -> None:
        state: dict[str, list[float]] = {}
        for prompts, rewards, wanted in EPOCHS:
            found = prompt_advantages(state, list(prompts), rewards, buffer_size=4, min_count=3)
            np.testing.assert_allclose(found.advantages, wanted, atol=1e-6)
            # As a checkpoint keeps it.
            state = json.loads(json.dumps(found.state))
        assert state == {"a": [2, 3, 4, 8], "b": [10, 20, 30], "c": [5, 7]}
        assert (found.num_tracked, found.num_prompts) == (2, 3)

    def test_the_state_given_is_not_changed(self) -> None:
        state = {"a": [1.0]}
        prompt_advantages(state, ["a", "b"], [2.0, 3.0], buffer_size=4, min_count=1)
        assert state == {"a": [1.0]}

    def test_lore_9_1_the_order_of_arrival_does_not_matter(self) -> None:
        prompts, rewards, _ = EPOCHS[0]
        found = prompt_advantages({}, list(prompts), rewards, buffer_size=9, min_count=2)
        order = [5, 2, 0, 4, 1, 3]
        moved = prompt_advantages(
            {}, [prompts[i] for i in order], [rewards[i] for i in order], buffer_size=9, min_count=2
        )
        np.testing.assert_allclose(moved.advantages, found.advantages[order], rtol=1e-6)

    def test_integer_rewards_are_not_truncated(self) -> None:
        found = prompt_advantages({}, ["a", "a", "a"], np.array([1, 2, 4]), buffer_size=4, min_count=1)
        np.testing.assert_allclose(found.advantages, [-1.069044, -0.267261, 1.336305], atol=1e-5)
        assert found.advantages.dtype == np.float32

    def test_matches_trl(self) -> None:
        state: dict[str, list[float]] = {}
        with np.load(GOLDEN) as stored:
            names = ("tracker_prompts", "tracker_rewards", "tracker_advantages")
            for prompts, rewards, wanted in zip(*(stored[name] for name in names), strict=True):
                found = prompt_advantages(
                    state, [prompt_key(np.array([p])) for p in prompts], rewards, buffer_size=8, min_count=5
                )
                np.testing.assert_allclose(found.advantages, wanted, rtol=1e-6, atol=1e-7)
                state = found.state

    def test_statistics_of_what_is_kept(self) -> None:
        stats = prompt_stats({"a": [1.0, 3.0], "b": [5.0]})
        assert stats["a"] == (2.0, 1.0, 2) and stats["b"] == (5.0, 0.0, 1)

    def test_a_missing_reward_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="`rewards` must hold one number for each of 2 samples, got 1"):
            prompt_advantages({}, ["a", "b"], [1.0], buffer_size=4, min_count=1)


class TestGlobal:
    def test_golden(self) -> None:
        wanted = [-0.888142, 0.482134, -0.735889, 2.004663, -0.583636, -0.279130]
        np.testing.assert_allclose(global_advantages(EPOCHS[0][1]), wanted, atol=1e-6)

    def test_equal_rewards_have_no_advantage(self) -> None:
        assert not global_advantages([3, 3, 3]).any()


class TestGroups:
    def test_lore_4_10_which_deviation_divides(self) -> None:
        # Groups (1, 3) and (10, 20): means 2 and 15, deviations 1 and 5; of all four 7.4330.
        rewards, groups = [1, 10, 3, 20], [0, 1, 0, 1]
        np.testing.assert_allclose(group_advantages(rewards, groups), [-1, -1, 1, 1], atol=2e-6)
        shared = group_advantages(rewards, groups, std="global")
        np.testing.assert_allclose(shared, np.array([-1, -5, 1, 5]) / 7.433034, atol=1e-6)

    def test_lore_4_9_a_group_without_spread_has_advantage_zero(self) -> None:
        found = group_advantages([0.1, 0.1, 0.1, 5.0, 6.0], [7, 7, 7, 2, 2])
        np.testing.assert_array_equal(found[:3], [0, 0, 0])
        assert found[3] < 0 < found[4]

    def test_errors_name_the_argument(self) -> None:
        with pytest.raises(ValueError, match="`std` must be 'group' or 'global', got 'none'"):
            group_advantages([1.0], [0], std="none")
        with pytest.raises(ValueError, match="`groups` must hold one number for each of 2 samples"):
            group_advantages([1.0, 2.0], [0])


def test_a_prompt_is_known_by_all_its_ids() -> None:
    assert prompt_key(np.array([3, 14, 0])) == prompt_key([3, 14, 0]) == "3 14 0"
    assert prompt_key([31, 4]) != prompt_key([3, 14])
