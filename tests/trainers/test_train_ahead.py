# SPDX-License-Identifier: Apache-2.0
"""Rollouts ahead of their updates, through `jrl.train`: the schedule, its repetition, resuming, failures, refusals."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.interop import write_checkpoint
from jrl.placement import DISPATCH
from jrl.rollout.rewards import RewardError
from tests.trainers.runs import (
    PROMPTS,
    count_vowels,
    dynamic_config,
    grpo_config,
    odd_vowels,
    ppo_config,
    repeatable,
    save_tiny_checkpoint,
    sft_config,
)

SECONDS = 60.0
"""After which a test that waits for another thread gives up."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def ppo(checkpoint: str, folder: Path, ahead: int, **train: Any) -> jrl.TRLConfig:
    return ppo_config(checkpoint, folder, train={"rollouts_ahead": ahead, "total_steps": 20, **train})


def train(config: jrl.TRLConfig, reward_fn: Any = count_vowels) -> Any:
    return jrl.train(reward_fn=reward_fn, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)


def iterations(trainer: Any) -> list[dict[str, Any]]:
    return [record for record in repeatable(trainer.history) if "iteration" in record]


def assert_same(one: Any, two: Any) -> None:
    """The same run to the bit, from wherever the second one began."""
    last = iterations(two)
    assert last and iterations(one)[-len(last) :] == last
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


@pytest.fixture(scope="module")
def whole(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return {
        ahead: train(ppo(checkpoint, tmp_path_factory.mktemp(f"ahead_{ahead}"), ahead)) for ahead in (0, 1, 3)
    }


class TestSchedule:
    @pytest.mark.parametrize("ahead", [1, 3])
    def test_iteration_n_is_sampled_by_the_policy_after_update_n_minus_ahead(
        self, checkpoint: str, tmp_path: Path, ahead: int
    ) -> None:
        trainer = prepare(
            reward_fn=count_vowels, prompts=PROMPTS, config=ppo(checkpoint, tmp_path, ahead, eval_interval=0)
        )
        sampled, learned = dict[int, Any](), list[Any]()
        collect, update = trainer.collect, trainer.update

        def collected(params: Any, frozen: Any, ref: Any, iteration: int, *rest: Any, **options: Any) -> Any:
            sampled[iteration] = jax.device_get(params)
            return collect(params, frozen, ref, iteration, *rest, **options)

        def updated(state: Any, *rest: Any) -> Any:
            learned.append(jax.device_get(state.train.params))
            return update(state, *rest)

        trainer.collect, trainer.update = collected, updated
        trainer.learn()
        assert len(learned) == 5 and sorted(sampled) == list(range(5))
        for iteration, params in sampled.items():
            jax.tree.map(np.testing.assert_array_equal, params, learned[max(0, iteration - ahead)])
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, learned[:2]), strict=True))

    def test_records_say_how_old_the_policy_was(self, whole: dict[int, Any]) -> None:
        def staleness(ahead: int) -> list[float | None]:
            return [record.get("rollout/staleness") for record in iterations(whole[ahead])]

        assert staleness(0) == [None] * 5
        assert staleness(1) == [0, 1, 1, 1, 1]
        assert staleness(3) == [0, 1, 2, 3, 3]

    def test_the_first_iterations_are_those_of_a_run_that_waits(self, whole: dict[int, Any]) -> None:
        waits, ahead = iterations(whole[0]), iterations(whole[3])
        names = ("reward/mean", "ppo/policy_loss", "completion/tokens")
        assert [ahead[0][name] for name in names] == [waits[0][name] for name in names]
        assert ahead[1]["reward/mean"] != waits[1]["reward/mean"]

    def test_it_compiles_nothing_after_its_first_iterations(self, whole: dict[int, Any]) -> None:
        counts = [record["perf/compilations"] for record in whole[3].history if "perf/compilations" in record]
        assert counts[1:] == [counts[1]] * 4

    def test_a_reward_may_wait_for_what_is_collected_later(self, checkpoint: str, tmp_path: Path) -> None:
        """The second iteration samples while the first is judged: else this would wait for ever."""
        later = threading.Event()

        def patient(outputs: list[str], **others: Any) -> list[float]:
            assert later.wait(SECONDS), "nothing was sampled meanwhile"
            return count_vowels(outputs)

        trainer = prepare(
            reward_fn=patient,
            prompts=PROMPTS,
            config=ppo(checkpoint, tmp_path, 1, total_steps=8, eval_interval=0),
        )
        trainer.eval_prompts = None
        collect = trainer.collect

        def collected(params: Any, frozen: Any, ref: Any, iteration: int, *rest: Any, **options: Any) -> Any:
            if iteration == 1:
                later.set()
            return collect(params, frozen, ref, iteration, *rest, **options)

        trainer.collect = collected
        trainer.learn()
        assert len(iterations(trainer)) == 2

    def test_reward_functions_are_called_one_at_a_time(self, checkpoint: str, tmp_path: Path) -> None:
        inside, most = 0, list[int]()
        count = threading.Lock()

        def watched(outputs: list[str], **others: Any) -> list[float]:
            nonlocal inside
            with count:
                inside += 1
                most.append(inside)
            threading.Event().wait(0.02)
            with count:
                inside -= 1
            return count_vowels(outputs)

        train(ppo(checkpoint, tmp_path, 3), watched)
        assert set(most) == {1}


class TestRepeats:
    @pytest.mark.parametrize("ahead", [1, 3])
    def test_twice_is_the_same_to_the_bit(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any], ahead: int
    ) -> None:
        def slow(outputs: list[str], **others: Any) -> list[float]:
            threading.Event().wait(0.03)
            return count_vowels(outputs)

        assert_same(whole[ahead], train(ppo(checkpoint, tmp_path, ahead), slow))

    @pytest.mark.parametrize(("ahead", "steps"), [(1, 4), (1, 12), (3, 4), (3, 16)])
    def test_resumed_is_the_run_that_never_stopped(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any], ahead: int, steps: int
    ) -> None:
        train(ppo(checkpoint, tmp_path, ahead, total_steps=steps))
        config = ppo(checkpoint, tmp_path, ahead, resume_from_checkpoint=str(tmp_path))
        assert_same(whole[ahead], train(config))

    def test_dynamic_sampling_goes_on_in_the_stream_of_prompts(self, checkpoint: str, tmp_path: Path) -> None:
        def dapo(folder: str, **train_section: Any) -> jrl.TRLConfig:
            return dynamic_config(
                checkpoint, tmp_path / folder, train={"rollouts_ahead": 2, "total_steps": 6, **train_section}
            )

        one = train(dapo("one"), odd_vowels)
        asked = [record["group/asked"] for record in iterations(one)]
        assert one.first_prompt(6) == sum(asked) > 6 * 2
        train(dapo("two", total_steps=3), odd_vowels)
        two = train(dapo("two", resume_from_checkpoint=str(tmp_path / "two")), odd_vowels)
        assert_same(one, two)

    def test_episodes_are_played_ahead(self, checkpoint: str, tmp_path: Path) -> None:
        def echo(text: str, turn: int) -> tuple[str, float, bool]:
            return " so", sum(letter in "aeiou" for letter in text) / 4, turn == 1

        def config(folder: str, **train_section: Any) -> jrl.TRLConfig:
            section = {"total_steps": 12, "seq_length": 48, **train_section}
            found = ppo(checkpoint, tmp_path / folder, 2, **section)
            return found.evolve(method={"gen_kwargs": {"max_new_tokens": 16, "max_turn_tokens": 4}})

        def play(config: jrl.TRLConfig) -> Any:
            return jrl.train(environment=echo, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)

        one = play(config("one"))
        assert iterations(one)[-1]["episode/turns"] == 2.0
        play(config("two", total_steps=8))
        assert_same(one, play(config("two", resume_from_checkpoint=str(tmp_path / "two"))))


class TestFailures:
    def test_a_failure_is_told_at_its_iterations_turn(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any]
    ) -> None:
        """What came before is learned from and kept, and the run goes on as if nothing had been."""
        broken = True

        def third(outputs: list[str], **others: Any) -> list[float]:
            if broken and threading.current_thread().name == "rollouts-2":
                raise RuntimeError("the service is down")
            return count_vowels(outputs)

        with pytest.raises(RewardError, match="the service is down"):
            train(ppo(checkpoint, tmp_path, 1, eval_interval=0), third)  # no evaluation has saved before
        assert (tmp_path / "checkpoint_8").exists()
        kept = list((tmp_path / "failed_rollouts").iterdir())
        assert [path.name for path in kept] == ["failed_rollouts_iteration_000002_row_000000.jsonl"]
        broken = False
        config = ppo(checkpoint, tmp_path, 1, eval_interval=0, resume_from_checkpoint=str(tmp_path))
        assert_same(whole[1], train(config, third))

    @pytest.mark.parametrize(("ahead", "failing"), [(1, 0), (1, 2), (3, 0), (3, 3)])
    def test_an_update_that_fails_is_made_again_with_its_own_rollouts(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any], ahead: int, failing: int
    ) -> None:
        trainer = prepare(
            reward_fn=count_vowels,
            prompts=PROMPTS,
            eval_prompts=PROMPTS[:2],
            config=ppo(checkpoint, tmp_path, ahead),
        )
        update, made = trainer.update, list[int]()

        def interrupted(*given: Any) -> Any:
            if len(made) == failing:
                raise ValueError("no update today")
            made.append(failing)
            return update(*given)

        trainer.update = interrupted
        with pytest.raises(ValueError, match="no update today"):
            trainer.learn()
        assert (tmp_path / f"checkpoint_{4 * failing}").exists() == (failing > 0)
        resumed = str(tmp_path) if failing else None
        folder = tmp_path if failing else tmp_path / "again"
        assert_same(whole[ahead], train(ppo(checkpoint, folder, ahead, resume_from_checkpoint=resumed)))

    @pytest.mark.parametrize("ahead", [1, 3])
    def test_an_evaluation_made_up_for_keeps_the_policies_of_its_checkpoint(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any], ahead: int
    ) -> None:
        """Its checkpoint is written before the rollouts begin that were on their way."""
        fails = {"evaluation": True, "rollouts": False}

        def reward(outputs: list[str], **others: Any) -> list[float]:
            is_ahead = threading.current_thread().name.startswith("rollouts-")
            if fails["rollouts" if is_ahead else "evaluation"] and any(found):
                raise RuntimeError("the service is down")
            return count_vowels(outputs)

        found: list[Path] = []
        config = ppo(checkpoint, tmp_path, ahead)
        trainer = prepare(reward_fn=reward, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)
        after = trainer.count

        def counted(experience: Any, iteration: int) -> dict[str, float]:
            found[:] = [tmp_path] if iteration == 1 else []
            return after(experience, iteration)

        trainer.count = counted
        with pytest.raises(RewardError):  # of the evaluation at step 8
            trainer.learn()
        fails |= {"evaluation": False, "rollouts": True}
        resumed = config.evolve(train={"resume_from_checkpoint": str(tmp_path)})
        with pytest.raises(RewardError):  # of the rollouts behind it
            train(resumed, reward)
        fails["rollouts"] = False
        assert_same(whole[ahead], train(resumed, reward))
        assert not (tmp_path / "checkpoint_4").exists()

    def test_a_checkpoint_written_by_hand_keeps_the_policies(
        self, checkpoint: str, tmp_path: Path, whole: dict[int, Any]
    ) -> None:
        for ahead in (1, 3):
            run, other = tmp_path / f"run_{ahead}", tmp_path / f"other_{ahead}"
            trainer = train(ppo(checkpoint, run, ahead, total_steps=12))
            write_checkpoint(trainer, other, steps_per_iteration=4, evaluations=2)
            with pytest.warns(UserWarning, match="0 records"):  # those lie in the run's own folder
                again = train(ppo(checkpoint, other, ahead, resume_from_checkpoint=str(other)))
            assert_same(whole[ahead], again)

    def test_two_runs_of_a_process_do_not_wait_for_each_others_rewards(
        self, checkpoint: str, tmp_path: Path
    ) -> None:
        """A call that hangs in one run, given up by it, holds up no other."""
        runs = [
            prepare(reward_fn=count_vowels, prompts=PROMPTS, config=ppo(checkpoint, tmp_path / name, 1))
            for name in ("one", "two")
        ]
        first, second = (run.reward_call(count_vowels).asking for run in runs)
        assert first is runs[0].reward_call(count_vowels).asking
        assert first is not second

    def test_what_nobody_waits_for_any_more_sends_nothing_to_a_device(
        self, checkpoint: str, tmp_path: Path
    ) -> None:
        """A reward that hangs in a later iteration neither keeps the run from ending nor samples afterwards."""
        judged, hangs, goes_on, calls = threading.Event(), threading.Event(), threading.Event(), list[str]()

        def stuck(outputs: list[str], **others: Any) -> list[float]:
            calls.append(threading.current_thread().name)
            if calls.count("rollouts-0") == 2:
                judged.set()
            if calls[-1] == "rollouts-1":
                hangs.set()
                assert goes_on.wait(SECONDS)
            return count_vowels(outputs)

        trainer = prepare(
            reward_fn=stuck, prompts=PROMPTS, config=ppo(checkpoint, tmp_path, 1, eval_interval=0)
        )
        trainer.eval_prompts = None
        collect = trainer.collect

        def collected(params: Any, frozen: Any, ref: Any, iteration: int, *rest: Any, **options: Any) -> Any:
            if iteration == 1:  # one reward function is called at a time: that which hangs is to be the last
                with DISPATCH.left():
                    assert judged.wait(SECONDS)
            return collect(params, frozen, ref, iteration, *rest, **options)

        trainer.collect = collected

        def failing(*given: Any) -> Any:
            with DISPATCH.left():
                assert hangs.wait(SECONDS)
            raise ValueError("no update today")

        trainer.update = failing
        with pytest.raises(ValueError, match="no update today"):
            trainer.learn()
        (thread,) = [found for found in threading.enumerate() if found.name.startswith("rollouts-")]
        goes_on.set()
        thread.join(SECONDS)
        assert not thread.is_alive() and calls.count("rollouts-1") == 1


def by_letters(outputs: list[str], **others: Any) -> list[float]:
    """Tells nearly all texts apart."""
    return [sum(map(ord, text)) % 7 / 7 for text in outputs]


class TestCorrection:
    def test_a_single_step_compares_with_the_policy_that_sampled(
        self, checkpoint: str, tmp_path: Path
    ) -> None:
        """GRPO with one step an iteration takes its own log-probabilities as the old ones, unless it is behind."""
        for ahead in (0, 1):
            config = grpo_config(
                checkpoint,
                tmp_path / str(ahead),
                train={"rollouts_ahead": ahead},
                optimizer={"kwargs": {"lr": 1e-2}},
            )
            trainer = train(config, by_letters)
            deviations = [record["grpo/ratio_max_dev_first_minibatch"] for record in iterations(trainer)]
            assert (max(deviations[1:]) > 1e-3) == bool(ahead) and deviations[0] < 1e-4

    def test_a_corrected_sampler_is_weighed_by_the_policy_that_learns(
        self, checkpoint: str, tmp_path: Path
    ) -> None:
        for ahead in (0, 1):
            config = grpo_config(
                checkpoint,
                tmp_path / str(ahead),
                train={"rollouts_ahead": ahead},
                method={"importance_sampling_mode": "token_truncate"},
                optimizer={"kwargs": {"lr": 1e-2}},
            )
            trainer = train(config, by_letters)
            records = iterations(trainer)
            shares = [record["sampler/ess"] for record in records]
            assert (min(shares[1:]) < 0.9999) == bool(ahead), shares
            # The ratio of the step is to the policy before it, and not to the one that sampled.
            assert max(record["grpo/ratio_max_dev_first_minibatch"] for record in records) < 1e-4


class TestRefused:
    def test_a_surrogate_that_corrects_nothing(self, checkpoint: str, tmp_path: Path) -> None:
        config = grpo_config(
            checkpoint, tmp_path, method={"surrogate": "reinforce"}, train={"rollouts_ahead": 1}
        )
        with pytest.raises(ValueError, match="nothing would correct for the updates in between"):
            train(config)

    def test_offline_algorithms(self, checkpoint: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`train\.rollouts_ahead` must be 0 for SFTConfig, got 2"):
            sft_config(checkpoint, tmp_path, train={"rollouts_ahead": 2})

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ({"rollouts_ahead": -1}, "`train.rollouts_ahead` must be at least 0, got -1"),
            ({"sampling_mesh": {"data": 1}}, "`train.rollouts_ahead` must be at least 1 beside"),
            ({"rollouts_ahead": 1, "sampling_mesh": {"data": -1}}, "`train.sampling_mesh` must be sizes"),
            ({"rollouts_ahead": 1, "sampling_mesh": {"rows": 1}}, "`train.sampling_mesh` must be sizes"),
            ({"rollouts_ahead": 1, "sampling_mesh": {}}, "`train.sampling_mesh` must be sizes"),
        ],
    )
    def test_values_out_of_range(
        self, checkpoint: str, tmp_path: Path, section: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            ppo_config(checkpoint, tmp_path, train=section)

    def test_no_device_left_to_learn_on(self, checkpoint: str, tmp_path: Path) -> None:
        section = {"rollouts_ahead": 1, "sampling_mesh": {"data": jax.device_count()}}
        with pytest.raises(ValueError, match=r"`train\.sampling_mesh` must leave a device to learn on"):
            train(ppo_config(checkpoint, tmp_path, train=section))
