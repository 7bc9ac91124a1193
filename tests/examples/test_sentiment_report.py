# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind, from made-up figures."""

import json

import pytest
from rich.console import Console

from examples.sentiment.judge import Judgement
from examples.sentiment.report import comparison_table, plot_run, report, summarize

HISTORY = [
    {"step": 0, "evaluation": 0, "reward/mean": 0.0},
    *(
        {
            "step": 4 * i,
            "reward/mean": 0.1 * i,
            "kl/per_sequence": float(i),
            "time/iteration": 1.0 + (i == 1),
            "perf/tokens_per_second": 100.0 + 50.0 * (i == 1),
        }
        for i in range(1, 8)
    ),
    {"step": 28, "evaluation": 1, "reward/mean": 0.7},
]


@pytest.fixture
def judgements():
    prompts = ["I saw it", "A film by"]
    before = Judgement(prompts, [" and it was bad", " nobody"], [-0.5, 0.1], 0.9, 20.0, 8.0)
    after = Judgement(prompts, [" and it was good", " everybody"], [0.5, 0.9], 0.8, 22.0, 10.0)
    return before, after


def test_summary(judgements):
    found = summarize(*judgements, HISTORY, seconds=12.34567)
    assert found["reward_before"] == pytest.approx(-0.2)
    assert found["reward_after"] == pytest.approx(0.7)
    assert found["kl_per_sequence"] == pytest.approx(5.0)  # mean of 3, 4, 5, 6, 7
    # One iteration of 2 s at 150 tokens/s and six of 1 s at 100: 900 tokens in 8 s.
    assert found["tokens_per_second"] == pytest.approx(112.5)
    assert found["seconds"] == 12.3457
    assert (found["distinct_2_before"], found["distinct_2_after"]) == (0.9, 0.8)
    assert (found["length_after"], found["perplexity_after"]) == (22.0, 10.0)


def test_report_writes_its_files(judgements, tmp_path):
    console = Console(record=True, width=160)
    summary = report(console, tmp_path, *judgements, HISTORY, target_kl=6.0, seconds=3.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    before = {"before": " nobody", "reward_before": 0.1}
    assert rows[1] == {"prompt": "A film by", **before, "after": " everybody", "reward_after": 0.9}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert lines[-1].startswith("reward -0.200 -> +0.700, KL 5.00 nats") and lines[-1].endswith("3 s")


def test_table_shows_both_policies(judgements):
    console = Console(record=True, width=160)
    console.print(comparison_table(*judgements, num_rows=1))
    text = console.export_text()
    assert "and it was bad" in text and "and it was good" in text
    assert "-0.50" in text and "+0.50" in text
    assert "nobody" not in text


def test_the_picture_shows_completions_and_a_target(judgements, tmp_path, monkeypatch):
    from matplotlib.axes import Axes
    from matplotlib.table import Table

    lines, texts = list[object](), list[str]()
    monkeypatch.setattr(Axes, "axhline", lambda axes, y, **style: lines.append(y))
    draw = Table.draw

    def drawn(table, renderer):
        texts.extend(cell.get_text().get_text() for cell in table.get_celld().values())
        return draw(table, renderer)

    monkeypatch.setattr(Table, "draw", drawn)
    plot_run(*judgements, HISTORY, tmp_path / "with.png", target_kl=6.0)
    assert lines == [6.0]
    assert {"I saw it", "and it was bad", "-0.50", "and it was good", "+0.50"} <= set(texts)
    plot_run(*judgements, HISTORY, tmp_path / "without.png", target_kl=None)
    assert lines == [6.0] and (tmp_path / "without.png").stat().st_size > 5000


def test_long_completions_and_dollars_are_drawn_as_they_are(tmp_path):
    """A dollar begins a formula in matplotlib, unless it is told not to read any."""
    long = Judgement(["It cost $5 and $6"], ["word " * 200], [1.0], 0.9, 20.0, 8.0)
    plot_run(long, long, HISTORY, tmp_path / "curves.png", target_kl=None)
    assert (tmp_path / "curves.png").stat().st_size > 5000
