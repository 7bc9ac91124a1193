# SPDX-License-Identifier: Apache-2.0
"""Every example at reduced length, as a user starts it: it ends, and leaves the figures that its recipe quotes."""

import json
import math
import shlex

import pytest

import jrl
from tests.examples.processes import EXAMPLES, finish, start

SFT = "--sft.train.total_steps 4 --sft.train.batch_size 4"
PPO = (
    "--train.epochs 2 --train.batch_size 4 --method.num_rollouts 8 --method.chunk_size 8 --method.ppo_epochs 1 "
    "--method.gen_kwargs.max_new_tokens 8"
)
ILQL = "--train.total_steps 4 --train.batch_size 4 --method.gen_kwargs.max_new_tokens 8"
REVIEWS = "--num-reviews 300 --num-eval-prompts 8"
LORA = "--model.peft_config '{peft_type: LORA, r: 2, lora_alpha: 4}'"
DENSE = {"reward/mean", "metrics/first_half", "metrics/second_half"}
RUNS = {
    "ppo_dense_sentiment": ("ppo_dense_sentiment", f"{REVIEWS} {SFT} {PPO}", DENSE),
    "sparse rewards": ("ppo_dense_sentiment", f"--sparse {REVIEWS} {SFT} {PPO}", DENSE),
    "an adapter": ("ppo_dense_sentiment", f"{REVIEWS} {SFT} {PPO} {LORA}", DENSE),
    "ilql_sentiment": (
        "ilql_sentiment",
        f"{REVIEWS} {SFT} {ILQL}",
        {f"metrics/sentiment@beta={beta}" for beta in ("0.0", "10.0", "100.0")},
    ),
    "hh_dialogue by PPO": (
        "hh_dialogue",
        f"--num-eval-prompts 8 {SFT} {PPO}",
        {"metrics/margin", "metrics/preferred"},
    ),
    "hh_dialogue by ILQL": (
        "hh_dialogue",
        f"--method ilql --num-eval-prompts 8 {SFT} {ILQL}",
        {
            f"metrics/{name}@beta={beta}"
            for name in ("margin", "preferred")
            for beta in ("0.0", "10.0", "100.0")
        },
    ),
    "summarize_t5": (
        "summarize_t5",
        f"--num-eval-prompts 8 {SFT} {PPO}",
        {"reward/mean", "metrics/rouge1", "metrics/rouge2", "metrics/rougeL"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name, tmp_path):
    script, flags, figures = RUNS[name]
    folder = tmp_path / "run"
    process = start(
        *shlex.split(flags), "--output-dir", folder, cwd=tmp_path, program=[EXAMPLES / f"{script}.py"]
    )
    finish(process)
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["before"]) == set(summary["after"]) == figures
    assert all(map(math.isfinite, (*summary["before"].values(), *summary["after"].values())))
    assert {"initial", "sft", "sft_model", "policy"} <= {path.name for path in folder.iterdir()}
    if name != "an adapter":
        jrl.load_model(str(folder / "policy"), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("ppo", "--train.epochs 1 --method.ppo_epochs 1"),
        ("ilql", "--train.total_steps 4 --train.eval_interval 4"),
        ("rft", "--train.total_steps 4 --train.eval_interval 4"),
        ("sft", "--train.total_steps 4 --train.eval_interval 4 --min-optimality 1"),
    ],
)
def test_random_walks(algorithm, flags, tmp_path):
    program = [EXAMPLES / "randomwalks" / f"{algorithm}_randomwalks.py"]
    folder = tmp_path / "run"
    finish(start("--seed", 3, "--output-dir", folder, *flags.split(), cwd=tmp_path, program=program))
    summary = json.loads((folder / "summary.json").read_text())
    (curve,) = summary["optimality"].values()
    assert set(summary["optimality"]) == {"3"} and len(curve) >= 2
    assert all(0.0 <= value <= 1.0 for value in curve.values())
    assert 0 < summary["compile_seconds"] < summary["seconds"]
