# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jrl.methods import default_ppo_config
from jrl.trainers.loggers import console as console_module
from jrl.trainers.loggers.console import LastingConsole, RichConsole
from jrl.trainers.loggers.description import describe_end
from jrl.trainers.loggers.jsonl import JSONLLogger
from jrl.trainers.loggers.loggers import Loggers, make_loggers
from jrl.trainers.loggers.standard_outputs import mute_lost
from jrl.trainers.loggers.trackers import WandbLogger

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

    def test_a_lone_surrogate_is_kept_and_read_back(self, tmp_path):
        loggers = begin(tmp_path)
        loggers.log({"step": 1, "metrics/\ud800": 1.0}, 1)
        loggers.log_samples([{"prompt": "a\udfff", "output": "é"}], 1, show=True)
        loggers.flush()
        loggers.close()
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "metrics/\ud800": 1.0}]
        again = begin(tmp_path, keep_records=1, step=1)
        again.close()
        assert again.kept_records == ({"step": 1, "metrics/\ud800": 1.0},)
        rows = read(tmp_path / "rollouts" / "rollouts.jsonl")
        assert rows == [{"step": 1, "prompt": "a\udfff", "output": "é"}]

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


class TestLostOutputs:
    def test_a_console_that_nobody_reads_ends_nothing(self, tmp_path):
        class Lost(RichConsole):
            def log(self, record, step):
                raise BrokenPipeError(32, "Broken pipe")

            log_table = log

        loggers = make_loggers(default_ppo_config(), tmp_path, keep_records=None, console=Lost())
        with pytest.warns(UserWarning, match="cannot be shown") as seen:
            for step in (1, 2):
                loggers.log({"step": step}, step)
        loggers.close()
        assert len(seen) == 1 and len(read(tmp_path / "metrics.jsonl")) == 2

    @pytest.mark.parametrize("kind", [os.pipe, os.openpty])
    def test_what_is_gone_is_pointed_to_nowhere(self, kind):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that the child has not
            child = os.fork()
        if not child:  # the outputs of this process are to stay as they are
            reader, writer = kind()
            os.dup2(writer, 1)
            mute_lost()
            kept = os.path.samestat(os.fstat(1), os.fstat(writer))
            os.close(reader)
            mute_lost()
            os._exit(0 if kept and os.write(1, b"more") == 4 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
        assert re.search(r"step 4/10  0:0\d  reward 0.25  kl 0.1\n", text)
        assert "evaluation at step 4  reward/mean@temperature=0.5 0.75\n" in text
        assert "resumed at 2" in text
        assert "unknown" not in text
        assert "\x1b" not in text

    def test_what_ends_a_run_before_its_steps_and_the_error_of_a_reward_are_shown(self):
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=160))
        console.start(describe_end(10, total_steps=1000, epochs="5 iterations"), total_steps=10, step=0)
        console.log({"step": 4, "iteration": 2, "reward/mean": 0.25}, 4)
        facts = {"reward/standard_error": 0.031, "sampling/num_prompts": 64, "sampling/samples_per_prompt": 1}
        console.log({"step": 4, "evaluation": 1, "reward/mean": 0.594, **facts, "metrics/a": 1.0}, 4)
        console.close()
        text = out.getvalue()
        assert (
            "ends  at step 10, after 5 iterations (train.epochs); train.total_steps 1,000 is not reached"
            in text
        )
        assert "step 4/10 (train.epochs)  0:0" in text
        assert "evaluation at step 4  reward/mean 0.594 +- 0.031 (64 prompts) metrics/a 1\n" in text
        assert describe_end(1000, total_steps=1000, epochs="2000 iterations") == {}

    def test_a_live_bar_on_a_terminal(self):
        text = self.run(terminal=True)
        assert "5/10" in text
        assert "reward 0.5" in text

    @pytest.mark.parametrize("width", [60, 80, 120])
    @pytest.mark.parametrize(
        ("first", "record"),
        [
            ("reward 0.5", {"reward/mean": 0.5, "kl/per_sequence": 1.0, "ppo/clip_fraction": 0.1}),
            ("loss 3", {"sft/loss": 3.0, "sft/token_accuracy": 0.5, "sft/entropy": 2.0}),
            ("loss 3", {"ilql/loss": 3.0, "ilql/q_loss": 0.5, "ilql/value_mean": 0.25}),
            ("loss 3", {"dpo/loss": 3.0, "rewards/accuracies": 0.5, "rewards/margins": 0.25}),
            ("loss 3", {"reward_model/loss": 3.0, "reward_model/accuracy": 0.5, "reward_model/margin": 0.25}),
            ("reward 0.5", {"reward/mean": 0.5, "ddpo/clip_fraction": 0.1, "ddpo/approx_kl": 0.1}),
            ("mine/loss 3", {"mine/loss": 3.0, "mine/other": 2.0}),
        ],
    )
    def test_step_time_and_the_first_figure_are_readable_at_any_width(self, width, first, record):
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=width, force_terminal=True, color_system=None))
        console.start({}, total_steps=12345, step=0)
        console.log({"step": 617, "iteration": 0, **record}, 617)
        console.log({"step": 1234, "iteration": 1, **record, "perf/tokens_per_second": 123456.0}, 1234)
        console.close()
        shown = re.split(r"\r\x1b\[2K|\n", out.getvalue())[-2]
        assert re.search(rf"step 1234/12345  0:0\d, \d+:\d\d left  {re.escape(first)}(  |$)", shown)
        assert len(shown) <= width and ("tok/s 123,456" in shown or width < 120)

    def test_no_time_is_estimated_before_the_second_iteration(self, monkeypatch):
        """The first one compiles: 60 seconds of it would make half an hour of a run of five minutes."""
        now = [0.0]
        monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
        clock = console_module._Clock(200, 0)
        for seconds, step, expected in (
            (60, 16, "1:00"),
            (70, 32, "1:10, 1:45 left"),
            (80, 48, "1:20, 1:35 left"),
        ):
            now[0] = seconds
            clock.see(step)
            assert clock.times() == expected

    @pytest.mark.parametrize("width", [80, 160])
    def test_the_live_display_has_a_sample_and_what_is_being_done(self, width):
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=width, force_terminal=True, color_system=None))
        console.start({}, total_steps=10, step=0)
        console.follow(lambda: "compiling the update, 12 s (38 s last time)")
        console.see_sample({"prompt": "long " * 20, "output": "and\x1b[2J its end", "reward": 0.25})
        console.log({"step": 5, "iteration": 1, "reward/mean": 0.5}, 5)
        console.finish("done: 10 steps.")
        time.sleep(0.6)  # two refreshes
        console.close()
        lines = re.split(r"\r|\n|\x1b\[2K|\x1b\[1A", out.getvalue())
        assert any(re.search(r"━ +compiling the update, 12 s \(38 s last time\)", line) for line in lines)
        (sample,) = {line.strip() for line in lines if "→" in line}
        assert sample.startswith("+0.25  …long") and "\x1b" not in sample and "\\x1b[2J" in sample
        assert all(len(line) <= width for line in lines)
        assert lines[-2].endswith("done: 10 steps.") and "reward 0.5" in lines[-3]

    def test_a_silence_is_broken_where_there_is_no_terminal(self, monkeypatch):
        monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.05)
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=100))
        console.start({}, total_steps=10, step=0)
        console.follow(lambda: "sampling, 3 s")
        time.sleep(0.2)
        console.close()
        assert re.search(r"\nstep 0/10  0:00  sampling, 3 s \.\.\.\n", out.getvalue())

    @pytest.mark.parametrize("error", [OSError(28, "No space left"), BrokenPipeError(32, "Broken pipe")])
    def test_a_silence_is_broken_again_after_an_output_failed(self, monkeypatch, error):
        class Failing(io.StringIO):
            failures = 2

            def write(self, text):
                if "sampling" in text and self.failures:
                    self.failures -= 1
                    raise error
                return super().write(text)

        monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.02)
        raised = []
        monkeypatch.setattr(threading, "excepthook", raised.append)
        out = Failing()
        console = RichConsole(LastingConsole(file=out, width=100))
        console.start({}, total_steps=10, step=0)
        console.follow(lambda: "sampling, 3 s")
        until = time.monotonic() + 10
        while "sampling" not in out.getvalue() and time.monotonic() < until and not raised:
            time.sleep(0.02)
        console.close()
        assert not raised and not out.failures and "sampling, 3 s" in out.getvalue()

    @pytest.mark.parametrize("terminal", [True, False])
    def test_texts_of_others_are_not_obeyed(self, terminal):
        out = io.StringIO()
        console = RichConsole(Console(file=out, width=100, force_terminal=terminal, color_system=None))
        evil = "x\x1b]0;owned\x07\x9b2J\ud800"
        console.start({"model": f"{evil}\nsteps 0"}, total_steps=10, step=0)
        console.log({"step": 1, "iteration": 1, f"{evil}/loss": 1.0}, 1)
        console.log({"step": 1, "evaluation": 0, f"metrics/{evil}": 1.0}, 1)
        console.log_table(evil, ["prompt", evil], [[evil, 1.0]], 1)
        console.close()
        text = out.getvalue()
        assert "owned" in text and "\\x1b]0;" in text
        assert not {"\x07", "\x9b", "\ud800"} & set(text) and "\x1b]" not in text and "[2J" not in text

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
    def test_a_missing_package_is_named(self, tmp_path, monkeypatch, tracker, package):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ImportError,
            match=rf"`train.tracker` = '{tracker}' needs the package {package}: pip install {package},",
        ):
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
