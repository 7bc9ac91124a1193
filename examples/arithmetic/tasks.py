# SPDX-License-Identifier: Apache-2.0
"""Three tasks of the package reasoning-gym: its problems, its verifier, and worked answers with mistakes in them.

A prompt is the problem in a few words, so that a model of a million parameters can read it. Behind `####` stands the
final answer, and nothing but that is judged.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import reasoning_gym

MARK = "####"
Problem = Mapping[str, Any]
"""A problem of reasoning-gym: `question`, `answer` and `metadata`."""


@dataclass(frozen=True)
class Task:
    """A task and how a small model sees it.

    Attributes:
      name: Of the data set in reasoning-gym.
      options: Of the data set.
      ask: The prompt of a problem.
      work: A worked answer of a problem, which ends with the final one. The generator decides where it goes wrong.
      form: Regular expression of what can be a final answer.
      read: A final answer in the form that the verifier reads.
      max_new_tokens: Longest answer.
      runs_answers: Whether the verifier evaluates the answer, as a computer algebra system does.
    """

    name: str
    options: Mapping[str, Any]
    ask: Callable[[Problem], str]
    work: Callable[[Problem, Random], str]
    form: str
    read: Callable[[str], str]
    max_new_tokens: int
    runs_answers: bool = False

    def problems(self, count: int, *, seed: int, without: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Different problems, as prompts with their number as metadata.

        Args:
          count: How many; fewer, if there are not so many among four times as many draws.
          seed: Of the draws.
          without: Prompts that must not be among them, such as those held out.
        Returns:
          Dicts with `prompt`, `problem` (of reasoning-gym).
        """
        drawn = reasoning_gym.create_dataset(self.name, seed=seed, size=4 * count, **self.options)
        seen, found = set(without), list[dict[str, Any]]()
        for problem in drawn:
            prompt = self.ask(problem)
            if prompt not in seen:
                seen.add(prompt)
                # As a file of JSON would hold it: the isolated verifier is sent no tuples.
                found.append({"prompt": prompt, "problem": json.loads(json.dumps(problem))})
            if len(found) == count:
                break
        return found

    def verifier(self) -> Callable[..., list[Any]]:
        """The reward function: `correct`, in a process that can be ended where it runs what a policy wrote."""
        if self.runs_answers:
            from jrl.rewards import isolated  # not above: a worker imports this module, and needs no JAX

            return isolated(correct, timeout=5.0, lost=0.0)
        return correct


def correct(outputs: Sequence[str], problem: Sequence[Problem]) -> list[float]:
    """1 where what stands behind `####` has the form of an answer and reasoning-gym gives it full marks, else 0."""
    found = []
    for output, entry in zip(outputs, problem, strict=True):
        name = entry["metadata"]["source_dataset"]
        answer = output.partition(MARK)[2].strip()
        task = TASKS[name]
        is_one = re.fullmatch(task.form, answer) is not None
        right = is_one and _judge(name).score_answer(task.read(answer), entry) == 1.0
        if name == "number_sorting":  # the package allows for a difference of 1
            right = right and answer.split() == [_whole(word) for word in entry["metadata"]["sorted_numbers"]]
        found.append(float(right))
    return found


@functools.cache
def _judge(name: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **TASKS[name].options)


def _chain_sum_prompt(problem: Problem) -> str:
    return f"{problem['metadata']['expression']} ="


def _chain_sum_work(problem: Problem, random: Random) -> str:
    """Adds from left to right; one sum in five is wrong by a little, and the next goes on from there."""
    words = problem["metadata"]["expression"].split()
    total, steps = int(words[0]), list[str]()
    for sign, word in zip(words[1::2], words[2::2], strict=True):
        result = total + int(word) * (1 if sign == "+" else -1)
        if random.random() < 0.2:
            result += random.choice((-2, -1, 1, 2))
        steps.append(f" {total} {sign} {word} = {result}")
        total = result
    return ",".join(steps) + f" {MARK} {total}"


def _whole(word: str) -> str:
    """A number of the package, which writes 25.0, as it is asked for."""
    return str(int(float(word)))


def _sorting_prompt(problem: Problem) -> str:
    numbers = " ".join(map(_whole, problem["metadata"]["original_numbers"]))
    return f"{problem['metadata']['direction']} : {numbers} ="


def _sorting_work(problem: Problem, random: Random) -> str:
    """The sorted numbers, with neighbours exchanged one time in five, and one number forgotten one time in ten."""
    numbers = [_whole(word) for word in problem["metadata"]["sorted_numbers"]]
    for place in range(len(numbers) - 1):
        if random.random() < 0.2:
            numbers[place], numbers[place + 1] = numbers[place + 1], numbers[place]
    if random.random() < 0.1:
        numbers.pop(random.randrange(len(numbers)))
    return f" {MARK} " + " ".join(numbers)


def _countdown_prompt(problem: Problem) -> str:
    numbers = " ".join(map(str, problem["metadata"]["numbers"]))
    return f"{numbers} to {problem['metadata']['target']} :"


def _countdown_work(problem: Problem, random: Random) -> str:
    """One of the ways through the numbers, worked out rightly; one time in three it ends at the target."""
    numbers, target = problem["metadata"]["numbers"], problem["metadata"]["target"]
    ways = [
        (order, signs)
        for order in itertools.permutations(numbers)
        for signs in itertools.product("+-*", repeat=len(numbers) - 1)
    ]
    random.shuffle(ways)
    if random.random() < 0.3:
        ways.sort(key=lambda way: _walk(*way)[-1] != target)
    order, signs = ways[0]
    totals, steps, expression = _walk(order, signs), list[str](), str(order[0])
    for place, sign in enumerate(signs):
        number = order[place + 1]
        steps.append(f" {totals[place]} {sign} {number} = {totals[place + 1]}")
        left = f"( {expression} )" if sign == "*" and place else expression
        expression = f"{left} {sign} {number}"
    return ",".join(steps) + f" {MARK} {expression}"


def _walk(order: Sequence[int], signs: Sequence[str]) -> list[int]:
    """Totals from left to right."""
    totals = [order[0]]
    for sign, number in zip(signs, order[1:], strict=True):
        last = totals[-1]
        totals.append(last + number if sign == "+" else last - number if sign == "-" else last * number)
    return totals


TASKS: Mapping[str, Task] = {
    "chain_sum": Task(
        name="chain_sum",
        options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        ask=_chain_sum_prompt,
        work=_chain_sum_work,
        form=r"-?[0-9]{1,6}",
        read=str,
        max_new_tokens=20,
    ),
    "number_sorting": Task(
        name="number_sorting",
        options={
            **{"min_numbers": 4, "max_numbers": 6, "min_decimals": 0, "max_decimals": 0},
            **{"min_value": 0, "max_value": 99},
        },
        ask=_sorting_prompt,
        work=_sorting_work,
        form=r"[0-9]{1,2}( [0-9]{1,2})*",
        read=lambda answer: str(answer.split()),
        max_new_tokens=10,
    ),
    "countdown": Task(
        name="countdown",
        options={
            **{"min_numbers": 3, "max_numbers": 3, "min_value": 1, "max_value": 12},
            **{"min_target": 5, "max_target": 60, "operators": ("+", "-", "*")},
        },
        ask=_countdown_prompt,
        work=_countdown_work,
        form=r"(?!.*\*\*)[-+*() 0-9]{1,60}",
        read=str,
        max_new_tokens=28,
        runs_answers=True,
    ),
}
