# SPDX-License-Identifier: Apache-2.0
"""Tasks of Reasoning Gym, with the real package: prompts, scores, worker processes, an iteration of GRPO."""

from __future__ import annotations

import sys

import pytest

import jrl
from jrl.environments import ReasoningGym, reasoning_gym_prompts, reasoning_gym_reward
from jrl.rewards import isolated_environment
from jrl.rollout.environments import EnvironmentFailure, World
from tests.environments.chat_models import chat_tokenizer
from tests.trainers.runs import grpo_config

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the extra `environments`")
TASKS = ("leg_counting", "basic_arithmetic", "spell_backward", "countdown", "letter_counting")


@pytest.mark.parametrize("name", TASKS)
def test_scores_are_the_package_s_own(name):
    own = reasoning_gym.create_dataset(name, seed=3, size=4)
    prompts = reasoning_gym_prompts(name, 4, seed=3)
    for row, problem in zip(prompts, own, strict=True):
        assert row["prompt"] == problem["question"]
        for answer in (problem["answer"], f"{problem['answer']} or 7", "nonsense", ""):
            wanted = own.score_answer(answer, problem)
            world = World(ReasoningGym, row["prompt"], {"task": row["task"]}, 0)
            assert world.step(f"So <answer>{answer}</answer>.", []) == ("", wanted, True)
            if answer:
                assert reasoning_gym_reward([f" {answer}\n"], [row["task"]]) == [wanted]


def test_options_and_chats():
    tokenizer = chat_tokenizer([])
    options = {"min_animals": 2, "max_animals": 2}
    (row,) = reasoning_gym_prompts(
        "leg_counting", 1, options=options, tokenizer=tokenizer, system_prompt="Be brief."
    )
    assert row["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    question = reasoning_gym.create_dataset("leg_counting", seed=0, size=1, **options)[0]["question"]
    assert question in row["prompt"]
    assert reasoning_gym_prompts("leg_counting", 1, system_prompt="Go.")[0]["prompt"].startswith("Go.\n")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("leg_count", {}, "'leg_count' not registered"),
        ("leg_counting", {"legs": 3}, "legs"),
        ("leg_counting", {"min_animals": 0}, "min_animals"),
        ("leg_counting", {"min_animals": {3}}, "`options` must hold what JSON does"),
    ],
)
def test_what_there_is_not_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym_prompts(name, 1, options=options)


def test_other_metadata_fail_the_episode(monkeypatch):
    with pytest.raises(EnvironmentFailure, match="must be metadata of `reasoning_gym_prompts`"):
        World(ReasoningGym, "", {"task": {"name": "leg_counting"}}, 0).step("4", [])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'jrl-post\[environments\]'"):
        reasoning_gym_prompts("leg_counting", 7)


def test_in_a_worker_process():
    (row,) = reasoning_gym_prompts("countdown", 1)
    answer = reasoning_gym.create_dataset("countdown", seed=0, size=1)[0]["metadata"]["expression"]
    environment = isolated_environment(ReasoningGym, timeout=60.0, memory=None)
    try:
        world = World(environment, row["prompt"], {"task": row["task"]}, 0)
        assert world.step(answer, [1]) == ("", 1.0, True)
    finally:
        environment.close()


@pytest.mark.filterwarnings("ignore:.*prompts have more than", "ignore:.*no prompt has two samples")
def test_an_iteration_of_grpo(checkpoint, tmp_path):
    config = grpo_config(checkpoint, tmp_path, train={"seq_length": 64, "total_steps": 1})
    config = config.evolve(train={"long_prompts": "truncate"}, method={"gen_kwargs": {"max_new_tokens": 8}})
    prompts = reasoning_gym_prompts("spell_backward", 4, options={"min_word_len": 3, "max_word_len": 4})
    for name, given in (("environment", ReasoningGym), ("reward_fn", reasoning_gym_reward)):
        config = config.evolve(train={"checkpoint_dir": str(tmp_path / name)})
        trainer = jrl.train(prompts=prompts, config=config, **{name: given})
        assert any("reward/mean" in record and "evaluation" not in record for record in trainer.history)
