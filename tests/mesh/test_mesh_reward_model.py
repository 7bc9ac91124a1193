# SPDX-License-Identifier: Apache-2.0
"""A classifier as a reward on several devices: equal scores on every mesh, and beside a policy that trains on one."""

import json

import jax
import numpy as np
import pytest

import jrl
from jrl.trainers.loading.setup import mesh_of
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled
from tests.trainers.loading.reward_models import save_reward_model
from tests.trainers.runs import PROMPTS, ppo_config, save_tiny_checkpoint

pytestmark = pytest.mark.mesh
TEXTS = ["good", "", "a longer text", "bad", "ok", "so it goes", "x"]


@pytest.mark.parametrize("name", ["distilbert", "llama"])
def test_scores_do_not_depend_on_the_mesh(mesh, name, tmp_path):
    folder = save_reward_model(tmp_path / "m", labelled((ENCODERS | DECODERS)[name]))
    expected = jrl.load_reward_model(folder, output="logit", batch_size=8)
    reward = jrl.load_reward_model(folder, output="logit", batch_size=8, mesh=mesh)
    with jax.set_mesh(mesh):  # as inside a trainer
        on_first_device = expected(samples=TEXTS)
    assert on_first_device == expected(samples=TEXTS)
    np.testing.assert_allclose(reward(samples=TEXTS), on_first_device, atol=1e-5)
    assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in jax.tree.leaves(reward.params))


@pytest.mark.parametrize("shared", [True, False], ids=["on the policy's mesh", "on the first device"])
def test_a_policy_trains_against_it(shared, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "policy")
    folder = save_reward_model(tmp_path / "reward")
    config = ppo_config(
        checkpoint,
        tmp_path / "run",
        train={
            "mesh": {"data": 2, "fsdp": 4},
            "batch_size": 8,
            "minibatch_size": 8,
            "total_steps": 2,
            "reward_timeout": 300.0,
        },
        method={"chunk_size": 8},
    )
    reward = jrl.load_reward_model(folder, batch_size=8, mesh=mesh_of(config) if shared else None)
    before = jax.device_get(reward.params)
    trainer = jrl.train(reward_fn=reward, prompts=PROMPTS, eval_prompts=PROMPTS[:4], config=config)
    lines = (trainer.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    again = reward(samples=[row["prompt"] + row["output"] for row in rows])
    np.testing.assert_allclose(again, [row["reward"] for row in rows], atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(reward.params), before)
