# SPDX-License-Identifier: Apache-2.0
"""Where rewards and metrics of several processes are computed, and what becomes of a failure in one of them."""

import json

import pytest

from tests.processes.conftest import WORKER, assert_same_run, specify
from tests.processes.job import Job

pytestmark = pytest.mark.slow
MAIN = {"train": {"rewards_on": "main"}}
GDPO = {
    "multi_objective_aggregation": "normalize_then_sum",
    "reward_weights": [1.0, 0.5],
    "drop_uniform_groups": False,
    "max_sampling_rounds": 1,
    "prompts_per_round": None,
}


def test_each_process_judges_the_rows_that_it_sampled(run):
    """Of every call of 4 rows, 2 each, two calls an iteration; of evaluations of 3, which do not divide, 2 and 1."""
    got = run("ppo", 2, 1)
    sizes = [[len(rows) for rows in result["rows_seen"]] for result in got.results]
    assert sizes == [[2, *[2] * 4, 2, 2, 2, 2], [1, *[2] * 4, 1, 2, 2, 1]]
    seen = sorted(prompt for result in got.results for rows in result["rows_seen"] for prompt in rows)
    alone = run("ppo", 1, 2).results[0]["rows_seen"]
    assert seen == sorted(prompt for rows in alone for prompt in rows)


def test_process_0_judges_all_rows_where_it_is_asked_to(run):
    got = run("ppo", 2, 1, **MAIN)
    assert got.results[1]["rows_seen"] == []
    assert got.results[0]["rows_seen"] == run("ppo", 1, 2).results[0]["rows_seen"]
    assert_same_run(got, run("ppo", 1, 2))


def test_a_reward_that_computes_by_jax_runs_in_each_process_alone(run):
    """Evaluations of 3 rows do not divide: one process judges 2 rows, the other 1."""
    got, alone = (run("ppo", *layout, reward="vowels_in_jax") for layout in ((2, 1), (1, 2)))
    sizes = [[len(rows) for rows in result["rows_seen"]] for result in got.results]
    assert sizes[0] != sizes[1]
    for mine, wanted in zip(got.rollouts, alone.rollouts, strict=True):
        assert (mine["prompt"], mine["output"]) == (wanted["prompt"], wanted["output"])
        assert mine["reward"] == pytest.approx(wanted["reward"], abs=1e-6)


def test_metrics_are_measured_once_on_all_rows(run):
    for result in run("ppo", 2, 1).results:
        evaluations = [record for record in result["history"] if "evaluation" in record]
        assert evaluations
        assert all(record["metrics/process"] == 0.0 for record in evaluations)
        assert all(record["metrics/computed_in"] == 1.0 for record in evaluations)


def test_all_processes_keep_the_same_history(run):
    first, second = run("ppo", 2, 1).results
    assert first["history"] == second["history"]


def test_a_reward_function_that_fails_in_one_process_ends_all_of_them(checkpoints, tmp_path):
    file = specify(tmp_path, checkpoints["gpt2"], "ppo", "fails_in_process_1", {})
    job = Job([WORKER, file], tmp_path / "logs", num_processes=2)
    assert job.wait(timeout=600.0) == [1, 1], job.output()
    for process in range(2):
        text = " ".join(job.output(process).split())
        assert (
            "RewardError: Process 1 of 2 failed: RewardError: `reward_fn` raised OSError: the judge is down"
            in text
        )
    (kept,) = (tmp_path / "run" / "failed_rollouts").iterdir()
    assert kept.name == "failed_rollouts_iteration_000000_row_000004_process_1.jsonl"
    assert len(kept.read_text().splitlines()) == 2


@pytest.mark.parametrize("where", ["samples", "main"])
def test_rows_that_fail_are_left_out_whichever_process_has_them(run, where):
    sections = {"train": {"reward_errors": "skip", "rewards_on": where}}
    got = run("ppo", 2, 1, reward="fails_on_dogs", **sections)
    assert_same_run(got, run("ppo", 1, 2, reward="fails_on_dogs", **sections))
    assert any(row["reward"] is None for row in got.rollouts)


@pytest.mark.parametrize("where", ["samples", "main"])
def test_several_functions_are_those_of_one_process(run, where):
    got = run("ppo", 2, 1, reward="several", train={"rewards_on": where})
    assert_same_run(got, run("ppo", 1, 2, reward="several", train={"rewards_on": where}))
    silent = [row["reward/short_or_silent"] is None for row in got.rollouts]
    assert silent == ["dog" in row["prompt"] for row in got.rollouts] and any(silent)
    updates = [record for record in got.results[0]["history"] if "ppo/policy_loss" in record]
    assert sum(record["reward/short_or_silent/not_applicable"] for record in updates) == sum(silent)


@pytest.mark.parametrize("where", ["samples", "main"])
def test_functions_normalised_by_group_over_processes(run, where):
    """GDPO: a call is one prompt's 4 samples, 2 on each process, and one function is silent on some of them."""
    sections = {"method": GDPO, "train": {"rewards_on": where}}
    got = run("grpo", 2, 1, reward="partly_silent", **sections)
    assert_same_run(got, run("grpo", 1, 2, reward="partly_silent", **sections))
    groups = [got.rollouts[first : first + 4] for first in range(0, len(got.rollouts), 4)]
    assert len(groups) == 6 and all(len({row["prompt"] for row in group}) == 1 for group in groups)
    halves = [[group[0]["prompt"]] * 2 for group in groups]
    for result in got.results if where == "samples" else ():
        # The others are of evaluations, of 3 different prompts.
        assert [rows for rows in result["rows_seen"] if len(rows) == 2 and len(set(rows)) == 1] == halves
    silent = [[row["reward/even_or_silent"] is None for row in group] for group in groups]
    assert any(0 < sum(group) <= 2 for group in silent)
    updates = [record for record in got.results[0]["history"] if "grpo/policy_loss" in record]
    assert sum(record["reward/even_or_silent/not_applicable"] for record in updates) == sum(map(sum, silent))
    assert all(record["optim/grad_norm"] > 0 for record in updates)


def test_the_command_line_joins_by_flags(checkpoints, tmp_path):
    samples = tmp_path / "samples.jsonl"
    lines = [json.dumps({"prompt": "the", "completion": f" cat {letter}"}) for letter in "abcd"]
    samples.write_text("\n".join(lines), encoding="utf-8")
    words = ["sft", "--samples", samples, "--model.model_path", checkpoints["gpt2"]]
    words += ["--tokenizer.tokenizer_path", checkpoints["gpt2"], "--train.checkpoint_dir", tmp_path / "run"]
    words += ["--train.total_steps", 1, "--train.batch_size", 4, "--train.seq_length", 32]
    words += ["--method.gen_kwargs.max_new_tokens", 4, "--distributed"]
    job = Job(["-m", "jrl", *words], tmp_path / "logs", num_processes=2, by_flags=True)
    job.succeed(timeout=600.0)
    assert "data=2" in job.output(0)
    assert (tmp_path / "run" / "checkpoint_1" / "manifest.json").exists()
