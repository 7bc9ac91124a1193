# SPDX-License-Identifier: Apache-2.0
"""The tables of the random walks: made from stored results, and the README shows them."""

import importlib
import json
import time

import jax
import pytest
from rich.console import Console

from tests.examples.processes import EXAMPLES

FOLDER = EXAMPLES / "randomwalks"
RUNS = [
    {
        "optimality": {"0": {"0": 0.3, "24": 0.8, "64": 0.9, "160": 0.95}},
        "seconds": 40.0,
        "compile_seconds": 12.0,
        "evaluation_seconds": 6.0,
    },
    {
        "optimality": {"1": {"0": 0.4, "24": 0.9, "64": 0.8}},
        "seconds": 30.0,
        "compile_seconds": 8.0,
        "evaluation_seconds": 4.0,
    },
]
RESULT = {"hardware": "a machine", "runs": RUNS}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("table")


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("curves")


def test_an_update_ends_at_or_after_the_step(curves):
    curve = {0: 0.3, 24: 0.8, 64: 0.9}
    assert curves.value_at(curve, 20) == (24, 0.8)
    assert curves.value_at(curve, 24) == (24, 0.8)
    assert curves.value_at(curve, 200) == (64, 0.9)


def test_compilations_inside_of_others_count_once(curves):
    assert curves.total_length([]) == 0.0
    assert curves.total_length([(1.0, 5.0), (2.0, 3.0), (4.0, 6.0), (8.0, 9.0)]) == 6.0


def test_the_clock_tells_compilation_from_waiting(curves):
    clock = curves.Clock()
    with clock:
        time.sleep(0.2)
    assert clock.seconds >= 0.2 and clock.compile_seconds == 0.0
    with clock:
        jax.jit(lambda x: x * 3 + 1)(2.0)
    assert 0.0 < clock.compile_seconds <= clock.seconds - 0.2
    compiled = clock.compile_seconds
    jax.jit(lambda x: x * 5 + 1)(2.0)  # outside: not heard
    assert clock.compile_seconds == compiled


def test_a_summary_has_what_the_table_reads(curves, tmp_path):
    history = [
        {"step": 0, "evaluation": 0, "metrics/optimality": 0.25},
        {"step": 8, "iteration": 1, "time/evaluation": 2.0},
        {"step": 8, "evaluation": 1, "metrics/optimality": 0.5},
        {"step": 16, "iteration": 2, "time/evaluation": 1.5},
    ]
    clock = curves.Clock()
    clock.seconds, clock.compile_seconds = 9.04, 3.0
    console = Console(record=True, width=120)
    curves.report(
        console,
        tmp_path,
        {7: curves.curve_of(history)},
        clock=clock,
        trlx={5: "0.40"},
        trlx_title="trlX",
        evaluating=curves.evaluation_seconds(history),
        beta=100,
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "optimality": {"7": {"0": 0.25, "8": 0.5}},
        "seconds": 9.0,
        "compile_seconds": 3.0,
        "evaluation_seconds": 3.5,
        "beta": 100,
    }
    assert "optimality 0.25 [0.25..0.25] -> 0.50 [0.50..0.50]" in console.export_text()


def test_rows_hold_the_mean_and_the_range(table):
    text = table.tables({"ppo": RESULT})
    assert "| PPO | 20 | 0.83 | 24 | 0.85 [0.80..0.90] | 2 |" in text
    assert "| PPO | 60 | 0.92 | 64 | 0.85 [0.80..0.90] | 2 |" in text
    assert "| PPO | 35 | 25 | 5 | 10 | a machine |" in text  # means of the two runs


def test_a_shortfall_is_said(table):
    assert table.shortfalls({"ppo": RESULT}) == [
        "PPO at 100: 0.875, trlX 0.920",
        "PPO at 160: 0.875, trlX 0.930",
    ]
    reached = {"optimality": {"0": {"160": 0.905}}}
    assert table.shortfalls({"ppo": {"runs": [reached]}}) == []


def test_only_what_stands_between_the_marks_is_replaced(table):
    text = f"a\n{table.BEGIN}\nold\n{table.END}\nb\n"
    assert table.with_table(text, "new") == f"a\n{table.BEGIN}\nnew\n{table.END}\nb\n"
    with pytest.raises(ValueError, match="must hold the lines"):
        table.with_table("a\n", "new")


def test_the_readme_shows_the_results_that_are_stored(table):
    text = table.README.read_text(encoding="utf-8")
    assert table.with_table(text, table.tables(table.stored())) == text


def test_finished_seeds_are_not_run_again(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table.subprocess, "run", lambda *args, **options: pytest.fail("ran"))
    for seed, summary in enumerate(RUNS):
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "summary.json").write_text(json.dumps(summary))
    table.run("ppo", [0, 1], tmp_path, ["--train.total_steps", "400"])
    found = table.stored()
    assert list(found) == ["ppo"] and found["ppo"]["runs"] == RUNS
    assert "CPU core" in found["ppo"]["hardware"]


def test_a_run_that_was_stopped_is_no_result(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table.subprocess, "run", lambda *args, **options: None)
    with pytest.raises(SystemExit, match="ilql, seed 4: stopped before its end"):
        table.run("ilql", [4], tmp_path, [])
    assert not table.RESULTS.exists()
