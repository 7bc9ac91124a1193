# SPDX-License-Identifier: Apache-2.0
"""Episodes with a world that answers, through `jrl.train`: PPO and GRPO, failures, resuming, recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.rollout.environments import EnvironmentFailure
from jrl.rollout.rewards import RewardError
from tests.tiny import tiny_tokenizer
from tests.trainers.runs import PROMPTS, grpo_config, ppo_config, repeatable, rft_config

TURNS = {"max_new_tokens": 24, "max_turns": 3, "max_turn_tokens": 4}


class Echo:
    """Rewards vowels, and answers by chance and by what was written."""

    def reset(self, prompt: str, seed: int) -> str:
        self.chance = np.random.default_rng(seed)
        return "hi "

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        reward = sum(letter in "aeiou" for letter in text) / 4
        return f" {self.chance.integers(10)}", reward, turn == 2


def broken(prompt: str, turn: int) -> tuple[str, float, bool]:
    """Fails on one prompt in its second turn."""
    if prompt == PROMPTS[1] and turn == 1:
        raise RuntimeError("the lamp went out")
    return " ok", 1.0, turn == 2


def train(config: jrl.TRLConfig, environment: Any = Echo, **options: Any) -> Any:
    return jrl.train(
        environment=environment, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config, **options
    )


def ppo(checkpoint: str, folder: Path, **train_section: Any) -> jrl.TRLConfig:
    config = ppo_config(checkpoint, folder, train={"seq_length": 48, "total_steps": 8, **train_section})
    return config.evolve(method={"gen_kwargs": TURNS})


def grpo(checkpoint: str, folder: Path, **train_section: Any) -> jrl.TRLConfig:
    config = grpo_config(checkpoint, folder, train={"seq_length": 48, "total_steps": 4, **train_section})
    return config.evolve(method={"gen_kwargs": TURNS})


@pytest.fixture(scope="module")
def learned(checkpoint, tmp_path_factory):
    """Two iterations of PPO, and what its learner was given."""
    trainer = prepare(
        environment=Echo,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:2],
        config=ppo(checkpoint, tmp_path_factory.mktemp("ppo")),
    )
    seen: list[Any] = []
    update = trainer.update

    def kept(state: Any, frozen: Any, rollouts: Any, *rest: Any) -> Any:
        seen.append(jax.device_get(rollouts))
        return update(state, frozen, rollouts, *rest)

    trainer.update = kept
    trainer.learn()
    return trainer, seen, update


class TestPPO:
    def test_masks_have_holes_and_rewards_sit_on_last_actions(self, learned):
        _, seen, _ = learned
        for rollouts in seen:
            mask, rewards = rollouts.sequences.mask, rollouts.rewards
            holes = [np.flatnonzero(~row[: np.flatnonzero(row)[-1]]) for row in mask]
            assert all(len(found) >= 3 + 2 + 2 for found in holes), "the first observation and two answers"
            assert not rewards[~mask].any()
            ends = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
            assert not rewards[~ends].any() and rewards[ends].any()
            assert (rollouts.sampler_logprobs[~mask] == 0).all()

    def test_sampler_and_learner_agree(self, learned):
        _, seen, _ = learned
        for rollouts in seen:
            mask = rollouts.sequences.mask
            np.testing.assert_allclose(
                rollouts.scored.logprobs[mask], rollouts.sampler_logprobs[mask], atol=1e-4
            )

    def test_it_compiles_once_and_says_what_was_played(self, learned):
        trainer, _, update = learned
        records = [record for record in trainer.history if "episode/turns" in record]
        assert len(records) == 2 and update._cache_size() == 1
        assert records[0]["episode/turns"] == 3.0 and records[0]["episode/done_fraction"] == 1.0
        assert records[0]["completion/truncated_fraction"] == 0.0
        assert 3 <= records[0]["episode/actions"] <= 12

    def test_the_log_has_a_line_an_episode_with_its_turns(self, learned):
        trainer, _, _ = learned
        lines = (Path(trainer.run_dir) / "rollouts" / "rollouts.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 16 and all(row["done"] and len(row["turns"]) == 3 for row in rows)
        for row in rows:
            assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]))

    def test_worlds_differ_between_iterations(self, learned):
        trainer, _, _ = learned
        lines = (Path(trainer.run_dir) / "rollouts" / "rollouts.jsonl").read_text().splitlines()
        said = [[turn["observation"] for turn in json.loads(line)["turns"]] for line in lines]
        assert said[:8] != said[8:]

    def test_resumed_equals_never_stopped_bit_for_bit(self, learned, checkpoint, tmp_path):
        trainer, _, _ = learned
        train(ppo(checkpoint, tmp_path, total_steps=4))
        resumed = train(ppo(checkpoint, tmp_path, resume_from_checkpoint=str(tmp_path)))
        one, two = (
            [record for record in repeatable(found.history) if "iteration" in record and record["step"] > 4]
            for found in (resumed, trainer)
        )
        assert one and one == two
        jax.tree.map(np.testing.assert_array_equal, resumed.params, trainer.params)


class TestGRPO:
    def test_samples_of_a_prompt_share_their_world(self, checkpoint, tmp_path):
        trainer = train(grpo(checkpoint, tmp_path))
        lines = (Path(trainer.run_dir) / "rollouts" / "rollouts.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines][:8]
        said = [tuple(turn["observation"] for turn in row["turns"]) for row in rows]
        assert len(set(said[:4])) == 1 and len(set(said[4:])) == 1 and said[0] != said[4]
        assert len({row["output"] for row in rows[:4]}) > 1

    def test_a_reward_function_beside_it_is_added_at_the_end(self, checkpoint, tmp_path):
        def ten(turns: list[list[dict[str, Any]]]) -> list[float]:
            return [10.0 * len(played) for played in turns]

        trainer = train(grpo(checkpoint, tmp_path, total_steps=1), reward_fn=ten)
        record = next(record for record in trainer.history if "episode/turns" in record)
        assert record["reward/ten/mean"] == 30.0
        assert record["reward/mean"] == pytest.approx(30 + record["reward/environment/mean"])


class TestFailures:
    def test_the_run_stops_and_names_row_and_turn(self, checkpoint, tmp_path):
        with pytest.raises(RewardError, match=r"turn 1: .*the lamp went out") as caught:
            train(ppo(checkpoint, tmp_path), broken)
        assert "failed_rollouts" in "".join(caught.value.__notes__)
        (kept,) = (tmp_path / "failed_rollouts").glob("*.jsonl")
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        assert len(rows) >= 2 and all("turns" in row for row in rows)

    def test_under_skip_the_row_is_left_out_and_the_others_are_learned_from(self, checkpoint, tmp_path):
        trainer = train(ppo(checkpoint, tmp_path, reward_errors="skip", total_steps=4), broken)
        records = [record for record in trainer.history if "episode/turns" in record]
        assert sum(record["reward/failed"] for record in records) >= 1
        assert records[0]["reward/mean"] == 3.0

    def test_limits_of_turns_need_an_environment(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="`max_turns` limits the turns of an episode"):
            jrl.train(reward_fn=lambda outputs: [0.0], prompts=PROMPTS, config=ppo(checkpoint, tmp_path))

    def test_rft_refuses(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="would learn what the environment wrote"):
            train(rft_config(checkpoint, tmp_path))

    def test_another_reward_does_not_make_up_for_a_world_that_failed(self, checkpoint, tmp_path):
        """In training and in evaluation alike."""
        config = ppo(checkpoint, tmp_path, reward_errors="skip", total_steps=4)
        trainer = train(config, broken, reward_fn=lambda outputs: [5.0] * len(outputs))
        (before, *_) = (record for record in trainer.history if "evaluation" in record)
        assert before["reward/mean"] == 8.0 and before["reward/failed"] == 1.0
        records = [record for record in trainer.history if "episode/turns" in record]
        assert records[0]["reward/mean"] == 8.0

    def test_rewards_of_tokens_that_nobody_chose_are_refused(self, checkpoint, tmp_path):
        def every(output_tokens: list[list[int]]) -> list[list[float]]:
            return [[1.0] * len(row) for row in output_tokens]

        with pytest.raises(RewardError, match="must be 0 on tokens that the environment wrote"):
            train(ppo(checkpoint, tmp_path), reward_fn=every)

    def test_it_is_named_where_nothing_is_learned(self, checkpoint, tmp_path):
        trainer = prepare(
            environment=broken, prompts=PROMPTS, eval_prompts=PROMPTS, config=ppo(checkpoint, tmp_path)
        )
        with pytest.raises(EnvironmentFailure, match="the lamp went out"):
            trainer.generate(PROMPTS)
        with pytest.raises(EnvironmentFailure, match="the lamp went out"):
            trainer.record_episodes(PROMPTS, tmp_path / "episodes.jsonl")

    def test_an_object_in_the_place_of_its_class_is_named(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="Is it an object"):
            train(ppo(checkpoint, tmp_path), Echo())


class TestRecords:
    def test_recorded_episodes_are_data_for_offline_trainers(self, learned, tmp_path):
        trainer, _, _ = learned
        path = tmp_path / "episodes.jsonl"
        assert trainer.record_episodes(PROMPTS, path, seed=1) == len(PROMPTS)
        rows = jrl.read_records(path)
        tokenizer = tiny_tokenizer()
        for row, prompt in zip(rows, PROMPTS, strict=True):
            assert row["prompt"] == f"{prompt}hi " and row["done"] is True
            for turn in row["turns"]:
                assert tokenizer.decode(turn["output_tokens"], skip_special_tokens=True) == turn["output"]
        again = tmp_path / "again.jsonl"
        trainer.record_episodes(PROMPTS, again, seed=1)
        assert again.read_text() == path.read_text()
