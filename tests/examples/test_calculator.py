# SPDX-License-Identifier: Apache-2.0
"""The world of `calculator_tool.py`: what the calculator answers, what is right, and a short run."""

import json
import random

import pytest

from examples.calculator.world import (
    Calculator,
    Silent,
    calculate,
    demonstration,
    make_tokenizer,
    problems,
)
from tests.examples.processes import EXAMPLES, finish, start


@pytest.mark.parametrize(
    ("question", "said"),
    [("48*73+5", "3509"), ("12*12-99", "45"), ("48*73", "?"), ("__import__", "?"), ("9**9**9", "?")],
)
def test_the_calculator_computes_terms_and_nothing_else(question, said):
    assert calculate(question) == said


@pytest.mark.parametrize(("world", "told"), [(Calculator, "3509\n"), (Silent, "?\n")])
def test_a_question_is_answered_and_an_answer_is_judged(world, told):
    episode = world()
    episode.reset(answer=3509)
    assert episode.step("<48*73+5>") == (told, 0.0, False)
    assert episode.step("=3508") == ("", 0.0, True)
    assert episode.step("=3509") == ("", 1.0, True)


def test_problems_are_different_right_and_none_that_is_left_out():
    first = problems(300, seed=1)
    assert len({row["prompt"] for row in first}) == 300
    assert all(eval(row["prompt"].removesuffix("?\n")) == row["answer"] for row in first)
    known = [row["prompt"] for row in first]
    assert not {row["prompt"] for row in problems(300, seed=1, without=known)} & set(known)


def test_half_of_the_demonstrations_ask_and_some_of_them_slip():
    generator = random.Random(0)
    rows = [(row, demonstration(row, generator)) for row in problems(400, seed=2)]
    asked = [(row, said) for row, said in rows if len(said) == 4]
    assert 150 < len(asked) < 250
    slips = [said for row, said in asked if said[3] != f"={row['answer']}\n"]
    assert 20 < len(slips) < 80
    assert all(said[3] == f"={said[2]}" for _, said in asked)


def test_every_text_is_one_token_a_character():
    tokenizer = make_tokenizer()
    text = "48*73+5?\n<48*73+5>\n3509\n=3509\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_short_run_leaves_curves_and_figures(tmp_path, algorithm):
    few = "--num-problems 64 --num-held-out 8 --sft.train.total_steps 4 --train.total_steps 2 --method.num_rollouts 16"
    few += " --method.chunk_size 16 --train.batch_size 16 --train.eval_interval 1"
    flags = ("--algorithm", algorithm, *few.split(), "--output-dir", tmp_path)
    finish(start(*flags, cwd=tmp_path, program=[EXAMPLES / "calculator_tool.py"]))
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"right_before", "right_after", "turns_before", "turns_after", "seconds"}
