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
    total_steps=8,
    epochs="100 iterations",
    is_over=True,
    unsaved=False,
    seconds=42.0,
    writes_text=True,
    resume_argument="train.resume_from_checkpoint",
    report="report.html",
)


def said(tmp_path, history=HISTORY, **ending):
    total = ending.pop("total_steps", ending.get("step", ENDING.step))
    return closing_sentence(history, replace(ENDING, run_dir=tmp_path, total_steps=total, **ending))


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
    text = said(tmp_path, [], step=4, last_step=20, total_steps=20, epochs="1 pass")
    ended = "ended after 1 pass (train.epochs), train.total_steps 20 was not reached"
    assert text.startswith(f"done: 4 steps in 42 s; {ended}; model in") and "To go on" not in text


def test_which_cap_ended_a_run_is_told(tmp_path):
    (tmp_path / "checkpoint_8").mkdir()
    text = said(tmp_path, [], total_steps=1000, epochs="3 iterations")
    assert text.startswith(
        "done: 8 steps in 42 s; ended after 3 iterations (train.epochs), train.total_steps 1,000 was not reached; model"
    )
    assert "train.epochs" not in said(tmp_path, []), "the steps themselves"
    stopped = said(tmp_path, [], step=4, total_steps=1000, is_over=False)
    assert "train.epochs" not in stopped, "a signal ended it"


def measured(*rewards, error=0.03):
    facts = {"reward/standard_error": error, "sampling/num_prompts": 64, "sampling/samples_per_prompt": 1}
    return [
        {"step": 4 * i, "evaluation": i, "reward/mean": reward, **facts} for i, reward in enumerate(rewards)
    ]


def test_rewards_have_their_errors(tmp_path):
    for step in (4, 8):
        (tmp_path / f"checkpoint_{step}").mkdir()
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, measured(0.5, 0.52))))
    rises, wavers = said(tmp_path, measured(0.5, 0.6)), said(tmp_path, measured(0.5, 0.52))
    assert "mean reward 0.5 +- 0.03 to 0.6 +- 0.03 (64 prompts) on the evaluation prompts; model" in rises
    assert (
        "to 0.52 +- 0.03 (64 prompts) on the evaluation prompts, a difference within error; model" in wavers
    )
    page = report([read_run(tmp_path)])
    assert (
        "from 0.5 +- 0.03 to 0.52 +- 0.03 (64 prompts) on the evaluation prompts, a difference within error"
        in page
    )
    best = said(tmp_path, measured(0.5, 0.7, 0.68))
    assert "best 0.7 +- 0.03 at step 4, within error of the last: " in best
    assert "best 0.9 +- 0.03 at step 4: " in said(tmp_path, measured(0.5, 0.9, 0.6))
    worse = "no evaluation was better than the one before training, 0.5 +- 0.03"
    assert f"{worse}, but within error; " in said(tmp_path, measured(0.5, 0.49))
    assert f"{worse}; " in said(tmp_path, measured(0.5, 0.4))


def test_a_gain_of_every_prompt_is_no_difference_within_error(tmp_path):
    (tmp_path / "checkpoint_4").mkdir()
    history = measured(0.5, 0.52)
    for record, gain in zip(history, (0, 0.02), strict=True):
        record["sampling/reward_means"] = [i / 15 + gain for i in range(16)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, history)))
    page = report([read_run(tmp_path)])
    for told in (said(tmp_path, history), page):
        assert "0.5 +- 0.03 to 0.52 +- 0.03 (64 prompts)" in told and "within error" not in told


def test_equal_rewards_are_no_difference_within_error(tmp_path):
    (tmp_path / "checkpoint_4").mkdir()
    assert "within error" not in said(tmp_path, measured(1.0, 1.0, error=0.0))


def test_iterations_without_a_lesson_are_counted(tmp_path):
    (tmp_path / "checkpoint_8").mkdir()
    history = [
        {"step": i, "iteration": i, "group/degenerate_iterations": float(count)}
        for i, count in enumerate([0, 1, 2, 2], start=1)
    ]
    text = "in 2 of 4 iterations no prompt had samples whose scores differ, so they taught nothing"
    assert text in said(tmp_path, history)
    assert "taught nothing" not in said(
        tmp_path, [record | {"group/degenerate_iterations": 0.0} for record in history]
    )


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
