# SPDX-License-Identifier: Apache-2.0
"""Rollouts drawn on slots, through `jrl.train`: a run learns what it learns from calls of the sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from tests.trainers.runs import PROMPTS, count_vowels, dynamic_config, odd_vowels, ppo_config


def metrics(folder: Path) -> list[dict[str, float]]:
    """Figures of each iteration but for seconds and counts of programs."""
    (file,) = folder.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = ("reward/", "completion/", "group/", "policy/", "ppo/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]


def params(trainer: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.params)]


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_a_run_on_slots_learns_what_one_without_does(checkpoint, tmp_path, algorithm):
    """PPO with stop strings; DAPO, which draws a prompt's samples by their place in the stream."""
    make, reward = (ppo_config, count_vowels) if algorithm == "ppo" else (dynamic_config, odd_vowels)
    stops = ("e",) if algorithm == "ppo" else ()
    steps = {"total_steps": 4, "checkpoint_interval": 100, "eval_interval": 100}
    trainers = [
        jrl.train(
            reward_fn=reward,
            prompts=PROMPTS,
            eval_prompts=PROMPTS[:1],
            stop_sequences=stops,
            config=make(checkpoint, tmp_path / str(slots), train=steps).evolve(
                method={"rollout_slots": slots}
            ),
        )
        for slots in (None, 3)
    ]
    expected, found = (metrics(tmp_path / str(slots)) for slots in (None, 3))
    assert len(expected) == len(found) > 0 and any(line for line in expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        np.testing.assert_allclose([*mine.values()], [*other.values()], rtol=1e-3, atol=1e-4)
    for mine, other in zip(*map(params, trainers), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_a_number_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"`method\.rollout_slots` must be at least 1, or None, got 0"):
        jrl.default_ppo_config().evolve(method={"rollout_slots": 0})
