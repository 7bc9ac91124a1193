# SPDX-License-Identifier: Apache-2.0
"""The verifiers: what they take for equal, and what an attacker gets out of them."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import pass_at_k
from jrl.rewards import (
    Number,
    accuracy_reward,
    final_answer,
    number_reward,
    read_number,
    think_format_reward,
)
from jrl.rollout.rewards import call_metric_fn, call_reward_fn
from jrl.rollout.text import Texts

SECONDS = 1.0
"""What a call may take, whatever it is given; each takes milliseconds on an idle machine."""
LONG = 10_000_000

RIGHT = [
    (r"\boxed{42}", "42"),
    (r"So $\boxed{42}$.", "42"),
    (r"\boxed{41}, no: \boxed{42}", "42"),
    (r"\boxed{\boxed{42}}", "42"),
    (r"\fbox{42}", 42),
    ("Six times seven.\n#### 42", "Natalia sold 6*7 = 42.\n#### 42"),
    (r"\boxed{42.0}", "42"),
    (r"\boxed{1,250}", 1250),
    (r"\boxed{1{,}250}", 1250),
    (r"\boxed{1,\!250}", "1250"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{-1/2}", r"-\frac{1}{2}"),
    (r"\boxed{\frac{-1}{2}}", -0.5),
    (r"\boxed{3 \times 10^{4}}", "30000"),
    (r"\boxed{3e-2}", 0.03),
    (r"\boxed{5\,\text{km}}", "5 km"),
    (r"\boxed{50\%}", "50 %"),
    (r"\boxed{\left( 1, 2 \right)}", "(1,2)"),
    (r"\boxed{\text{Paris}}", "Paris"),
    (r"\boxed{5~\text{km}}", "5 km"),
    (r"\boxed{x^2 + 1}", "x^2+1"),
    ("<think>41? \\boxed{41}</think>\\boxed{42}", "42"),
]
# What an attack, or bad luck, writes: none of it is the answer 42.
WRONG = [
    "",
    " ",
    "42",
    "The answer is 42.",
    r"\boxed{}",
    r"\boxed{42",
    r"\boxed 42",
    r"\boxed{42 or 43}",
    r"\boxed{42, 43}",
    r"\boxed{42; 43}",
    r"\boxed{4 2}",
    r"\boxed{4$2}",
    r"\boxed{4, 2}",
    r"\boxed{42}\boxed{43}",
    r"\boxed{41}" * 1000,
    r"\boxed{42 km}",
    r"\boxed{42\%}",
    r"\boxed{42^{1}}",
    r"\boxed{6*7}",
    r"\boxed{6 \times 7}",
    r"\boxed{21+21}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{1e999999999}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{42/0}",
    r"\boxed{42/1/1}",
    r"\boxed{\frac{42}{0}}",
    r"\boxed{٤٢}",
    r"\boxed{４２}",
    r"\boxed{4٢}",
    r"\boxed{42²}",
    r"\boxed{①}",
    r"\boxed{42}}{\boxed{",
    r"\boxed{nan}",
    r"\boxed{inf}",
    r"\boxed{__import__('os').abort()}",
    r"\boxed{{{42}",
    r"\boxed{" + "0" * 300 + "42}",
    "#### ",
    "#### 42 or so 43",
    "#### 42\n#### 43",
    "<think>\\boxed{42}",
    "<think>\\boxed{42}</think>",
    "<think></think>41<think>\\boxed{42}",
    "{" * 1000,
    "\x00" * 100,
    "\ud800 \\boxed{\ud800}",
]


@pytest.mark.parametrize(("output", "solution"), RIGHT)
def test_what_is_equal(output, solution):
    assert accuracy_reward([output], [solution]) == [1.0]


def test_lore_9_4_known_false_positives_stay_false():
    assert [output for output in WRONG if accuracy_reward([output], ["42"]) != [0.0]] == []
    assert [output for output in WRONG if number_reward([output], [42]) != [0.0]] == ["42"]


@pytest.mark.parametrize("solution", ["$42$", "42 m", "(1, 2)", r"2^{100}", "yes"])
def test_lore_9_4_an_attack_gains_nothing_whatever_the_solution(solution):
    assert [output for output in WRONG if accuracy_reward([output], [solution]) != [0.0]] == []


@pytest.mark.parametrize(
    "answer",
    ["4, 200", "$4$,$200$", r"4,\,200", "4 ,200", "4,~200", r"4,\text{200}", r"4\text{,}200", "4,\n200"],
)
def test_lore_9_4_a_list_is_no_number(answer):
    assert accuracy_reward([f"\\boxed{{{answer}}}", f"#### {answer}"], [4200] * 2) == [0.0, 0.0]
    assert number_reward([answer], [4200]) == [0.0]


@pytest.mark.parametrize(
    ("answer", "solution"),
    [
        (r"A \leftarrow B", r"A \rightarrow B"),
        (r"\leftarrow", r"arrow"),
        ("~p", "p"),
        (r"p \land ~q", r"p \land q"),
        ("X~Y", "X Y"),
    ],
)
def test_lore_9_4_what_says_something_is_not_left_out(answer, solution):
    """`\\leftarrow` begins like `\\left`, and `~` negates where it does not stand before a unit."""
    assert accuracy_reward([f"\\boxed{{{answer}}}"], [solution]) == [0.0]
    assert accuracy_reward([f"\\boxed{{{solution}}}"], [answer]) == [0.0]
    assert accuracy_reward([f"\\boxed{{{answer}}}"], [answer]) == [1.0]


def test_lore_9_4_a_bare_number_is_nothing_else():
    outputs = ["42", " 42.0\n", "84/2", "42.", "$42$", "$42$.", "~42", r"\text{42}", r"\boxed{42}", r"42\,"]
    assert number_reward(outputs, [42] * 10) == [1.0] * 3 + [0.0] * 7
    assert number_reward(["5 km", "$5$ km", "5"], ["$5$ km"] * 3) == [1.0, 0.0, 0.0]


def test_lore_9_4_units_must_agree():
    outputs = [r"\boxed{5 km}", r"\boxed{5 m}", r"\boxed{5}", r"\boxed{5 Km}"]
    assert accuracy_reward(outputs, ["5 km"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert accuracy_reward(outputs, ["5"] * 4) == [0.0, 0.0, 1.0, 0.0]


def test_lore_9_4_an_echo_of_the_prompt_is_no_answer():
    prompt = r"1+1 is \boxed{2}. 3-1 is \boxed{?}. What is 4/2? Answer as \boxed{2}."
    outputs = [
        prompt,
        f"{prompt} I do not know.",
        f"{prompt} \\boxed{{2}}",
        r"\boxed{2}",
        "\\boxed{2} " + prompt,
    ]
    assert accuracy_reward(outputs, [2] * 5, [prompt] * 5) == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert accuracy_reward([r"\boxed{2}"], ["2"], ["2"]) == [1.0], "a short prompt is part of many answers"


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "4",
        " ",
        "\\boxed{",
        "{",
        "9^",
        "<think>",
        "</think>",
        "#",
        "\\text{",
        "1,000",
        "\\boxed{" + ",123" * 48 + "}",
        "\\boxed{" + "1/" * 95 + "}",
        "\\boxed{" + "\\frac{" * 30 + "}",
        "\\boxed{" + "\\text{" * 30 + "}",
        "\\boxed{" + "9^" * 95 + "}",
    ],
    ids=lambda text: text[:16],
)
def test_lore_9_4_ten_megabytes_take_no_time(text):
    """Whatever is written, and also where the prompt is of the same stuff."""
    output = text * (LONG // len(text))
    prompt = "\\boxed{" + output[:50_000] + "!"
    start = time.process_time()
    assert accuracy_reward([output], ["42"], [prompt]) == [0.0]
    assert number_reward([output], ["42"]) == [0.0]
    assert think_format_reward([output]) in ([0.0], [1.0])
    assert time.process_time() - start < SECONDS


def test_lore_9_4_random_scraps_of_answers_give_a_number_in_time():
    marks = [r"\boxed{", r"####", r"<think>", r"</think>", r"\text{", r"\frac{", r"\times10^{"]
    scraps = [*marks, *"42{}^,.-/$%\\²٢\u202e \n", "42", "}{", "e9", "km"]
    draw = random.Random(0)
    outputs = ["".join(draw.choices(scraps, k=draw.randint(0, 60))) for _ in range(5000)]
    start = time.process_time()
    for reward in (accuracy_reward, number_reward):
        assert set(reward(outputs, ["42"] * len(outputs))) <= {0.0, 1.0}
    assert set(think_format_reward(outputs)) <= {0.0, 1.0}
    assert time.process_time() - start < 5 * SECONDS


def test_the_answer_of_a_long_completion_is_at_its_end():
    assert accuracy_reward(["x" * LONG + r"\boxed{42}"], ["42"]) == [1.0]
    assert accuracy_reward([r"\boxed{42}" + "x" * LONG], ["42"]) == [0.0]


def test_numbers_are_exact():
    assert read_number("0.1") == Number(Fraction(1, 10), "")
    assert read_number("1/3") != read_number("0.3333333333333333")
    assert read_number("12345678901234567891") != read_number("12345678901234567890")
    assert read_number(" - 7 ") == read_number("\u22127") == Number(Fraction(-7), "")


def test_an_answer_is_read_as_it_is_written():
    assert final_answer(r"a \boxed{ \{1\} } b") == r"\{1\}"
    assert final_answer("no mark, 42") is None


def test_the_format_of_thoughts():
    outputs = [
        "<think>a\nb</think>c",
        " <think>a</think>c",
        "<think>a",
        "a</think>",
        "<think><think></think>",
    ]
    assert think_format_reward(outputs) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("solution", ["", " ", "$", r"\boxed{\,}", float("nan"), float("inf")])
def test_a_solution_that_says_nothing_is_refused(solution):
    with pytest.raises(ValueError, match=r"`solution` must .*in row 1"):
        accuracy_reward(["a", "b"], ["1", solution])


def test_numbers_of_any_size_and_of_numpy_are_solutions():
    assert accuracy_reward(["#### 42", "#### 0.5"], [np.int64(42), np.float32(0.5)]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="at most 200 characters, got 401"):
        accuracy_reward(["x"], [10**400])


@pytest.mark.parametrize("reward", [accuracy_reward, number_reward])
@pytest.mark.parametrize("solution", [None, True, ["42"], {"value": 42}])
def test_a_solution_is_a_text_or_a_number(reward, solution):
    with pytest.raises(TypeError, match=r"`solution` must be texts or numbers, got .* in row 1"):
        reward([r"\boxed{None}", "1"], ["1", solution])


def test_a_solution_that_no_answer_could_match_is_refused():
    assert accuracy_reward([r"\boxed{" + "x" * 200 + "}"], ["x" * 200]) == [1.0]
    for solution in ("x" * 201, "9" * 201, 10**200, "Add them up. " * 20 + "#### " + "x" * 201):
        with pytest.raises(ValueError, match="`solution` must have at most 200 characters, got 201 in row 0"):
            accuracy_reward(["x"], [solution])
    assert accuracy_reward(["#### 42"], ["Add them up. " * 20 + "#### 42"]) == [1.0]


def test_a_bare_number_needs_a_number():
    with pytest.raises(ValueError, match="`solution` must be numbers, got 'x' in row 0"):
        number_reward(["1"], ["x"])


@pytest.mark.parametrize("reward", [accuracy_reward, number_reward, think_format_reward])
def test_they_are_reward_functions(reward):
    """Called by jrl's own caller, with the metadata that their signature asks for."""
    texts = Texts(["6*7?42"], ["6*7?"], ["42"], [[1, 2]], np.array([2]), np.array([False]))
    found = call_reward_fn(reward, texts, tokenizer=None, metadata={"solution": [42], "level": [1]})
    assert found in ([0.0], [1.0])


def test_pass_at_k_as_a_metric():
    """What docs/verifiers.md says: the rows of one prompt follow each other."""
    n, outputs = 4, [r"\boxed{1}", "", r"\boxed{1}", r"\boxed{2}", "", "", "", ""]

    def pass_at_2(outputs, solution):
        right = np.reshape(accuracy_reward(outputs, solution), (-1, n)).sum(axis=1).astype(int)
        return {"pass@2": float(np.mean(pass_at_k(jnp.asarray(right), num_samples=n, k=2)))}

    texts = Texts(outputs, [""] * 8, outputs, [[1]] * 8, np.ones(8, np.int32), np.zeros(8, bool))
    found = call_metric_fn(pass_at_2, texts, tokenizer=None, metadata={"solution": ["1"] * 8})
    # Two of four are right, so one pair of the six has none; the second prompt has none right.
    assert found == {"pass@2": pytest.approx((5 / 6 + 0) / 2)}
