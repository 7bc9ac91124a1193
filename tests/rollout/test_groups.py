# SPDX-License-Identifier: Apache-2.0
"""Several samples of one prompt: they share a pass over it, and are known as a group."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jrl
from jrl.rollout.generate import repeat_rows
from jrl.trainers.loop import Stopwatch
from tests.rollout.programs import sample
from tests.tiny import tiny_contexts, tiny_prompts, tiny_tokenizer
from tests.trainers.runs import PROMPTS, ppo_config, save_tiny_checkpoint

COUNT = 3


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_samples_that_share_a_pass_over_their_prompt_are_those_that_do_not(family: str) -> None:
    prompts = tiny_contexts(2) if family == "t5" else tiny_prompts(2)
    alone = sample(family, repeat_rows(prompts, COUNT), max_new_tokens=12)
    shared = sample(family, prompts, row_ids=np.arange(2 * COUNT), max_new_tokens=12, num_generations=COUNT)
    np.testing.assert_array_equal(shared.tokens, alone.tokens)
    np.testing.assert_allclose(shared.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
    assert len({tuple(row) for row in shared.tokens.tolist()}) == 2 * COUNT  # each sample is its own


def test_a_repetition_penalty_knows_each_samples_prompt() -> None:
    prompts, penalty = tiny_prompts(2), 1.3
    alone = sample("gpt2", repeat_rows(prompts, COUNT), max_new_tokens=8, repetition_penalty=penalty)
    shared = sample(
        "gpt2",
        prompts,
        row_ids=np.arange(2 * COUNT),
        max_new_tokens=8,
        repetition_penalty=penalty,
        num_generations=COUNT,
    )
    np.testing.assert_array_equal(shared.tokens, alone.tokens)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> jrl.PPOTrainer:
    """8 rollouts of 4 prompts, in calls of 4."""
    folder = tmp_path_factory.mktemp("groups")
    config = ppo_config(save_tiny_checkpoint(folder / "model"), folder / "run", method={"num_generations": 2})
    trainer = jrl.PPOTrainer(config, reward_fn=lambda outputs, **_: [float(len(x)) for x in outputs])
    trainer.add_prompts(PROMPTS, trainer.reward_fn)
    return trainer


@pytest.fixture(scope="module")
def experiences(trainer: jrl.PPOTrainer) -> list:
    def collect(iteration: int):
        with jax.set_mesh(trainer.mesh):
            return trainer.collect(
                trainer.params,
                trainer.frozen,
                trainer.ref_params,
                iteration,
                trainer.keys(iteration)[0],
                while_sampling=lambda: None,
                stopwatch=Stopwatch(),
            )

    return [collect(iteration) for iteration in range(3)]


class TestOfATrainer:
    def test_groups_are_the_samples_of_a_prompt(self, experiences: list) -> None:
        for experience in experiences:
            prompts = [row["prompt"] for row in experience.rows]
            np.testing.assert_array_equal(experience.rollouts.groups, [0, 0, 1, 1, 2, 2, 3, 3])
            assert prompts[::2] == prompts[1::2]
            assert len({row["output"] for row in experience.rows}) > 4

    def test_every_prompt_comes_once_a_pass_over_the_set(self, experiences: list) -> None:
        prompts = [row["prompt"] for experience in experiences for row in experience.rows[::2]]
        assert sorted(prompts[:6]) == sorted(prompts[6:]) == sorted(PROMPTS)

    def test_rows_are_those_of_their_prompt_and_the_samplers_log_probabilities_are_kept(
        self, experiences: list
    ) -> None:
        rollouts, tokenizer = experiences[0].rollouts, tiny_tokenizer()
        sequences = rollouts.sequences
        for row, logged in enumerate(experiences[0].rows):
            real = np.asarray(sequences.inputs.tokens)[row][np.asarray(sequences.inputs.attention_mask)[row]]
            assert tokenizer.decode(real, skip_special_tokens=True).startswith(logged["prompt"])
        mask = np.asarray(sequences.mask)
        np.testing.assert_allclose(
            np.asarray(rollouts.sampler_logprobs)[mask], np.asarray(rollouts.scored.logprobs)[mask], atol=1e-4
        )


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"num_generations": 3}, "a divisor of `method.num_rollouts` = 8"),
        ({"num_generations": 0}, "at least 1"),
        ({"num_generations": 8}, "`method.chunk_size` must be a multiple of `method.num_generations` = 8"),
    ],
)
def test_what_splits_a_group_is_refused(method: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        jrl.PPOConfig(num_rollouts=8, chunk_size=4, **method)
