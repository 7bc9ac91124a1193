# SPDX-License-Identifier: Apache-2.0
"""Tasks of Reasoning Gym: its problems as prompts, and its own scorer as an environment of one turn, or as a reward.

A problem is made again from the numbers in its prompt's metadata, so scoring needs no data of the run. Some scorers
compute what an answer says by a computer algebra system, which evaluates it: those belong into worker processes
(`jrl.rewards.isolated`, `isolated_environment`).

Reference: Stojanovski et al. 2025, arXiv:2505.24760.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.environments import packages
from jrl.environments.chat import prompt_text

_NUMBERS = ("seed", "size", "index")


def reasoning_gym_prompts(
    name: str,
    count: int,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    system_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """Problems of a task as prompts, with the metadata by which they are scored.

    Args:
      name: Of the task, such as "leg_counting".
      count: Of problems.
      seed: Of the problems.
      options: Of the task's configuration; what JSON holds.
      tokenizer: Its chat template writes the prompt; None: plain text.
      system_prompt: Stands before the problem, such as `reasoning_gym.utils.SYSTEM_PROMPTS["default"]`.
    Returns:
      Dicts with `prompt`, and the problem's numbers as `task`.
    Raises:
      ImportError: If Reasoning Gym is not installed.
      ValueError: If there is no such task, or an option is none of it.
    """
    try:
        written = json.dumps(dict(options or {}), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"`options` must hold what JSON does: {error}.") from error
    problems = _dataset(name, seed, count, written)
    before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    found = []
    for index in range(count):
        question = problems[index]["question"]
        if tokenizer is None:
            text = question if system_prompt is None else f"{system_prompt}\n{question}"
        else:
            text = prompt_text(tokenizer, [*before, {"role": "user", "content": question}])
        task = {"name": name, "seed": seed, "size": count, "index": index, "options": written}
        found.append({"prompt": text, "task": task})
    return found


class ReasoningGym:
    """A problem of Reasoning Gym: one turn, whose reward is the task's own score, mostly in [0, 1]."""

    def reset(self, task: Mapping[str, Any]) -> None:
        """Begins.

        Args:
          task: Metadata of `reasoning_gym_prompts`.
        """
        self._task = task

    def step(self, text: str) -> tuple[str, float, bool]:
        """Scores the answer.

        Args:
          text: What stands between the last `<answer>` and `</answer>`, or all of it where there is none.
        """
        return "", score(text, self._task), True


def reasoning_gym_reward(outputs: Sequence[str], task: Sequence[Mapping[str, Any]]) -> list[float]:
    """Scores of Reasoning Gym's own, as a reward function.

    Args:
      outputs: Completions; what stands between the last `<answer>` and `</answer>` is the answer, or all of it where
        there is none.
      task: Metadata of `reasoning_gym_prompts`.
    """
    return [score(text, numbers) for text, numbers in zip(outputs, task, strict=True)]


def score(text: str, task: Mapping[str, Any]) -> float:
    """The task's own score of an answer.

    Args:
      text: As `reasoning_gym_reward` reads it.
      task: Metadata of `reasoning_gym_prompts`.
    Raises:
      ValueError: If the metadata are of no task.
    """
    packages.reasoning_gym()
    from reasoning_gym.utils import extract_answer

    if not isinstance(task, Mapping) or {"name", "options", *_NUMBERS} - task.keys():
        raise ValueError(f"`task` must be metadata of `reasoning_gym_prompts`, got {task!r:.80}.")
    problems = _dataset(task["name"], *(task[number] for number in _NUMBERS[:2]), task["options"])
    answer = extract_answer(text)
    return float(problems.score_answer(text.strip() if answer is None else answer, problems[task["index"]]))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, options: str) -> Any:
    """A task of the package.

    Raises:
      ValueError: If there is none, or it has other options.
    """
    package = packages.reasoning_gym()
    try:
        return package.create_dataset(name, seed=seed, size=size, **json.loads(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"`name` or `options` are of no task of Reasoning Gym, got {name!r}: {error}"
        ) from error
