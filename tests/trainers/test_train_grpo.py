# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives from a checkpoint to a trained policy: groups of samples, one update, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.learners.grpo import algorithm
from jrl.mesh import abstract_mesh
from jrl.trainers.plan.run_plan import plan_run
from tests.trainers.runs import PROMPTS, count_vowels, repeatable, tiny_run


def grpo_config(
    checkpoint: str, folder: Path, name: str = "grpo", **sections: dict[str, Any]
) -> jrl.TRLConfig:
    """8 rollouts of 2 prompts an iteration, in one step of two microbatches that split groups."""
    method = algorithm(
        name, num_rollouts=8, chunk_size=4, num_generations=4, gen_kwargs={"max_new_tokens": 6}
    )
    sizes = {
        "batch_size": 8,
        "minibatch_size": 2,
        "total_steps": 4,
        "eval_interval": 2,
        "checkpoint_interval": 2,
    }
    return tiny_run(jrl.default_config(method), checkpoint, folder).evolve(train=sizes).evolve(**sections)


def train(config: jrl.TRLConfig) -> jrl.Trainer:
    return jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)


@pytest.fixture(scope="module")
def trained(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> jrl.Trainer:
    return train(grpo_config(checkpoint, tmp_path_factory.mktemp("grpo") / "run"))


def updates(trainer: jrl.Trainer) -> list[dict[str, Any]]:
    return [record for record in trainer.history if "grpo/policy_loss" in record]


class TestRun:
    def test_groups_are_watched_and_the_first_ratio_is_one(self, trained: jrl.Trainer) -> None:
        assert [record["step"] for record in updates(trained)] == [1, 2, 3, 4]
        for record in updates(trained):
            assert record["grpo/ratio_max_dev_first_minibatch"] < 1e-4
            assert record["group/valid_mean"] == 4 and 0 <= record["group/zero_std_fraction"] <= 1
            assert record["kl/per_token"] == pytest.approx(0, abs=1) and "grpo/kl_term" in record

    def test_a_run_that_was_cut_is_the_whole_one_to_the_bit(
        self, trained: jrl.Trainer, checkpoint: str, tmp_path: Path
    ) -> None:
        first = grpo_config(checkpoint, tmp_path / "run", train={"total_steps": 2})
        train(first)
        second = train(
            grpo_config(checkpoint, tmp_path / "run", train={"resume_from_checkpoint": str(tmp_path / "run")})
        )
        jax.tree.map(np.testing.assert_array_equal, second.state, trained.state)
        assert repeatable(updates(second))[2:] == repeatable(updates(trained))[2:]

    def test_it_is_cited_and_planned(self, trained: jrl.Trainer, checkpoint: str, tmp_path: Path) -> None:
        card = (trained.save_pretrained(tmp_path) / "README.md").read_text(encoding="utf-8")
        assert "GRPO" in card and "DeepSeekMath" in card
        planned = plan_run(trained.config, abstract_mesh(num_devices=2, fsdp=2, data=1, tensor=1))
        assert planned is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "dapo", "gspo", "cispo", "remax", "reinforce_pp", "dr_grpo", "opo"])
def test_every_kind_of_relative_trains(name: str, checkpoint: str, tmp_path: Path) -> None:
    trainer = train(grpo_config(checkpoint, tmp_path, name))
    assert len(updates(trainer)) == 4
    assert all(
        np.isfinite(record["optim/grad_norm"]) for record in updates(trainer) if "optim/grad_norm" in record
    )


def test_the_baseline_of_remax_is_the_score_of_the_greedy_completion(checkpoint: str, tmp_path: Path) -> None:
    trainer = jrl.OnlineTrainer(grpo_config(checkpoint, tmp_path, "remax"), reward_fn=count_vowels)
    trainer.add_prompts(PROMPTS, count_vowels)
    with jax.set_mesh(trainer.mesh):
        experience = trainer.collect(
            trainer.params,
            trainer.frozen,
            trainer.ref_params,
            0,
            trainer.keys(0)[0],
            while_sampling=lambda: None,
            stopwatch=jrl.trainers.loop.Stopwatch(),
        )
    prompts = [row["prompt"] for row in experience.rows]
    greedy = trainer.generate(prompts, gen_kwargs={"do_sample": False})
    np.testing.assert_allclose(experience.rollouts.greedy_scores, count_vowels(greedy), rtol=1e-6)
