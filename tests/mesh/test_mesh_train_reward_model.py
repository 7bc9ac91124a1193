# SPDX-License-Identifier: Apache-2.0
"""A reward model's update is the same on one device and on eight, and so is a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jrl.api import prepare
from jrl.learners.reward_model import make_reward_model_update
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.state import init_train_state
from jrl.models.adapters.config import LoraConfig
from jrl.models.classifier_adapter import bind_classifier
from jrl.models.scorer import make_scorer, split_scorer
from tests.learners.batches import random_comparisons, sgd
from tests.mesh.test_mesh_updates import REMATERIALIZED, assert_metrics_agree, difference, largest, run
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier
from tests.trainers.runs import COMPARISONS, reward_config, save_tiny_checkpoint

pytestmark = pytest.mark.mesh
NUM_PAIRS = 16


def step(mesh: Any, name: str, *, unfrozen: int = -1, lora: LoraConfig | None = None) -> Any:
    """One step of gradient descent in two microbatches: state and metrics."""
    model, params = random_classifier(labelled((ENCODERS | DECODERS)[name], 1))
    split = dict(num_layers_unfrozen=unfrozen, adapter=bind_classifier(model, lora))
    trainable, frozen = split_scorer(params, model, **split, key=jax.random.key(0))
    update = make_reward_model_update(
        make_scorer(model, **split),
        sgd(0.1),
        RewardConfig(center_rewards_coefficient=0.01),
        batch_size=NUM_PAIRS,
        minibatch_size=8,
    )
    return run(update, mesh, init_train_state(trainable, sgd(0.1)), frozen, random_comparisons(NUM_PAIRS))


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("llama", {"unfrozen": 1}), ("gpt2", {"lora": LoraConfig(r=2)}), ("bert", {})],
    ids=["llama", "last layer", "lora", "bert"],
)
def test_lore_5_2_a_step_does_not_depend_on_the_mesh(
    mesh: Any, name: str, options: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_metrics = step(None, name, **options)
    capfd.readouterr()
    actual, metrics = step(mesh, name, **options)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics)
    assert largest(difference, actual.params, wanted.params) < 1e-5


def test_a_run_does_not_depend_on_the_mesh(tmp_path: Any) -> None:
    """Six pairs in batches of eight: the last two only fill it up."""
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    found = []
    for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "fsdp": 2}):
        config = reward_config(
            checkpoint,
            tmp_path / str(len(found)),
            train={"mesh": sizes, "total_steps": 3, "batch_size": 8, "minibatch_size": 8},
        )
        trainer = prepare(samples=COMPARISONS, config=config)
        trainer.add_eval_samples(COMPARISONS)
        trainer.learn()
        found.append([record["reward_model/loss"] for record in trainer.history if "iteration" in record])
        kernel = trainer.params["layers_0"]["attn"]["q"]["kernel"]
        assert kernel.sharding.device_set == set(jax.devices())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
