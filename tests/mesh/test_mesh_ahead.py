# SPDX-License-Identifier: Apache-2.0
"""Rollouts ahead on eight devices: on one mesh in turn, and on two meshes, of which one only samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, repeatable, save_tiny_checkpoint

pytestmark = pytest.mark.mesh
LAYOUTS: dict[str, dict[str, Any]] = {
    "in turn": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "apart": {"mesh": {"fsdp": 2, "tensor": 2}, "sampling_mesh": {"data": 2, "fsdp": 2}},
    "one samples": {"mesh": {"data": 7}, "sampling_mesh": {"data": 1}},
}


@pytest.fixture
def checkpoint(
    tmp_path: Path,
) -> str:  # not shared by tests: what is compiled for it would be kept and read back
    return save_tiny_checkpoint(tmp_path / "tiny")


def run(checkpoint: str, folder: Path, **section: Any) -> Any:
    section = {"rollouts_ahead": 1, "total_steps": 16, "eval_interval": 0} | section
    config = ppo_config(checkpoint, folder, train=section)
    return jrl.train(reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)


def iterations(trainer: Any) -> list[dict[str, Any]]:
    return [record for record in repeatable(trainer.history) if "iteration" in record]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_repeats_and_resumes_to_the_bit(checkpoint: str, tmp_path: Path, layout: str) -> None:
    one = run(checkpoint, tmp_path / "one", **LAYOUTS[layout])
    run(checkpoint, tmp_path / "two", **LAYOUTS[layout], total_steps=8)
    resumed = {"resume_from_checkpoint": str(tmp_path / "two")}
    two = run(checkpoint, tmp_path / "two", **LAYOUTS[layout], **resumed)
    assert iterations(one)[-2:] == iterations(two)[-2:]
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_two_meshes_learn_what_one_device_does(checkpoint: str, tmp_path: Path) -> None:
    alone = run(checkpoint, tmp_path / "alone", mesh={"data": 1}, sampling_mesh={"data": 7})
    apart = run(checkpoint, tmp_path / "apart", **LAYOUTS["apart"])
    for one, other in zip(iterations(alone), iterations(apart), strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6)
        assert one["ppo/policy_loss"] == pytest.approx(other["ppo/policy_loss"], abs=1e-4)


def test_each_program_runs_where_it_belongs(checkpoint: str, tmp_path: Path) -> None:
    config = ppo_config(
        checkpoint,
        tmp_path,
        train={"rollouts_ahead": 1, "total_steps": 4, "eval_interval": 0} | LAYOUTS["apart"],
    )
    trainer = prepare(reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)
    sampled, learned = set[int](), set[int]()
    collect, update = trainer.collect, trainer.update

    def devices(tree: Any) -> set[int]:
        return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}

    def collected(params: Any, frozen: Any, ref: Any, *rest: Any, **options: Any) -> Any:
        found = collect(params, frozen, ref, *rest, **options)
        sampled.update(devices((params, frozen, ref, found.rollouts)))
        return found

    def updated(state: Any, frozen: Any, rollouts: Any, *rest: Any) -> Any:
        learned.update(devices((state, frozen, rollouts)))
        return update(state, frozen, rollouts, *rest)

    trainer.collect, trainer.update = collected, updated
    trainer.learn()
    assert learned == {0, 1, 2, 3} and sampled == {4, 5, 6, 7}
