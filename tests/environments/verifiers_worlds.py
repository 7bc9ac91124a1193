# SPDX-License-Identifier: Apache-2.0
"""Environments as a user of the package verifiers writes them; `load_environment(kind)` makes one."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import verifiers as vf
from datasets import Dataset

CLEANED: list[int] = []
"""Rows whose rollouts have cleaned up."""
QUESTIONS = ["1+2?", "2+2?", "5+1?"]
ANSWERS = ["3", "4", "6"]


def rows() -> Dataset:
    return Dataset.from_dict({"question": QUESTIONS, "answer": ANSWERS})


def last_text(completion: Any) -> str:
    return str(completion[-1]["content"])


async def right(completion: Any, answer: str) -> float:
    await asyncio.sleep(0)
    return float(last_text(completion) == answer)


def brevity(completion: Any, parser: Any) -> float:
    return 1.0 / (1 + len(parser.parse_answer(completion) or ""))


def breaks(completion: Any) -> float:
    raise KeyError("no such thing")


class Hints(vf.MultiTurnEnv):
    """Says what is wrong, counts in the state, and draws from chance."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["tries"] = 0
        state["luck"] = random.random()
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        state["tries"] += 1
        text = str(messages[-1]["content"])
        if text == "raise":
            raise OSError("the world broke")
        if text == "error":
            raise vf.ToolError("the world gave up")
        if text == state["answer"]:
            said = [vf.UserMessage(content="Right.")]
            state["final_env_response"] = said
            return said
        return [vf.UserMessage(content=f"No, try {state['tries']} of luck {state['luck']:.3f}.")]

    @vf.cleanup
    async def note(self, state: vf.State) -> None:
        CLEANED.append(state["example_id"])


class Forgets(Hints):
    """Shows the policy its last message alone."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        found = await super().get_prompt_messages(state)
        return found if len(found) == 1 else found[-1:]


class Unsteady(Hints):
    """Asks another thing whenever it begins."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        found = await super().get_prompt_messages(state)
        return [vf.UserMessage(content=str(time.time_ns())), *found[1:]]


def tries(state: vf.State) -> float:
    return float(state["tries"])


async def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    await asyncio.sleep(0)
    return a + b


def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: What to say.
    """
    if not text:
        raise ValueError("nothing to say")
    return text.upper()


def in_groups(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind: str = "single") -> vf.Environment:
    rubric = vf.Rubric(funcs=[right, brevity], weights=[1.0, 0.5])
    common: dict[str, Any] = {"dataset": rows(), "system_prompt": "Reckon."}
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **common)
    if kind == "hints":
        return Hints(rubric=vf.Rubric(funcs=[right, tries], weights=[0.0, 1.0]), max_turns=4, **common)
    if kind == "forgets":
        return Forgets(rubric=rubric, max_turns=4, **common)
    if kind == "unsteady":
        return Unsteady(rubric=rubric, **common)
    if kind == "breaks":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[right, breaks]), **common)
    if kind == "tools":
        return vf.ToolEnv(tools=[add, shout], rubric=rubric, max_turns=3, **common)
    if kind == "groups":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[in_groups]), **common)
    if kind == "judge":
        os.environ.setdefault("OPENAI_API_KEY", "none")
        return vf.SingleTurnEnv(rubric=vf.JudgeRubric(), **common)
    if kind == "clock":
        return Hints(rubric=rubric, timeout_seconds=5.0, **common)
    if kind == "several":
        return vf.EnvGroup(envs=[load_environment("single")], env_names=["one"])
    raise ValueError(f"no such kind {kind!r}")
