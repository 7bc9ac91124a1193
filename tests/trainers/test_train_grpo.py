# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives from a checkpoint to a trained policy: groups of samples, one update, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.mesh import abstract_mesh
from jrl.trainers.plan.run_plan import plan_run
from tests.trainers.runs import PROMPTS, count_vowels, dynamic_config, grpo_config, odd_vowels, repeatable


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


@pytest.fixture(scope="module")
def dynamic(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = dynamic_config(checkpoint, tmp_path_factory.mktemp("dynamic") / "run")
    return jrl.train(reward_fn=odd_vowels, prompts=PROMPTS, config=config)


class TestDynamicSampling:
    def test_groups_without_contrast_are_replaced(self, dynamic: Any) -> None:
        asked = [record["group/asked"] for record in updates(dynamic)]
        assert max(asked) > 2 and all(record["group/kept"] == 2 for record in updates(dynamic))
        # One prompt a round: nothing is asked for that is not used up.
        assert dynamic.first_prompt(4) == sum(asked) > 4 * 2
        assert [record["perf/compilations"] for record in updates(dynamic)][1:] == [
            updates(dynamic)[1]["perf/compilations"]
        ] * 3
        for record in updates(dynamic):
            assert (
                record["rollout/kept_fraction"] == 1
                and record["group/sampling_rounds"] == record["group/asked"]
            )
            assert record["group/solve_rate_0"] + record["group/solve_rate_1"] == pytest.approx(
                record["group/zero_std_fraction"]
            )

    def test_a_run_that_was_cut_is_the_whole_one_to_the_bit(
        self, dynamic: Any, checkpoint: str, tmp_path: Path
    ) -> None:
        """The place in the stream is not the number of iterations times that of their prompts, and is kept."""
        folder = tmp_path / "run"
        first = jrl.train(
            reward_fn=odd_vowels,
            prompts=PROMPTS,
            config=dynamic_config(checkpoint, folder, train={"total_steps": 2}),
        )
        assert first.first_prompt(2) != 2 * 2
        config = dynamic_config(checkpoint, folder, train={"resume_from_checkpoint": str(folder)})
        second = jrl.train(reward_fn=odd_vowels, prompts=PROMPTS, config=config)
        jax.tree.map(np.testing.assert_array_equal, second.state, dynamic.state)
        assert repeatable(updates(second))[2:] == repeatable(updates(dynamic))[2:]
        assert second.first_prompt(4) == dynamic.first_prompt(4)

    def test_the_size_of_a_round_changes_no_step(self, dynamic: Any, checkpoint: str, tmp_path: Path) -> None:
        config = dynamic_config(checkpoint, tmp_path).evolve(method={"prompts_per_round": 4})
        other = jrl.train(reward_fn=odd_vowels, prompts=PROMPTS, config=config)
        assert other.first_prompt(4) == dynamic.first_prompt(4)
        for record, wanted in zip(updates(other), updates(dynamic), strict=True):
            for name in ("grpo/policy_loss", "grpo/entropy", "optim/grad_norm"):
                assert record[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5)

    def test_completions_have_keys_of_the_run_and_updates_of_the_iteration(self, dynamic: Any) -> None:
        first, later = (jax.random.key_data(jnp.stack(dynamic.keys(iteration))) for iteration in (0, 3))
        np.testing.assert_array_equal(first[0], later[0])
        assert (first[1] != later[1]).any() and (first[0] != first[1]).any()

    def test_a_checkpoint_of_before_goes_on_as_it_did(self, checkpoint: str, tmp_path: Path) -> None:
        trainer = jrl.OnlineTrainer(dynamic_config(checkpoint, tmp_path), reward_fn=odd_vowels)
        trainer.load_host_state({})
        assert trainer.first_prompt(3) == 3 * 2
        trainer.load_host_state({"sampling": {"next_prompt": 11, "degenerate_iterations": 1}})
        assert trainer.first_prompt(3) == 11 and trainer.first_prompt(0) == 0

    @pytest.mark.filterwarnings("always:Iteration:UserWarning")
    def test_where_nothing_can_be_learned_it_says_so_counts_and_goes_on(
        self, checkpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: Any
    ) -> None:
        """The second of three iterations has no mixed group; a run that is cut behind it knows."""
        rounds = []

        def reward(outputs: list[str]) -> list[float]:
            if len(outputs) != 8:  # an evaluation
                return [0.0] * len(outputs)
            rounds.append(outputs)
            return [float(row % 2 and len(rounds) not in (2, 3)) for row in range(8)]

        def config(**train: Any) -> jrl.TRLConfig:
            method = {"max_sampling_rounds": 2, "prompts_per_round": None, "chunk_size": 8}
            return grpo_config(checkpoint, tmp_path / "run", "dapo", method=method, train=train)

        first = jrl.train(reward_fn=reward, prompts=PROMPTS, config=config(total_steps=2))
        # Who imports what decides whether warnings are logged.
        told = [record.message for record in caplog.records] + [str(one.message) for one in recwarn]
        said = [text for text in told if "equal scores" in text]
        assert len(said) == 1 and "Iteration 1: " in said[0] and "The update is skipped." in said[0]
        iterations = [record for record in first.history if "iteration" in record]
        assert [record["group/degenerate_iterations"] for record in iterations] == [0, 1]
        assert first.first_prompt(2) == 2 + 4
        second = jrl.train(
            reward_fn=reward,
            prompts=PROMPTS,
            config=config(total_steps=3, resume_from_checkpoint=str(tmp_path / "run")),
        )
        assert updates(second)[-1]["group/degenerate_iterations"] == 1
        assert updates(second)[-1]["group/kept"] == 2


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
