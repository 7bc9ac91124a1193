# SPDX-License-Identifier: Apache-2.0
"""Steps that must not be taken, and steps that somebody interrupts."""

import os
import pty
import re
import signal
import subprocess

import pytest

from tests.faults.conftest import STEPS
from tests.faults.jobs import ROOT, SECONDS, Job, assert_same_run, command_of, last_step, records, start

pytestmark = pytest.mark.slow


def kept(said):
    """Numbers of the updates that left weights and moments as they were."""
    return [int(number) for number in re.findall(r"update (\d+): weights kept", said)]


class TestNaN:
    @pytest.mark.parametrize(
        ("algorithm", "field", "steps_of_update"), [("dpo", "ref_chosen_logprobs", 1), ("ppo", "rewards", 4)]
    )
    def test_a_bad_gradient_is_left_out_and_counted(
        self, algorithm, field, steps_of_update, checkpoint, tmp_path
    ):
        folder, bad = tmp_path / "run", [3, 5, 6]
        options = dict(
            steps=10 * steps_of_update, train={"max_bad_steps": 9}, poison={field: bad}, branch=True
        )
        said = start(algorithm, checkpoint, folder, **options).finish()
        assert kept(said) == bad and said.count("weights moved") == 10 - len(bad)
        steps = [record for record in records(folder) if "iteration" in record]
        counted = [record["optim/skipped_steps"] / steps_of_update for record in steps]
        assert counted == [0, 0, 1, 1, 2, 3, 3, 3, 3, 3]
        in_a_row = [record["optim/skipped_in_a_row"] / steps_of_update for record in steps]
        assert in_a_row == [0, 0, 1, 0, 1, 2, 0, 0, 0, 0]

    def test_too_many_in_a_row_stop_the_run_with_the_weights_of_the_last_good_step(
        self, checkpoint, tmp_path
    ):
        folder = tmp_path / "run"
        options = dict(steps=20, train={"max_bad_steps": 3}, branch=True)
        poison = {"ref_chosen_logprobs": [4, 6, 7, 8, 9]}
        said = start("dpo", checkpoint, folder, poison=poison, **options).finish(status=1)
        assert "TrainingDivergedError: 3 optimizer steps in a row had a non-finite loss or gradient" in said
        # The figures arrive one step late, so a ninth update was on its way.
        assert kept(said) == [4, 6, 7, 8, 9] and last_step(folder) == 9
        said = start("dpo", checkpoint, folder, **options).finish()
        assert "resumed at 9" in said
        assert records(folder)[-1]["step"] == 20


class Terminal:
    """A job on a terminal of its own, which can be hung up.

    Args:
      command: Of the job.
      log: Receives what it says.
      shows: Whether it says it on the terminal; else in the log at once.
    """

    def __init__(self, command, log, *, shows=True):
        self._master, slave = pty.openpty()
        self._log = log.open("wb", buffering=0)
        output = slave if shows else self._log
        process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=slave, stdout=output, stderr=output, cwd=ROOT
        )
        os.close(slave)
        self.job = Job(process, log)

    def show_until(self, phase, *, times):
        """Reads what the job shows, as a terminal does."""
        while self.job.text.count(f"begins {phase}\n") < times:
            self._log.write(os.read(self._master, 4096).replace(b"\r", b""))

    def hang_up(self):
        """The connection is closed."""
        os.close(self._master)
        self._log.close()


OTHERS = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


class TestSignals:
    @pytest.mark.parametrize(
        ("algorithm", "number"),
        [
            *(
                (name, number)
                for number in (signal.SIGTERM, signal.SIGINT)
                for name in STEPS
                if name != "ddpo"
            ),
            *(("ppo", number) for number in OTHERS),
        ],
    )
    def test_a_signal_in_a_step_saves_exits_0_and_resumes_bit_for_bit(
        self, algorithm, number, checkpoint, whole, tmp_path
    ):
        whole_folder, steps = whole(algorithm)
        folder = tmp_path / "run"
        # One of them shows that the interpreter ends in order too.
        job = start(algorithm, checkpoint, folder, steps=steps, branch=algorithm != "sft")
        job.wait_until_it("update", times=5)
        job.process.send_signal(number)
        said = job.finish()
        assert f"{number.name}: finishing the iteration, then saving" in said
        assert 0 < last_step(folder) < steps
        assert records(folder)[-1]["step"] == last_step(folder)  # not one step is lost
        assert (
            f"resumed at {last_step(folder)}"
            in start(algorithm, checkpoint, folder, steps=steps, branch=True).finish()
        )
        assert_same_run(folder, whole_folder)

    def test_a_closed_connection_ends_the_run_in_order(self, checkpoint, whole, tmp_path):
        whole_folder, steps = whole("ppo")
        folder = tmp_path / "run"
        terminal = Terminal(command_of("ppo", checkpoint, folder, steps=steps), tmp_path / "shown")
        terminal.show_until("update", times=5)
        terminal.hang_up()
        assert terminal.job.process.wait(SECONDS) == 0
        assert 0 < last_step(folder) < steps
        assert records(folder)[-1]["step"] == last_step(folder)
        start("ppo", checkpoint, folder, steps=steps, branch=True).finish()
        assert_same_run(folder, whole_folder)

    def test_under_nohup_it_ends_nothing(self, checkpoint, whole, tmp_path):
        whole_folder, steps = whole("ppo")
        folder = tmp_path / "run"
        command = ["nohup", *command_of("ppo", checkpoint, folder, steps=steps)]
        terminal = Terminal(command, tmp_path / "said", shows=False)
        terminal.job.wait_until_it("update", times=5)
        terminal.hang_up()
        terminal.job.finish()
        assert last_step(folder) == steps
        assert_same_run(folder, whole_folder)
