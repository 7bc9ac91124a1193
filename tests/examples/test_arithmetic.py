# SPDX-License-Identifier: Apache-2.0
"""The problems of `grpo_arithmetic.py`: what is worked out, what is judged, and what a run leaves behind."""

import json
import math
import random
import shlex

import pytest
from rich.console import Console

from examples.arithmetic.report import pass_at, read_samples, report
from examples.arithmetic.tasks import MARK, TASKS, correct
from tests.examples.processes import EXAMPLES, finish, start

SHARES = {"chain_sum": (0.6, 0.8), "number_sorting": (0.3, 0.5), "countdown": (0.3, 0.45)}
"""Right ones among the worked answers: enough to learn from, with room above."""


@pytest.mark.parametrize("name", TASKS)
class TestTasks:
    def test_worked_answers_are_right_in_a_part_of_the_cases(self, name):
        task, generator = TASKS[name], random.Random(0)
        problems = [row["problem"] for row in task.problems(400, seed=1)]
        rewards = correct([task.work(problem, generator) for problem in problems], problems)
        low, high = SHARES[name]
        assert low < sum(rewards) / len(rewards) < high

    def test_only_what_stands_behind_the_mark_is_judged(self, name):
        task = TASKS[name]
        problem = task.problems(1, seed=1)[0]["problem"]
        answer = problem["answer"]
        if name == "number_sorting":
            answer = " ".join(word.removesuffix(".0") for word in problem["metadata"]["sorted_numbers"])
        outputs = [f" so {MARK} {answer}", f" {answer}", f" {answer} {MARK} 1e9", f" {MARK}", ""]
        assert correct(outputs, [problem] * len(outputs)) == [1.0, 0.0, 0.0, 0.0, 0.0]

    def test_held_out_problems_are_not_learned_from(self, name):
        task = TASKS[name]
        held_out = {row["prompt"] for row in task.problems(50, seed=1)}
        # The same draws, so that without the rule all of them would be there.
        assert not held_out & {row["prompt"] for row in task.problems(50, seed=1, without=list(held_out))}

    def test_a_problem_is_drawn_once(self, name):
        prompts = [row["prompt"] for row in TASKS[name].problems(300, seed=2)]
        assert len(set(prompts)) == len(prompts)


def test_a_power_is_wrong_and_costs_no_time():
    """The package evaluates what it is given, with operators that no problem offers."""
    task = TASKS["countdown"]
    problem = task.problems(1, seed=1)[0]["problem"]
    verify = task.verifier()
    outputs = [f"{MARK} {'9**' * 9}9", f"{MARK} {problem['answer']}"]
    assert verify(outputs, [problem] * 2) == [0.0, 1.0]
    verify.close()


def test_what_the_package_would_take_for_right_is_judged_by_the_letter():
    problem = TASKS["number_sorting"].problems(1, seed=1)[0]["problem"]
    first, *others = (int(float(word)) for word in problem["metadata"]["sorted_numbers"])
    near = " ".join(map(str, (first + 1, *others)))
    assert correct([f"{MARK} {near}"], [problem]) == [0.0]
    problem = TASKS["countdown"].problems(1, seed=1)[0]["problem"]
    numbers, target = problem["metadata"]["numbers"], problem["metadata"]["target"]
    nothing = f"({' + '.join(map(str, numbers))})*0e0 + {target}e0"
    assert correct([f"{MARK} {nothing}"], [problem]) == [0.0]


def rows(step, rewards):
    return [{"step": step, "prompt": f"{i % 2}", "output": "1", "reward": r} for i, r in enumerate(rewards)]


def test_pass_at_k_is_counted_by_problem():
    assert pass_at(rows(0, [1, 0, 0, 0]), 1) == 0.25
    assert pass_at(rows(0, [1, 0, 0, 0]), 2) == 0.5


def test_the_report_reads_the_samples_of_a_run(tmp_path):
    folder = tmp_path / "grpo" / "rollouts"
    folder.mkdir(parents=True)
    lines = [*rows(0, [0, 0, 1, 0]), *rows(8, [1, 1, 1, 0])]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    history = [
        {"step": step, "reward/mean": 0.1, "group/zero_std_fraction": 0.5, "grpo/entropy": 1.0}
        for step in (4, 8)
    ]
    summary = report(Console(quiet=True), tmp_path, history, k=2, seconds=3.0)
    assert list(read_samples(tmp_path / "grpo")) == [0, 8]
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["pass@1_before"], summary["pass@1_after"], summary["pass@2_after"]) == (0.25, 0.75, 1.0)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--task countdown --algorithm rloo"])
def test_it_runs(flags, tmp_path):
    short = (
        "--num-problems 60 --num-held-out 8 --sft.train.total_steps 4 --sft.train.batch_size 4 --train.epochs 2 "
        "--method.num_rollouts 8 --method.chunk_size 8 --method.num_generations 4 --train.batch_size 8"
    )
    program, folder = [EXAMPLES / "grpo_arithmetic.py"], tmp_path / "run"
    finish(start(*shlex.split(f"{short} {flags}"), "--output-dir", folder, cwd=tmp_path, program=program))
    summary = json.loads((folder / "summary.json").read_text())
    assert all(map(math.isfinite, summary.values())) and "pass@4_after" in summary
    assert {"initial", "sft", "sft_model", "grpo", "policy"} <= {path.name for path in folder.iterdir()}
