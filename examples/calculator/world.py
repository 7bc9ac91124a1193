# SPDX-License-Identifier: Apache-2.0
"""The world of the calculator: a problem, a tool that computes what stands between < and >, and a check of answers.

    48*73+5?            the prompt
    <48*73+5>           the policy asks the calculator
    3509                the calculator answers
    =3509               the policy answers: right, so its reward is 1

The policy may answer at once, or ask several times. A line that is neither a question nor an answer ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*<>=?\n"
_TERM = re.compile(r"(\d{1,4})\*(\d{1,4})([+-]\d{1,4})")


class Calculator:
    """The environment of one problem."""

    def reset(self, answer: int) -> None:
        """Begins; `answer` is metadata of the prompt."""
        self.answer = answer

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answers a line of the policy."""
        if text.startswith("<") and text.endswith(">"):
            return f"{calculate(text[1:-1])}\n", 0.0, False
        return "", float(text == f"={self.answer}"), True


class Silent(Calculator):
    """The same world without its tool: whoever asks gets no answer."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answers a line of the policy."""
        return ("?\n", 0.0, False) if text.startswith("<") else super().step(text)


def calculate(question: str) -> str:
    """Value of a·b±c as text; "?" where the question is no such term."""
    term = _TERM.fullmatch(question)
    if term is None:
        return "?"
    first, second, third = map(int, term.groups())
    return str(first * second + third)


def problems(count: int, seed: int, *, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Different problems with their answers, a function of the seed.

    Args:
      count: How many.
      seed: Of the draw.
      without: Prompts that none of them may be.
    """
    random, known = Random(seed), set(without)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        term = (
            f"{random.randint(12, 99)}*{random.randint(12, 99)}{random.choice('+-')}{random.randint(1, 99)}"
        )
        prompt = f"{term}?\n"
        if prompt not in known:
            known.add(prompt)
            found.append({"prompt": prompt, "answer": int(calculate(term))})
    return found


def demonstration(problem: dict[str, Any], random: Random) -> list[str]:
    """A worked problem as prompts and outputs in turn: every other one asks the calculator, with slips of the pen.

    Args:
      problem: One of `problems`.
      random: Of the choice and the slips.
    """
    prompt, answer = problem["prompt"], problem["answer"]
    if random.random() < 0.5:
        return [prompt, f"={answer}\n"]
    term = list(prompt.removesuffix("?\n"))
    if random.random() < 0.3:
        place = random.choice([place for place, sign in enumerate(term) if sign.isdigit()])
        term[place] = str(random.randint(1, 9))
    told = calculate("".join(term))
    return [prompt, f"<{''.join(term)}>\n", f"{told}\n", f"={told}\n"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = {text: number for number, text in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
