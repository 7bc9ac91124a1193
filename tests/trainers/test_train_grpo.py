# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives from a checkpoint to a trained policy: groups of samples, one update, exact resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.mesh import abstract_mesh
from jrl.rollout.rewards import RewardError
from jrl.trainers.config.method import footprint_of
from jrl.trainers.loop import Stopwatch
from jrl.trainers.plan.run_plan import plan_run
from tests.trainers.runs import (
    PROMPTS,
    count_vowels,
    dynamic_config,
    grpo_config,
    odd_vowels,
    repeatable,
    save_tiny_checkpoint,
)


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
    def test_iterations_without_a_lesson_are_told_once_and_counted(
        self, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = grpo_config(checkpoint, tmp_path / "run", "dr_grpo", train={"total_steps": 3, "epochs": 3})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = jrl.train(
                reward_fn=lambda outputs: [1.0] * len(outputs), prompts=PROMPTS, config=config
            )
        (told,) = [str(one.message) for one in caught if "no prompt has two samples" in str(one.message)]
        assert told.startswith("Iteration 0") and "said once" in told
        assert [record["group/degenerate_iterations"] for record in updates(trainer)] == [1, 2, 3]
        assert "in 3 of 3 iterations no prompt had samples whose scores differ" in capsys.readouterr().out


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
        said = [text for text in told if "differ in their scores" in text]
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


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra": ("llama", {"num_layers_unfrozen": 1}),
    "lora": ("gpt2", {"peft_config": LORA, "num_layers_unfrozen": -1}),
    "t5": ("t5", {"model_arch_type": "seq2seq"}),
    "t5 hydra": ("t5", {"model_arch_type": "seq2seq", "num_layers_unfrozen": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_learns_from_refilled_groups(kind: str, tmp_path: Path) -> None:
    """With a reference; the first ratio is 1, and a run that was cut is the whole one to the bit."""
    family, model = MODELS[kind]
    checkpoint = save_tiny_checkpoint(tmp_path / "model", family)

    def odd_letters(outputs: list[str]) -> list[float]:
        return [float(sum(map(ord, text)) % 2 or len(text) % 3 == 0) for text in outputs]

    def run(folder: str, **train: Any) -> Any:
        method = {"beta": 0.05, "kl_estimator": "k2", "num_iterations": 2}
        config = dynamic_config(checkpoint, tmp_path / folder, model=model, method=method, train=train)
        return jrl.train(reward_fn=odd_letters, prompts=PROMPTS, config=config.evolve(train={"epochs": 100}))

    whole = run("whole", total_steps=8)
    assert len(updates(whole)) == 4 and max(record["group/asked"] for record in updates(whole)) > 2
    for record in updates(whole):
        # Log-probabilities of the tiny T5 reach 35 nats: four ulp of them on either side.
        assert record["grpo/ratio_max_dev_first_minibatch"] < 8 * np.spacing(np.float32(35))
        assert np.isfinite(record["kl/per_token"]) and np.isfinite(record["optim/grad_norm"])
    run("cut", total_steps=4)
    cut = run("cut", total_steps=8, resume_from_checkpoint=str(tmp_path / "cut"))
    jax.tree.map(np.testing.assert_array_equal, cut.state, whole.state)
    assert cut.first_prompt(4) == whole.first_prompt(4)


def sums_of_letters(outputs: list[str]) -> list[float]:
    """A number that nearly every two texts differ in, of the tiny T5 too."""
    return [sum(map(ord, text)) % 7 / 7 for text in outputs]


def read_in_the_update(model: dict[str, Any], checkpoint: str, folder: Path, **train: Any) -> Any:
    """A run whose updates hold the policy against the whole distributions of the reference, two steps each."""
    method = {"beta": 0.05, "kl_estimator": "full", "num_iterations": 2}
    config = grpo_config(checkpoint, folder, model=model, method=method, train={"total_steps": 4} | train)
    return jrl.train(reward_fn=sums_of_letters, prompts=PROMPTS, config=config)


def assert_it_left_its_reference(trainer: Any) -> None:
    """Policy and reference are one before the first step alone, and the reference is not what trains."""
    first, second = updates(trainer)
    assert 0 < first["grpo/kl_term"] < second["grpo/kl_term"] < 1
    for record in (first, second):
        assert np.isfinite(record["optim/grad_norm"]) and record["optim/skipped_steps"] == 0
    # The scoring pass draws what the update computes, a mean over the same actions.
    assert np.isfinite(second["kl/per_token"])


@pytest.mark.slow
def test_the_whole_divergence_of_a_hydra(checkpoint: str, tmp_path: Path) -> None:
    """And a run that was cut is the whole one to the bit: the reference is read from the checkpoint anew."""
    model = {"num_layers_unfrozen": 1}
    whole = read_in_the_update(model, checkpoint, tmp_path / "whole")
    assert_it_left_its_reference(whole)
    read_in_the_update(model, checkpoint, tmp_path / "cut", total_steps=2)
    cut = read_in_the_update(
        model, checkpoint, tmp_path / "cut", resume_from_checkpoint=str(tmp_path / "cut")
    )
    jax.tree.map(np.testing.assert_array_equal, cut.state, whole.state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "t5", "t5 hydra"])
def test_the_whole_divergence_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    family, model = MODELS[kind]
    checkpoint = save_tiny_checkpoint(tmp_path / "model", family)
    trainer = read_in_the_update(model, checkpoint, tmp_path / "run")
    assert (trainer.ref_params == {}) is (kind == "lora")
    assert_it_left_its_reference(trainer)


class TestMistakes:
    """What a user gets wrong: the message names it, what was expected, what came, and what to do."""

    def test_a_reward_function_with_another_number_of_rewards(self, checkpoint: str, tmp_path: Path) -> None:
        def reward(outputs: list[str]) -> list[float]:
            return [1.0] * len(set(outputs[:1]))

        config = grpo_config(checkpoint, tmp_path / "run", train={"eval_interval": 100})
        trainer = jrl.OnlineTrainer(config, reward_fn=reward)
        trainer.add_prompts(PROMPTS, reward)
        said = (
            r"`reward_fn` must return one reward a sample: got 1 for 4 samples. Did it filter or repeat any\?"
        )
        with pytest.raises(RewardError, match=said):
            collect(trainer)

    def test_scores_below_zero_where_their_mean_divides(self, checkpoint: str, tmp_path: Path) -> None:
        def reward(outputs: list[str]) -> list[float]:
            return [1.0, -0.5] * (len(outputs) // 2)

        config = grpo_config(checkpoint, tmp_path / "run", method={"estimator": "mean_scaled", "beta": 0.0})
        trainer = jrl.OnlineTrainer(config, reward_fn=reward)
        trainer.add_prompts(PROMPTS, reward)
        with pytest.raises(
            RewardError, match=r"must not be negative for this algorithm.*got -0\.5\. Reward right"
        ):
            collect(trainer)

    @pytest.mark.parametrize("answer", [float("nan"), None])
    def test_a_reward_function_that_never_speaks(
        self, answer: float | None, checkpoint: str, tmp_path: Path
    ) -> None:
        def reward(outputs: list[str]) -> list[float | None]:
            return [answer] * len(outputs)

        config = grpo_config(checkpoint, tmp_path / "run", train={"reward_errors": "skip"})
        trainer = jrl.OnlineTrainer(config, reward_fn=reward)
        trainer.add_prompts(PROMPTS, reward)
        said = r"No rollout of the iteration has a reward.*\. Is a service it calls down\? Give a reward function"
        with pytest.raises(RewardError, match=said):
            collect(trainer)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            (
                {"num_generations": 1},
                "`method.num_generations` must be at least 2: `estimator: group_relative` compares the samples of a "
                "prompt, got 1",
            ),
            (
                {"num_generations": 3},
                "`method.num_generations` must be at least 1 and a divisor of `method.num_rollouts` = 8: all samples "
                r"of a prompt belong to one iteration \(2 or 4 would fit\), got 3",
            ),
            (
                {"chunk_size": 6},
                "`method.chunk_size` must be a multiple of `method.num_generations` = 4.*got 6",
            ),
            (
                {"surogate": "cispo"},
                r"Unknown field `method.surogate` of GRPOConfig. Did you mean `surrogate`\?",
            ),
            (
                {"surrogate": "cispoo"},
                r"`method.surrogate` must be one of .*got 'cispoo'. Did you mean `cispo`\?",
            ),
        ],
    )
    def test_a_field_of_the_configuration(self, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
        with pytest.raises((ValueError, TypeError), match=said):
            grpo_config("model", tmp_path, method=fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "dapo", "gspo", "cispo", "remax", "reinforce_pp", "dr_grpo", "opo"])
def test_every_kind_of_relative_trains(name: str, checkpoint: str, tmp_path: Path) -> None:
    trainer = train(grpo_config(checkpoint, tmp_path, name))
    assert len(updates(trainer)) == 4
    assert all(
        np.isfinite(record["optim/grad_norm"]) for record in updates(trainer) if "optim/grad_norm" in record
    )


def collect(trainer: Any) -> Any:
    """The first iteration's experience."""
    with jax.set_mesh(trainer.mesh):
        return trainer.collect(
            trainer.params,
            trainer.frozen,
            trainer.ref_params,
            0,
            trainer.keys(0)[0],
            while_sampling=lambda: None,
            stopwatch=Stopwatch(),
        )


def test_a_sampler_that_is_believed_saves_the_scoring_pass(checkpoint: str, tmp_path: Path) -> None:
    found = {}
    for believed in (False, True):
        method = {"beta": 0.0, "num_iterations": 2, "old_logprobs_from_sampler": believed}
        config = grpo_config(checkpoint, tmp_path / str(believed), method=method, train={"total_steps": 1})
        trainer = jrl.OnlineTrainer(config, reward_fn=count_vowels)
        trainer.add_prompts(PROMPTS, count_vowels)
        found[believed] = collect(trainer)
        footprint = footprint_of(trainer.config)
        assert footprint is not None and footprint.scores == (None if believed else "rollouts")
    scored, own = (found[believed].rollouts for believed in (False, True))
    np.testing.assert_array_equal(own.scored.logprobs, own.sampler_logprobs)
    mask = np.asarray(own.sequences.mask)
    np.testing.assert_allclose(own.scored.logprobs[mask], scored.scored.logprobs[mask], atol=1e-5)
    # Nothing was compared, so nothing is said to agree.
    assert found[True].agreement == {} and "sampler/kl_k3" in found[False].agreement


def test_a_single_step_saves_the_scoring_pass_and_holds_the_sampler_against_itself(
    checkpoint: str, tmp_path: Path
) -> None:
    config = grpo_config(
        checkpoint, tmp_path, method={"beta": 0.0, "num_iterations": 1}, train={"total_steps": 2}
    )
    config = config.evolve(train={"batch_size": config.method.num_rollouts})
    footprint = footprint_of(config)
    assert footprint is not None and footprint.scores is None
    trainer = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    records = [record for record in trainer.history if "iteration" in record]
    assert len(records) == 2
    for record in records:
        assert record["sampler/max_difference"] < 1e-4 and record["sampler/ratio"] == pytest.approx(
            1, abs=1e-4
        )
        assert record["grpo/ratio_max_dev_first_minibatch"] == 0


def test_a_reference_is_scored_whoever_is_believed(checkpoint: str, tmp_path: Path) -> None:
    config = grpo_config(checkpoint, tmp_path, method={"beta": 0.1, "old_logprobs_from_sampler": True})
    trainer = jrl.OnlineTrainer(config, reward_fn=count_vowels)
    trainer.add_prompts(PROMPTS, count_vowels)
    experience = collect(trainer)
    assert experience.rollouts.scored.ref_logprobs is not None and "sampler/kl_k3" in experience.agreement


def test_the_baseline_of_remax_is_the_score_of_the_greedy_completion(checkpoint: str, tmp_path: Path) -> None:
    trainer = jrl.OnlineTrainer(grpo_config(checkpoint, tmp_path, "remax"), reward_fn=count_vowels)
    trainer.add_prompts(PROMPTS, count_vowels)
    experience = collect(trainer)
    prompts = [row["prompt"] for row in experience.rows]
    greedy = trainer.generate(prompts, gen_kwargs={"do_sample": False})
    np.testing.assert_allclose(experience.rollouts.greedy_scores, count_vowels(greedy), rtol=1e-6)
    written = trainer.tokenizer(greedy, add_special_tokens=False)["input_ids"]
    assert [len(row) for row in written] == [6] * len(greedy)  # cut by the limit: no EOS beside them
    sampled = sum(len(row["output_tokens"]) for row in experience.rows)
    one_a_group = len(greedy) // trainer.method.num_generations
    assert experience.metrics["completion/tokens"] == sampled + 6 * one_a_group
