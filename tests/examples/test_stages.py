# SPDX-License-Identifier: Apache-2.0
"""Flags that reach the stage they are meant for, and the figures that a run leaves behind."""

import argparse
import json
import shlex
import sys

import pytest
from rich.console import Console

from examples.stages import RECIPES, add_flags, report, split_overrides, stopped


def test_overrides_go_to_their_stage():
    words = "--train.epochs=2 --sft.train.total_steps 5 --sft.train.save_best --model.num_layers_unfrozen -1"
    assert split_overrides(words.split()) == (
        ["--train.epochs=2", "--model.num_layers_unfrozen", "-1"],
        ["--train.total_steps", "5", "--train.save_best"],
    )


def test_flags_of_every_example():
    top = argparse.ArgumentParser()
    add_flags(top, run="toy")
    flags, rest = top.parse_known_args(["--seed", "3", "--train.epochs", "2"])
    assert flags.seed == 3 and flags.model is None and flags.output_dir.startswith("runs/toy/")
    assert rest == ["--train.epochs", "2"]
    assert (RECIPES / "ppo_sentiment.yaml").exists()


def test_the_hint_to_resume_is_one_command(tmp_path):
    console = Console(record=True, width=30)
    assert stopped(console, ["--seed", "3"], tmp_path / "a b", "--model", tmp_path / "x") == 0
    words = shlex.split(console.export_text().splitlines()[-1])
    assert words[0] == sys.executable
    assert words[2:] == ["--seed", "3", "--output-dir", str(tmp_path / "a b"), "--model", str(tmp_path / "x")]


def test_report_compares_the_first_evaluation_with_the_last(tmp_path):
    history = [
        {"step": 0, "evaluation": 0, "metrics/good": 0.1, "reward/mean": 1.0},
        {"step": 4, "iteration": 1, "reward/mean": 9.0},
        {"step": 4, "evaluation": 1, "metrics/good": 0.5, "reward/mean": 2.0},
        {"step": 8, "evaluation": 2, "metrics/good": 0.75, "reward/mean": 3.0},
    ]
    console = Console(record=True, width=200)
    found = report(console, tmp_path, history, ["metrics/good", "reward/mean"], seconds=12.34)
    assert found == {
        "before": {"metrics/good": 0.1, "reward/mean": 1.0},
        "after": {"metrics/good": 0.75, "reward/mean": 3.0},
        "seconds": 12.3,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    assert console.export_text().strip() == "good +0.100 -> +0.750, mean +1.000 -> +3.000, 12 s"


def test_a_figure_that_no_evaluation_has_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="metrics/other"):
        report(Console(), tmp_path, [{"step": 0, "evaluation": 0}], ["metrics/other"], seconds=1.0)
