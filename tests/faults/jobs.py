# SPDX-License-Identifier: Apache-2.0
"""Starts, watches, hurts and compares the runs of `job.py`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orbax.checkpoint as ocp

from jrl.trainers.checkpoints.resume import checkpoints_in
from tests.faults import job
from tests.trainers.runs import repeatable

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900.0
LOOKS_EVERY = 0.002


class Branch:
    """A process branched off one that has imported everything and started nothing: with the face of `Popen`.

    Args:
      options: Of the job.
      environment: Variables beside those of this process; too late for those that are read by an import.
      log: Receives both its outputs.
    """

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.job"])
        log.write_bytes(b"")
        self._process = context.Process(
            target=job.main_logged, args=(options, dict(environment), str(log)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("branch", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """As `os.kill`."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


class Job:
    """A run in a process of its own.

    Args:
      process: Started already.
      log: Receives both its outputs.
    """

    all: ClassVar[list[Job]] = []

    def __init__(self, process: subprocess.Popen[bytes] | Branch, log: Path) -> None:
        self.process, self.log = process, log
        self.all.append(self)

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[str], bool], *, seconds: float = SECONDS) -> None:
        """Returns as soon as a condition on the job's output holds; fails if the job ends before."""
        end = time.monotonic() + seconds
        while not condition(self.text):
            assert self.process.poll() is None, f"it ended too early:\n{self.text}"
            assert time.monotonic() < end, f"nothing within {seconds} s:\n{self.text}"
            time.sleep(LOOKS_EVERY)

    def wait_until_it(self, begins: str, *, times: int = 1) -> None:
        """Returns when a phase has begun for the given time."""
        self.wait_for(lambda text: text.count(f"begins {begins}\n") >= times)

    def kill(self) -> str:
        """SIGKILL; what it had said."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL, self.text
        return self.text

    def finish(self, *, status: int = 0, seconds: float = SECONDS) -> str:
        """Waits for its end and its exit status; what it had said."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end within {seconds} s:\n{self.text}") from None
        assert found == status, f"exit status {found}:\n{self.text}"
        return self.text


def start(
    algorithm: str,
    checkpoint: str,
    folder: Path,
    *,
    steps: int,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    train: Mapping[str, Any] | None = None,
    branch: bool = False,
    **faults: Any,
) -> Job:
    """Starts a run.

    Args:
      algorithm: "ppo", "grpo" (with refilled groups), "rft", "sft", "ilql", "episodes" (ILQL on them), "dpo",
        "reward" or "ddpo".
      checkpoint: Model folder.
      folder: Of the run; its log lies beside it.
      steps: `train.total_steps`.
      launcher: Command that starts the command.
      environment: Variables beside those of this process.
      train: Further fields of `train`.
      branch: Whether the process need not begin and end as an interpreter of its own does: that saves the imports.
      faults: `reward`, `metric`, `disk` and `poison`: arguments of what `injected` has for them; `forks`: whether a
        child of the reward function outlives the run.
    """
    options = options_of(algorithm, checkpoint, folder, steps=steps, train=train, **faults)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    if branch:
        return Job(Branch(options, environment or {}, log), log)
    command = [*launcher, *command_with(options)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | dict(environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    return Job(process, log)


def options_of(
    algorithm: str,
    checkpoint: str,
    folder: Path,
    *,
    steps: int,
    train: Mapping[str, Any] | None = None,
    **faults: Any,
) -> dict[str, Any]:
    """What a job is told; the arguments are those of `start`."""
    options = {"algorithm": algorithm, "checkpoint": checkpoint, "folder": str(folder)} | faults
    return options | {"train": {"total_steps": steps, **(train or {})}}


def command_with(options: Mapping[str, Any]) -> list[str]:
    """The command of a job."""
    return [sys.executable, "-m", "tests.faults.job", json.dumps(options)]


def command_of(algorithm: str, checkpoint: str, folder: Path, *, steps: int) -> list[str]:
    """The command of a job that nothing else is done to."""
    return command_with(options_of(algorithm, checkpoint, folder, steps=steps))


def records(folder: Path) -> list[dict[str, Any]]:
    """Everything that `metrics.jsonl` holds, without its clocks."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return repeatable([json.loads(line) for line in lines])


def last_step(folder: Path) -> int:
    """Of the newest checkpoint, 0 if there is none."""
    return max(checkpoints_in(folder), default=0)


def read_arrays(path: Path) -> dict[str, Any]:
    """A stored state."""
    with ocp.StandardCheckpointer() as checkpointer:
        arrays: dict[str, Any] = checkpointer.restore(path)
    return arrays


def assert_same_run(folder: Path, whole: Path) -> None:
    """Both runs logged the same, sampled the same, and ended in the same state and model, bit for bit."""
    assert records(folder) == records(whole)
    for table in ("rollouts", "samples"):
        expected = whole / "rollouts" / f"{table}.jsonl"
        if expected.exists():
            assert (folder / "rollouts" / expected.name).read_text() == expected.read_text()
    last = f"checkpoint_{last_step(whole)}"
    expected_arrays, got = read_arrays(whole / last / "state"), read_arrays(folder / last / "state")
    assert expected_arrays.keys() == got.keys()
    for name in expected_arrays:
        np.testing.assert_array_equal(expected_arrays[name], got[name], err_msg=name)
    for file in (whole / last / "hf_model").rglob("*.safetensors"):
        assert (folder / file.relative_to(whole)).read_bytes() == file.read_bytes()
