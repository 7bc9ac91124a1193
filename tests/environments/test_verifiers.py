# SPDX-License-Identifier: Apache-2.0
"""Environments of verifiers, with the real package: its rollouts, tools and rubrics, worker processes, GRPO."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jrl
from jrl.environments import Verifiers, verifiers_prompts
from jrl.environments.verifiers import _Loop
from jrl.rewards import isolated_environment
from jrl.rollout.environments import Answer, EnvironmentFailure, World
from tests.environments.chat_models import chat_tokenizer, only, save_chat_model
from tests.trainers.runs import grpo_config

pytest.importorskip(
    "verifiers", reason="verifiers is in the extra `verifiers`, which the extra `test` does not bring"
)
from tests.environments import verifiers_worlds as worlds

NAME = "tests.environments.verifiers_worlds"
BETWEEN = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TOLD = BETWEEN.format("<tool_response>\n{}\n</tool_response>")
WRITTEN = ('{"name": "add", "arguments": {"a": 1, "b": 2}}', "3", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("model") / "tiny", chat_tokenizer(WRITTEN))


def prompts(model: str, kind: str, count: int | None = None) -> list[dict[str, Any]]:
    return verifiers_prompts(NAME, count, tokenizer=model, options={"kind": kind})


def begun(row: dict[str, Any], environment: Any = Verifiers) -> World:
    return World(environment, row["prompt"], {"task": row["task"]}, 0)


def ids_of(text: str) -> list[int]:
    return chat_tokenizer(WRITTEN)(text, add_special_tokens=False)["input_ids"]


def play(row: dict[str, Any], turns: list[str], environment: Any = Verifiers) -> list[Answer]:
    world = begun(row, environment)
    return [world.step(text.removesuffix("<|im_end|>"), ids_of(text)) for text in turns]


def test_prompts_are_what_the_environment_asks(model):
    found = prompts(model, "single")
    assert len(found) == 3
    text = "<|im_start|>system\nReckon.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [row["prompt"] for row in found] == [text.format(question) for question in worlds.QUESTIONS]
    assert json.loads(json.dumps(found)) == found, "metadata go to worker processes and into logs"


def test_one_turn_has_the_rewards_of_the_rubric(model):
    """1 for the right answer, and half of 1 / (1 + letters), as the parser reads them."""
    row = prompts(model, "single")[1]
    assert play(row, ["4<|im_end|>"]) == [Answer("", 1.0 + 0.5 / 2, True)]
    assert play(row, ["12<|im_end|>"]) == [Answer("", 0.5 / 3, True)]


def test_turns_have_a_state_of_their_episode_and_chance_of_their_row(model):
    first, second, _ = prompts(model, "hints")
    outside = random.getstate()
    worlds.CLEANED.clear()
    one, other = begun(first), begun(second)
    luck = []
    for tries in (1, 2):
        for world in (one, other):
            answer = world.step("9", ids_of("9<|im_end|>"))
            said = answer.observation.split("luck ")
            assert said[0] == BETWEEN.split("{}")[0] + f"No, try {tries} of " and not answer.done
            luck.append(said[1])
    assert luck[0] == luck[2] != luck[1] == luck[3]
    assert one.step("3", ids_of("3<|im_end|>")) == Answer("Right.", 3.0, True)
    assert worlds.CLEANED[-1] == 0
    assert random.getstate() == outside
    assert play(first, ["9<|im_end|>"])[0].observation.endswith(luck[0]), "an episode repeats"


def test_the_environment_ends_by_its_own_limit(model):
    answers = play(prompts(model, "hints")[0], ["9<|im_end|>"] * 4)
    assert [answer.done for answer in answers] == [False, False, False, True]
    assert answers[-1].reward == 3.0


def test_a_turn_that_a_limit_cut_is_ended_by_the_template(model):
    (answer,) = play(prompts(model, "hints")[0], ["99"])
    assert answer.observation.startswith("<|im_end|>\n<|im_start|>user\nNo, try 1")


def test_tools_are_called_from_ids(model):
    (row, *_) = prompts(model, "tools")
    assert '"description": "The other."' in row["prompt"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
    first, last = play(row, [call, "3<|im_end|>"])
    assert first == Answer(TOLD.format("3"), 0.0, False)
    assert last == Answer("", 1.0 + 0.5 / 2, True)
    loud = '<tool_call>{"name": "shout", "arguments": {"text": ""}}</tool_call><|im_end|>'
    assert play(row, [loud])[0].observation == TOLD.format("nothing to say")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("hints", "raise", "OSError: the world broke"),
        ("hints", "error", "ToolError: the world gave up"),
        ("breaks", "3", "The rubric's `breaks` raised KeyError: 'no such thing'"),
        ("forgets", "9", "rewrites what was said before"),
    ],
)
def test_failures_are_of_the_episode(model, kind, text, message):
    with pytest.raises(EnvironmentFailure, match=message):
        play(prompts(model, kind)[0], [f"{text}<|im_end|>"])


def test_a_first_question_that_changes_is_no_prompt(model):
    with pytest.raises(EnvironmentFailure, match="must be a function of the row"):
        begun(prompts(model, "unsteady")[0])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("groups", "compares the samples of a prompt"),
        ("judge", "asks a judge over the network"),
        ("clock", "`timeout_seconds` would count"),
        ("several", "holds several environments"),
        ("none", "of no environment that verifiers loads: .*no such kind"),
    ],
)
def test_what_cannot_be_played_is_refused(model, kind, message):
    with pytest.raises(ValueError, match=message):
        prompts(model, kind)


def test_mistakes_are_named(model, monkeypatch):
    with pytest.raises(ValueError, match=r"`count` must be from 1 to the 3 rows"):
        prompts(model, "single", 4)
    with pytest.raises(ValueError, match="`tokenizer` must be a folder or a name"):
        prompts(chat_tokenizer([]), "single")
    with pytest.raises(ValueError, match="`split` must be"):
        verifiers_prompts(NAME, tokenizer=model, split="test")
    with pytest.raises(ValueError, match="must be metadata of `verifiers_prompts`"):
        Verifiers().reset({})
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    with pytest.raises(ImportError, match=r"verifiers<0.4"):
        verifiers_prompts(NAME, tokenizer=model, options={"kind": "single", "other": 1})
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ImportError, match=r"pip install 'jrl-post\[verifiers\]'"):
        verifiers_prompts(NAME, tokenizer=model, options={"kind": "single", "other": 2})


def test_handlers_of_signals_stay_those_of_the_run(model):
    def own(number: int, frame: Any) -> None:
        raise AssertionError("nobody sends it")

    before = signal.signal(signal.SIGTERM, own)
    try:
        verifiers_prompts(NAME, tokenizer=model, options={})
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_plays_and_does_not_load(model):
    (row, *_) = prompts(model, "single")
    found: list[Any] = []

    def work() -> None:
        found.extend(play(row, ["3<|im_end|>"]))
        try:
            verifiers_prompts(NAME, tokenizer=model, options={"kind": "another"})
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].done and "must be loaded by the main thread" in found[1]


def test_an_episode_that_a_limit_ends_cleans_up(model, caplog):
    first, second, _ = prompts(model, "hints")
    world = begun(first)
    world.step("9", ids_of("9<|im_end|>"))
    worlds.CLEANED.clear()
    del world
    play(second, ["9<|im_end|>"])
    assert 0 in worlds.CLEANED
    assert not [record for record in caplog.records if record.name == "asyncio"], "no task is lost"


@pytest.mark.slow  # a worker imports the package: 7 s
def test_in_a_worker_process(model):
    (row, *_) = prompts(model, "hints")
    turns = ["9<|im_end|>", "3<|im_end|>"]
    environment = isolated_environment(Verifiers, timeout=120.0, memory=None)
    try:
        world = begun(row, environment)
        found = [world.step("9", ids_of(turns[0]))]
        environment.close()
        found.append(world.step("3", ids_of(turns[1])))
    finally:
        environment.close()
    assert found == play(row, turns)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Rollouts are filtered", "ignore:.*no prompt has two samples")
def test_an_iteration_of_grpo_with_tools(model, tmp_path):
    mask = only(chat_tokenizer(WRITTEN), WRITTEN[:1], WRITTEN[1:])
    config = grpo_config(model, tmp_path / "run", train={"seq_length": 1024, "total_steps": 1}).evolve(
        method={"gen_kwargs": {"max_new_tokens": 250}}, train={"trainer_kwargs": {"logit_mask": mask}}
    )
    trainer = jrl.train(environment=Verifiers, prompts=prompts(model, "tools"), config=config)
    (record,) = [record for record in trainer.history if "episode/turns" in record]
    assert record["episode/turns"] > 1 and 0 < record["reward/mean"] < 2
    assert np.isfinite(record["optim/grad_norm"])


class TestLoop:
    def test_worlds_play_where_a_loop_runs_already(self, model):
        """As in every cell of a notebook; a failure there is the same one, too."""

        async def cell() -> list[Answer]:
            return play(prompts(model, "single")[0], ["3<|im_end|>"])

        assert asyncio.run(cell()) == play(prompts(model, "single")[0], ["3<|im_end|>"])

    def test_what_the_work_raises_is_raised_beside_a_loop(self):
        async def fail() -> None:
            raise KeyError("judge")

        async def cell() -> None:
            loop.run(fail())

        loop = _Loop()
        with pytest.raises(KeyError, match="judge"):
            asyncio.run(cell())
        loop.close()

    def test_a_world_within_a_world_is_refused(self):
        async def inner() -> None:
            loop.run(asyncio.sleep(0))

        loop = _Loop()
        with pytest.raises(RuntimeError, match="cannot be played by the environment of another one"):
            loop.run(inner())
        loop.close()

    def test_a_rollout_that_will_not_end_is_left(self, monkeypatch):
        async def stubborn() -> None:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

        monkeypatch.setattr("jrl.environments.verifiers._CLOSING_SECONDS", 0.1)
        loop, world = _Loop(), Verifiers()
        loop.start(stubborn(), world)
        loop.run(asyncio.sleep(0))
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < 10
