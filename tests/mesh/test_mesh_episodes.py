# SPDX-License-Identifier: Apache-2.0
"""Episodes depend neither on the mesh nor on which device holds a slot."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jrl.mesh import make_mesh, tree_shardings
from jrl.rollout.environments import World
from jrl.rollout.episode import Episode, Task
from jrl.rollout.episodes import Player
from tests.rollout.test_episodes import Tool, model, settings
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.mesh


def play(mesh: Mesh, *, answers: bool = True) -> list[Episode]:
    """Twelve episodes of eight turns on eight slots, or as many completions of six prompts."""
    tokenizer = tiny_tokenizer()
    policy, params, frozen = model()
    tasks = [
        Task(
            row,
            [5, 6 + row // 6, *range(7, 8 + row % 3)],
            functools.partial(World, Tool, "p", {}, row) if answers else None,
            limit=None if answers else 1 + 3 * row,
        )
        for row in range(12)
    ]
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, tree_shardings(mesh, params)[0])
        player = Player(policy, tokenizer, mesh)
        return player.play(placed, frozen, tasks, settings(tokenizer), jax.random.key(0), num_slots=8)


@functools.cache
def expected(answers: bool) -> list[Episode]:
    return play(make_mesh(1, 1, 1, devices=jax.devices()[:1]), answers=answers)


@pytest.mark.parametrize("answers", [True, False], ids=["episodes", "completions"])
def test_ids_are_those_of_one_device(mesh, answers):
    found = play(mesh, answers=answers)
    assert [episode.ids for episode in found] == [episode.ids for episode in expected(answers)]
    for one, other in zip(found, expected(answers), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
