# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jrl.trainers.cards import closing
from jrl.trainers.cards.closing import Ending, closing_sentence, write_report
from jrl.trainers.cards.report import read_run, report

HISTORY = [
    {"step": 0, "evaluation": 0, "reward/mean": 0.1},
    {"step": 4, "iteration": 1, "reward/mean": 0.3},
    {
        "step": 8,
        "watch": "large_kl",
        "metric": "kl/per_sequence",
        "value": 50.0,
        "healthy": None,
        "cause": "a",
        "remedy": "b",
    },
    {"step": 8, "evaluation": 1, "reward/mean": 0.25},
]


ENDING = Ending(
    run_dir=Path("run"),
    first_step=0,
    step=8,
    last_step=8,
    is_over=True,
    unsaved=False,
    seconds=42.0,
    writes_text=True,
    resume_argument="train.resume_from_checkpoint",
    report="report.html",
)


def said(tmp_path, history=HISTORY, **ending):
    return closing_sentence(history, replace(ENDING, run_dir=tmp_path, **ending))


def test_what_happened_where_things_are_and_what_to_do_next(tmp_path):
    (tmp_path / "checkpoint_4").mkdir()
    (tmp_path / "checkpoint_8").mkdir()
    assert said(tmp_path) == (
        "done: 8 steps in 42 s, mean reward 0.1 to 0.25 on the evaluation prompts; warned of large_kl; model in "
        f"{tmp_path}/checkpoint_8/hf_model, report: report.html. Next, try it: jrl generate --model {tmp_path} "
        "--prompt '...'"
    )
    assert said(tmp_path, writes_text=False).endswith("Next, open the report")
    assert "in 5 min" in said(tmp_path, seconds=300) and "in 2.0 h" in said(tmp_path, seconds=7200)


PEAKED = [
    {"step": step, "evaluation": i, "reward/mean": reward}
    for i, (step, reward) in enumerate([(0, 0.5), (4, 1.3), (8, 1.2)])
]


def test_the_best_checkpoint_is_named_where_it_is_not_the_last(tmp_path):
    """In the sentence, in the command, and in the report; only while the checkpoint is there."""
    for step in (4, 8):
        (tmp_path / f"checkpoint_{step}").mkdir()
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, PEAKED)))
    best = f"{tmp_path}/checkpoint_4/hf_model"
    text = said(tmp_path, PEAKED)
    assert f"mean reward 0.5 to 1.2 on the evaluation prompts; best 1.3 at step 4: {best}; model in" in text
    assert text.endswith(f"jrl generate --model {best} --prompt '...'")
    assert "It was best at step 4, 1.3: checkpoint_4/hf_model." in report([read_run(tmp_path)])
    (tmp_path / "checkpoint_4").rmdir()
    assert "; best " not in said(tmp_path, PEAKED) and "It was best" not in report([read_run(tmp_path)])


def test_a_run_that_made_the_model_worse_says_so(tmp_path):
    for step in (4, 8):
        (tmp_path / f"checkpoint_{step}").mkdir()
    worse = [PEAKED[0] | {"reward/mean": 1.5}, *PEAKED[1:]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, worse)))
    assert "no evaluation was better than the one before training, 1.5; best 1.3 at step 4" in said(
        tmp_path, worse
    )
    assert "No evaluation was better than the one before training, 1.5." in report([read_run(tmp_path)])
    equal = [PEAKED[0] | {"reward/mean": 1.3}, *PEAKED[1:]]
    assert "before training" not in said(tmp_path, PEAKED) + said(tmp_path, equal)


def test_prompts_of_the_training_are_called_so(tmp_path):
    """Where no others were given, the run evaluates on some of them."""
    of_training = [record | {"sampling/prompts": "training"} for record in PEAKED]
    assert "0.5 to 1.2 on the training prompts" in said(tmp_path, of_training)
    of_others = [record | {"sampling/prompts": "evaluation"} for record in PEAKED]
    assert "0.5 to 1.2 on the evaluation prompts" in said(tmp_path, of_others)


def test_a_last_checkpoint_that_is_best_is_not_named_twice(tmp_path):
    for step in (4, 8):
        (tmp_path / f"checkpoint_{step}").mkdir()
    equal = [*PEAKED[:2], PEAKED[2] | {"reward/mean": 1.3}]
    assert "; best " not in said(tmp_path, equal) + said(tmp_path, HISTORY)


@pytest.mark.parametrize("argument", ["train.resume_from_checkpoint", "resume_from_checkpoint"])
def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path, argument):
    """By the flag that its command has."""
    (tmp_path / "checkpoint_4").mkdir()
    text = said(tmp_path, HISTORY[:2], step=4, is_over=False, resume_argument=argument)
    assert text.startswith("stopped at step 4 of 8 after 42 s; model in")
    assert text.endswith(f". To go on: --{argument} {tmp_path}")


def test_a_run_that_ends_before_its_most_steps_is_done(tmp_path):
    """So does RFT after its epochs: there is nothing to resume."""
    (tmp_path / "checkpoint_4").mkdir()
    text = said(tmp_path, [], step=4, last_step=20)
    assert text.startswith("done: 4 of at most 20 steps in 42 s; model in") and "To go on" not in text


def test_the_time_after_a_resume_is_told_as_such(tmp_path):
    (tmp_path / "checkpoint_8").mkdir()
    assert said(tmp_path, [], first_step=4).startswith("done: 8 steps in 42 s since the resume at step 4; ")


def test_a_run_without_a_checkpoint(tmp_path):
    assert said(tmp_path, [], step=0, last_step=0) == (
        "done: 0 steps in 42 s; nothing was saved, because no step was made."
    )
    assert said(tmp_path, [], unsaved=True) == (
        "done: 8 steps in 42 s; the last checkpoint could not be written, so nothing was saved: make room on the disk."
    )


def test_a_checkpoint_that_the_disk_refused_is_told(tmp_path):
    (tmp_path / "checkpoint_4").mkdir()
    text = said(tmp_path, [], unsaved=True)
    assert "could not be written, so steps after 4 are lost: make room on the disk; model in" in text
    assert text.endswith(f"To go on: --train.resume_from_checkpoint {tmp_path}")


def test_the_report_is_written_or_it_is_said_why_not(tmp_path):
    assert "not written (`run` must be the folder of a run" in write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, HISTORY)))
    assert write_report(tmp_path) == str(tmp_path / "report.html")
    assert "went from 0.1 to 0.25" in (tmp_path / "report.html").read_text()


def test_a_full_disk_ends_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        (tmp_path / "report.html").write_text("")
    assert write_report(tmp_path).startswith("not written (")


def test_no_mistake_in_a_report_ends_a_run(tmp_path, monkeypatch):
    """Whatever is raised: the run is over, and saved."""
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoint_4").mkdir()
    (tmp_path / "checkpoint_4" / "config.yaml").write_text("a: [\nb: c")
    said = write_report(tmp_path)
    assert said.startswith("not written (") and "config.yaml is no YAML" in said and "\n" not in said
    monkeypatch.setattr(closing, "read_run", lambda _: 1 / 0)
    assert write_report(tmp_path) == "not written (division by zero)"
