# SPDX-License-Identifier: Apache-2.0
"""`jrl report`: a page of a real run, of several, of one at work, and of texts that try to be HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import jrl
from jrl.cli import main
from jrl.trainers.cards.report import _READ, MAX_SAMPLES, _some_lines, read_run, report
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, save_tiny_checkpoint

ATTACK = "</td><script>alert('owned')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags of a page, with the attributes of each, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


def made_up(folder: Path, *, records: int = 5, samples: int = 0, text: str = "fine") -> Path:
    """A run's folder of figures that nobody measured."""
    (folder / "rollouts").mkdir(parents=True)
    history = [{"step": 0, "evaluation": 0, "reward/mean": 0.25}]
    history += [
        {
            "step": 4 * i,
            "iteration": i,
            "reward/mean": i / 8,
            "ppo/clip_fraction": 0.1 * i,
            "kl/per_sequence": float(i),
        }
        for i in range(1, records)
    ]
    history += [{"step": 4 * records, "evaluation": 1, "reward/mean": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
    evaluated = [
        {"step": step, "prompt": prompt, "output": f"{text} {step}", "reward": step / 10}
        for step in (0, 4 * records)
        for prompt in ("one", text)
    ]
    rollouts = [
        {"step": 4, "prompt": "p", "output": f"{text} {i}", "reward": [0.5, 0.25]} for i in range(samples)
    ]
    for name, rows in (("samples", evaluated), ("rollouts", rollouts)):
        (folder / "rollouts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    checkpoint = save_tiny_checkpoint(folder / "model")
    jrl.train(
        reward_fn=count_vowels,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:2],
        config=ppo_config(checkpoint, folder / "ppo", method={"cliprange": 0.15}),
    )
    return folder / "ppo"


def test_a_page_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    target = Path(capsys.readouterr().out.strip())
    page = Page(target.read_text(encoding="utf-8"))
    assert target == run / "report.html"
    assert page.count("svg") >= 8
    assert "method.cliprange0.150.2" in page.text, "the recipe's difference from the default"
    assert "ppo: the mean reward went from" in page.text and "in 12 optimizer steps" in page.text
    assert all(prompt in page.text for prompt in PROMPTS[:2])
    rows = [attrs for tag, attrs in page.tags if tag == "span" and attrs.get("class") == "row"]
    assert len(rows) == 12, "four rollouts of each of the three iterations"
    figures = json.loads(rows[0]["data-figures"])
    assert list(figures) == ["advantage", "kl", "value", "logprob"]
    assert {len(values) for values in figures.values()} == {8}
    # One file that asks nobody for anything.
    assert not [given for _, attrs in page.tags for name, given in attrs.items() if name in ("src", "href")]
    assert "http" not in target.read_text(encoding="utf-8").replace("http://www.w3.org", "")


def test_texts_are_no_html(tmp_path: Path) -> None:
    folder = made_up(tmp_path / ATTACK.replace("/", "_"), samples=3, text=ATTACK)
    found = report([read_run(folder)])
    page = Page(found)
    assert page.count("script") == 1 and page.count("img") == 0
    assert found.count("alert(1)&gt;") >= 4


def test_a_run_at_work_has_a_line_that_is_not_whole_yet(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 99, "iter')
    assert len(read_run(folder).history) == 6
    assert "No checkpoint holds the configuration yet." in report([read_run(folder)])


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    runs = [read_run(made_up(tmp_path / name, records=count)) for name, count in (("one", 5), ("two", 9))]
    page = Page(report(runs))
    assert page.count("svg") == 3 and page.count("polyline") == 6
    assert "one: the mean reward" in page.text and "two: the mean reward" in page.text


def test_metrics_that_never_change_are_one_line(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    still = {"kl/per_sequence": 0.0, "completion/length_mean": 40.0}
    lines = [record | still if "iteration" in record else record for record in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    page = Page(report([read_run(folder)]))
    assert page.count("svg") == 2, "reward and clip fraction"
    assert "The same at every step: kl/per_sequence 0, completion/length_mean 40." in page.text
    changing = made_up(tmp_path / "other")  # another run in whose curve it moves is drawn with it
    assert Page(report([read_run(folder), read_run(changing)])).text.count("kl/per_sequence") == 1
    assert "The same at every step" not in report([read_run(changing)])


def test_the_title_has_model_algorithm_and_reward(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    assert "<h1>run</h1>" in report([read_run(folder)])
    config = jrl.default_config(jrl.GRPOConfig()).evolve(
        model={"model_path": "/home/me/tiny"}, train={"rollouts_ahead": 2}
    )
    (folder / "checkpoint_4").mkdir()
    (folder / "checkpoint_4" / "config.yaml").write_text(json.dumps(config.to_dict()))
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(
            json.dumps({"step": 20, "evaluation": 2, "reward/mean": 1.0, "sampling/reward": "<b>"}) + "\n"
        )
    found = report([read_run(folder)])
    assert "<h1>run (tiny, GRPO, reward &lt;b&gt;)</h1>" in found and "<title>run (tiny, GRPO" in found
    assert "older than the one that then learned" not in found, "there are no tokens"
    ahead = report([read_run(with_tokens(folder, logprob=[0.0, -1.0]))])
    assert "are of the policy that sampled, up to 2 iterations older than the one that then learned" in ahead


def test_curves_lie_where_they_must(tmp_path: Path) -> None:
    """Rewards rise from left below to right above; the healthy range is shaded where it lies within the picture."""
    found = report([read_run(made_up(tmp_path / "run"))])
    reward, _, clipped = re.findall(r"<figure>.*?</figure>", found)
    (line,) = re.findall(r'<polyline points="([^"]+)"', reward)
    places = [tuple(map(float, point.split(","))) for point in line.split()]
    assert places == sorted(places) and [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert len(re.findall("<circle", reward)) == 2 and "<rect" not in reward
    assert "healthy: below 0.3" in clipped
    (top, height), (y_first, y_last) = (
        map(float, re.search(r'<rect [^>]*y="([\d.]+)" [^>]*height="([\d.]+)"', clipped).groups()),  # type: ignore[union-attr]
        (float(point.split(",")[1]) for point in re.findall(r'points="([^"]+)"', clipped)[0].split()[::3]),
    )
    assert top <= y_first <= top + height, "0.1 is healthy"
    assert y_last < top, "0.4 is not"


def with_tokens(folder: Path, text: str = " well", **figures: Any) -> Path:
    """The folder of a run of an algorithm that keeps tokens."""
    row = {"step": 4, "prompt": "p", "reward": 0.5, "ids": [1, 2], "tokens": [text, "!"], **figures}
    (folder / "rollouts" / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_tokens_are_coloured_by_what_there_is(tmp_path: Path) -> None:
    folder = with_tokens(made_up(tmp_path / "run"), ATTACK, advantage=[0.5, None], logprob=[-1.0, -2.0])
    found = report([read_run(folder)])
    page = Page(found)
    assert [attrs["value"] for tag, attrs in page.tags if tag == "option"] == ["advantage", "logprob"]
    (row,) = [attrs for tag, attrs in page.tags if attrs.get("class") == "row"]
    assert json.loads(row["data-figures"]) == {"advantage": [0.5, None], "logprob": [-1.0, -2.0]}
    assert page.count("script") == 1 and page.count("img") == 0
    assert "The run kept no tokens" in report([read_run(made_up(tmp_path / "other"))])


@pytest.mark.parametrize(
    "figures",
    [
        {"advantage": [0.5]},
        {"advantage": "high"},
        {"advantage": ["<b>", None]},
        {"tokens": "none", "advantage": []},
        {"tokens": []},
    ],
)
def test_a_spoilt_row_of_tokens_is_no_error(tmp_path: Path, figures: dict[str, Any]) -> None:
    folder = with_tokens(made_up(tmp_path / "run"), **figures)
    assert Page(report([read_run(folder)])).count("b") == Page(
        report([read_run(made_up(tmp_path / "other"))])
    ).count("b") + ("tokens" not in figures)


def test_findings_are_told_with_their_remedies(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    finding = {
        "step": 8,
        "watch": "clipped",
        "metric": "ppo/clip_fraction",
        "value": 0.7,
        "healthy": "0.02 to 0.3",
    }
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(
            json.dumps(finding | {"cause": "steps are too large", "remedy": "lower the learning rate"}) + "\n"
        )
    assert "Remedy: lower the learning rate." in Page(report([read_run(folder)])).text
    assert "The watch found nothing wrong." in report([read_run(made_up(tmp_path / "other"))])


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    found = read_run(made_up(tmp_path / "run", records=5000, samples=1000))
    page = report([found])
    assert len(page) < 400_000
    assert f"{MAX_SAMPLES} samples, of 1000." in page
    assert "fine 0<" in page and "fine 999<" in page, "the first and the last are among them"


@pytest.mark.parametrize("words", [["nowhere"], ["--unknown", "3", "nowhere"]])
def test_mistakes_are_one_line(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jrl report: ")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31, 32, 33, 100])
def test_of_many_lines_some_are_read_evenly_spaced(tmp_path: Path, count: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)))
    found, there = _some_lines(path, 8)
    numbers = [record["n"] for record in found]
    assert there == count and len(numbers) <= 8 and (count >= 8 or numbers == list(range(count)))
    gaps = {later - one for one, later in pairwise(numbers[:-1])}
    assert len(gaps) <= 1 and numbers[:1] + numbers[-1:] == ([0, count - 1] if count else [])


def test_a_text_may_hold_what_unicode_calls_a_line(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    odd = [{"step": 4, "iteration": 9, "note": mark.join("ab")} for mark in "\u2028\u2029\u0085\x0b\x0c\x1c"]
    with (folder / "metrics.jsonl").open("a", encoding="utf-8", newline="") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in odd)
    assert read_run(folder).history[-len(odd) :] == odd


def test_figures_larger_than_a_float_and_lone_surrogates_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_up(tmp_path / "run", samples=2, text="\ud800")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 24, "iteration": 6, "reward/mean": 1' + "0" * 400 + "}\n")
        file.write('{"step": 28, "iteration": 7, "reward/mean": 1' + "0" * 5000 + "}\n")
    assert main(["report", str(folder)]) == 0
    assert "\\ud800 1" in Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")


def test_samples_of_many_evaluations_are_thinned(tmp_path: Path) -> None:
    """Those of the first and the last evaluation stay, for they are compared."""
    folder = made_up(tmp_path / "run")
    rows = [
        {"step": step, "prompt": f"p{i}", "output": f"{step}", "reward": 0.0, "output_tokens": [1, 2]}
        for step in range(_READ)
        for i in range(3)
    ]
    (folder / "rollouts" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(folder)
    assert len(found.evaluated) <= _READ + 6 and found.num_evaluated == len(rows)
    for step in (0, _READ - 1):
        assert [row["prompt"] for row in found.evaluated if row["step"] == step] == ["p0", "p1", "p2"]
    assert not any("output_tokens" in row for row in found.evaluated)
    steps = [row["step"] for row in found.evaluated]
    assert steps == sorted(steps)
    assert f"{MAX_SAMPLES} samples, of {len(rows)}." in report([found])


def write_config(folder: Path, text: str) -> None:
    (folder / "checkpoint_4").mkdir()
    (folder / "checkpoint_4" / "config.yaml").write_text(text)


def test_samples_lie_where_the_configuration_says(tmp_path: Path) -> None:
    folder, elsewhere = made_up(tmp_path / "run"), made_up(tmp_path / "other", samples=5) / "rollouts"
    assert read_run(folder).rollouts == []
    write_config(folder, f"train: {{rollout_logging_dir: {elsewhere}}}\n")
    assert len(read_run(folder).rollouts) == 5


@pytest.mark.parametrize("text", ["a: [", "- a list", "train: 3"])
def test_a_broken_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder = made_up(tmp_path / "run")
    write_config(folder, text)
    assert main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml" in line
