# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jrl.trainers.defaults import default_ppo_config
from jrl.trainers.loggers import Loggers, make_loggers
from jrl.trainers.loggers_console import RichConsole
from jrl.trainers.loggers_jsonl import JSONLLogger
from jrl.trainers.loggers_trackers import WandbLogger

DESCRIPTION = {"algorithm": "PPOTrainer"}
ROWS = [{"prompt": "a", "output": "[bold]b\n", "reward": 0.5}, {"prompt": "c", "output": "d", "reward": 1.0}]


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def quiet():
    return RichConsole(Console(file=io.StringIO(), width=100))


def begin(run_dir, *, keep_records=None, step=0, **train) -> Loggers:
    config = default_ppo_config().evolve(train=train)
    loggers = make_loggers(config, run_dir, keep_records=keep_records, console=quiet())
    loggers.start(DESCRIPTION, total_steps=10, step=step)
    return loggers


class TestJSONL:
    def test_records_and_samples_are_lines(self, tmp_path):
        loggers = begin(tmp_path)
        loggers.log({"step": 4, "reward/mean": np.float32(0.5), "steps": np.int64(3)}, 4)
        loggers.log_samples(ROWS, 4, show=True)
        loggers.log_table("samples", ["prompt", "output"], [["x", "y"]], 4)
        loggers.close()
        assert read(tmp_path / "metrics.jsonl") == [{"step": 4, "reward/mean": 0.5, "steps": 3}]
        assert read(tmp_path / "rollouts" / "rollouts.jsonl") == [{"step": 4, **row} for row in ROWS]
        assert read(tmp_path / "rollouts" / "samples.jsonl") == [{"step": 4, "prompt": "x", "output": "y"}]

    def test_samples_are_shown_only_when_asked_and_without_their_ids(self, tmp_path):
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=100))
        loggers = make_loggers(default_ppo_config(), tmp_path, keep_records=None, console=console)
        rows = [{**row, "output_tokens": [77, 78]} for row in ROWS]
        loggers.log_samples(rows, 1, show=False)
        assert out.getvalue() == ""
        loggers.log_samples(rows, 2, show=True)
        loggers.close()
        assert "rollouts at step 2" in out.getvalue()
        assert "77" not in out.getvalue()
        assert [row["output_tokens"] for row in read(tmp_path / "rollouts" / "rollouts.jsonl")] == [
            [77, 78]
        ] * 4

    def test_the_samples_folder_can_be_chosen(self, tmp_path):
        loggers = begin(tmp_path / "run", rollout_logging_dir=str(tmp_path / "new" / "folder"))
        loggers.log_samples(ROWS, 1, show=True)
        loggers.close()
        assert len(read(tmp_path / "new" / "folder" / "rollouts.jsonl")) == 2

    def test_what_is_not_finite_is_null(self, tmp_path):
        loggers = begin(tmp_path)
        loggers.log({"step": 1, "a": float("nan"), "b": np.float32("inf"), "c": None}, 1)
        loggers.close()
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": None}]

    def test_a_resume_cuts_back_to_the_checkpoint(self, tmp_path):
        loggers = begin(tmp_path)
        for step in range(1, 6):
            loggers.log({"step": step, "reward/mean": float(step)}, step)
            loggers.log_samples([{"prompt": "line\u2028break", "output": str(step)}], step, show=True)
        loggers.close()
        resumed = begin(tmp_path, keep_records=3, step=3)
        assert [record["step"] for record in resumed.kept_records] == [1, 2, 3]
        resumed.log({"step": 4, "reward/mean": -4.0}, 4)
        resumed.close()
        assert [record["reward/mean"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, -4]
        text = (tmp_path / "rollouts" / "rollouts.jsonl").read_text()
        assert [json.loads(line)["output"] for line in text.split("\n")[:-1]] == ["1", "2", "3"]

    def test_a_line_cut_short_by_a_crash_is_dropped(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
        with pytest.warns(UserWarning, match="has 1 records, the checkpoint counted 2"):
            loggers = begin(tmp_path, keep_records=2, step=2)
        loggers.close()
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1}]

    def test_a_fresh_run_starts_empty(self, tmp_path):
        for _ in range(2):
            loggers = begin(tmp_path)
            loggers.log({"step": 1}, 1)
            loggers.log_samples(ROWS, 1, show=True)
            loggers.close()
        assert len(read(tmp_path / "metrics.jsonl")) == 1
        assert len(read(tmp_path / "rollouts" / "rollouts.jsonl")) == 2

    def test_on_a_full_disk_lines_wait(self, tmp_path, monkeypatch):
        logger = JSONLLogger(tmp_path / "metrics.jsonl", tmp_path / "rollouts", keep_records=None)
        logger.log({"step": 1}, 1)
        write = os.write

        def half_a_line_then_full(descriptor, content):
            write(descriptor, content[:3])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="lines wait in memory") as seen:
            patch.setattr(os, "write", half_a_line_then_full)
            logger.log({"step": 2}, 2)
            logger.log({"step": 3}, 3)
        assert len(seen) == 1
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1}]
        logger.log({"step": 4}, 4)
        logger.close()
        assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]

    def test_what_a_disk_spoilt_is_left_out(self, tmp_path):
        loggers = begin(tmp_path)
        for step in range(1, 4):
            loggers.log({"step": step}, step)
            loggers.log_samples(ROWS[:1], step, show=True)
        loggers.close()
        records, samples = tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "rollouts.jsonl"
        records.write_bytes(
            records.read_bytes().replace(b'{"step": 1}', b'{"st\xffp": 1') + bytes(64) + b"\n"
        )
        samples.write_bytes(samples.read_bytes() + bytes(64) + b"\n[1]\n{}\n")
        with pytest.warns(UserWarning, match="has 1 records, the checkpoint counted 2"):
            resumed = begin(tmp_path, keep_records=2, step=2)
        resumed.close()
        assert read(records) == [{"step": 2}]
        assert [row["step"] for row in read(samples)] == [1, 2]

    def test_what_never_found_room_is_counted(self, tmp_path, monkeypatch):
        logger = JSONLLogger(tmp_path / "metrics.jsonl", tmp_path / "rollouts", keep_records=None)

        def full(descriptor, content):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.warns(UserWarning, match="lines wait in memory"):
            logger.log({"step": 1}, 1)
        logger.log({"step": 2}, 2)
        logger.flush()
        with pytest.warns(UserWarning, match="2 lines of .* were never written"):
            logger.close()
        assert read(tmp_path / "metrics.jsonl") == []

    @pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts"])
    def test_where_nothing_can_be_kept_nothing_begins(self, tmp_path, name):
        if name == "rollouts":
            (tmp_path / name).write_text("")
        else:
            (tmp_path / name).mkdir()
        with pytest.raises(OSError, match=name) as caught:
            begin(tmp_path)
        assert "train.checkpoint_dir" in caught.value.__notes__[0]


class TestConsole:
    def run(self, *, terminal):
        out = io.StringIO()
        console = RichConsole(
            Console(file=out, width=100, force_terminal=terminal, color_system=None), rows=1
        )
        console.start(DESCRIPTION, total_steps=10, step=2)
        console.log({"step": 4, "reward/mean": 0.25, "kl/per_sequence": 0.1, "unknown": 3.0}, 4)
        console.log({"step": 5, "reward/mean": 0.5}, 5)  # too soon after the last line
        console.log({"step": 4, "evaluation": 1, "reward/mean@temperature=0.5": 0.75}, 4)
        console.log_table("rollouts", list(ROWS[0]), [list(row.values()) for row in ROWS], 4)
        console.close()
        console.close()
        return out.getvalue()

    def test_plain_lines_where_there_is_no_terminal(self):
        text = self.run(terminal=False)
        assert "step 4/10  reward 0.25  kl 0.1\n" in text
        assert "evaluation at step 4  reward/mean@temperature=0.5 0.75\n" in text
        assert "resumed at 2" in text
        assert "unknown" not in text
        assert "\x1b" not in text

    def test_a_live_bar_on_a_terminal(self):
        text = self.run(terminal=True)
        assert "5/10" in text
        assert "reward 0.5" in text

    def test_tables_show_markup_as_text_and_only_the_first_rows(self):
        text = self.run(terminal=False)
        assert "[bold]b" in text
        assert "│ c" not in text


class TestTrackers:
    def test_tensorboard_writes_events(self, tmp_path):
        loggers = begin(tmp_path, tracker="tensorboard")
        loggers.log({"step": 1, "reward/mean": 0.5}, 1)
        loggers.log({"step": 1, "evaluation": 0, "reward/mean": 0.75}, 1)
        loggers.log_samples(ROWS, 1, show=True)
        (tracker,) = loggers.trackers
        tracker.log_images({"0.5 | a cat": np.zeros((4, 6, 3), np.uint8)}, 1)
        loggers.flush()
        loggers.close()
        (events,) = (tmp_path / "tensorboard").glob("events.*")
        content = events.read_bytes()
        assert b"eval/reward/mean" in content
        assert b"iteration" not in content
        assert b"| prompt | output | reward |" in content
        assert b"a_cat" in content and b"PNG" in content
        assert begin(tmp_path / "none").trackers == ()

    @pytest.mark.parametrize(("tracker", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
    def test_a_missing_package_names_the_extra(self, tmp_path, monkeypatch, tracker, package):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"pip install 'jrl\[{tracker}\]'"):
            begin(tmp_path, tracker=tracker)

    def test_images_of_one_step_do_not_hide_each_other_in_wandb(self, tmp_path, monkeypatch):
        """The samples', the evaluation's and a hook's have a panel each."""
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=lambda image, caption: caption))
        logger, logged = WandbLogger(tmp_path, {}, run_id_file=tmp_path / "id"), {}
        logger._run = SimpleNamespace(log=lambda values, step: logged.update(values))
        image = np.zeros((4, 6, 3), np.uint8)
        for name in ("samples/0.5 | a/b", "evaluation/0.5 | a", "0.5 | a"):
            logger.log_images({name: image}, 1)
        assert logged == {"samples": ["0.5 | a/b"], "evaluation": ["0.5 | a"], "images": ["0.5 | a"]}

    @pytest.mark.slow
    def test_wandb_works_offline(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        loggers = begin(tmp_path, tracker="wandb", tags=["tiny"])
        loggers.log({"step": 1, "reward/mean": 0.5}, 1)
        loggers.log_samples(ROWS, 1, show=True)
        loggers.close()
        assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
        run_id = (tmp_path / "wandb_id").read_text()
        resumed = begin(tmp_path, tracker="wandb", keep_records=1, step=1)
        resumed.close()
        assert (tmp_path / "wandb_id").read_text() == run_id
