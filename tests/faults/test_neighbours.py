# SPDX-License-Identifier: Apache-2.0
"""Other programs that get in a run's way: a second run, a tracker, a clock that somebody sets."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, assert_same_run, last_step, start

pytestmark = pytest.mark.slow
CLOCK = Path(__file__).with_name("jumping_clock.c")
NOWHERE = {
    "WANDB_BASE_URL": "http://127.0.0.1:9",  # nothing listens on the discard port
    "WANDB_API_KEY": "a" * 40,
    "WANDB_INIT_TIMEOUT": "5",
}


def test_a_second_run_in_the_folder_refuses_and_the_first_one_notices_nothing(checkpoint, whole, tmp_path):
    whole_folder, steps = whole("sft")
    folder = tmp_path / "run"
    first = start("sft", checkpoint, folder, steps=steps, branch=True)
    first.wait_until_it("update")
    first.process.send_signal(signal.SIGSTOP)  # or it might be done before the second one has begun
    log = first.log.rename(tmp_path / "first.log")
    try:
        said = start("sft", checkpoint, folder, steps=steps).finish(status=1)
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert f"Another run is working in {folder}" in said and "begins update" not in said
    first.log = log
    first.finish()
    assert_same_run(folder, whole_folder)


@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_a_folder_that_goes_while_a_run_works_there_comes_back(how, checkpoint, whole, tmp_path):
    whole_folder, steps = whole("ppo")
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    job = start("ppo", checkpoint, folder, steps=steps, branch=True)
    job.wait_until_it("checkpoint", times=2)
    folder.rename(elsewhere)
    if how == "deleted":
        shutil.rmtree(elsewhere, ignore_errors=True)
    said = job.finish()
    assert "was deleted or renamed while the run worked there" in said
    assert_same_run(folder, whole_folder)


def test_a_lock_that_a_clean_up_deleted_lets_no_two_runs_write_one_folder(checkpoint, whole, tmp_path):
    whole_folder, steps = whole("sft")
    folder = tmp_path / "run"
    afresh = {"train": {"resume_from_checkpoint": None}, "branch": True}
    first = start("sft", checkpoint, folder, steps=steps, **afresh)
    first.wait_until_it("update", times=5)
    first.process.send_signal(signal.SIGSTOP)
    first.log = first.log.rename(tmp_path / "first.log")
    try:
        (folder / "run.lock").unlink()
        second = start("sft", checkpoint, folder, steps=steps, **afresh)
        second.wait_until_it("update")
    finally:
        first.process.send_signal(signal.SIGCONT)
    said = first.finish(status=1)
    assert f"Another run is working in {folder}" in said and "was deleted meanwhile" in said
    second.finish()
    assert_same_run(folder, whole_folder)
    (aside,) = tmp_path.glob("run_displaced_*")
    assert last_step(aside) > 0
    start("sft", checkpoint, aside, steps=steps, branch=True).finish()
    assert_same_run(aside, whole_folder)


def test_a_child_that_outlives_its_run_does_not_keep_the_folder(checkpoint, whole, tmp_path):
    whole_folder, steps = whole("ppo")
    folder = tmp_path / "run"
    job = start("ppo", checkpoint, folder, steps=steps, forks=True, branch=True)
    job.wait_until_it("update", times=5)
    (child,) = children_of(job)
    job.kill()
    try:
        os.kill(child, 0)  # it lives
        start("ppo", checkpoint, folder, steps=steps, branch=True).finish()
    finally:
        os.kill(child, signal.SIGKILL)
    assert_same_run(folder, whole_folder)


class TestTrackers:
    def test_a_folder_that_tensorboard_cannot_have(self, checkpoint, whole, tmp_path):
        whole_folder, steps = whole("ppo")
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "tensorboard").write_text("a file")
        train = {"tracker": "tensorboard", "logging_dir": str(tmp_path / "logs")}
        said = start("ppo", checkpoint, tmp_path / "run", steps=steps, train=train, branch=True).finish()
        assert said.count("The tracker tensorboard failed") == 1
        assert_same_run(tmp_path / "run", whole_folder)

    def test_a_full_disk_under_tensorboard(self, checkpoint, whole, tmp_path):
        whole_folder, steps = whole("ppo")
        logs = tmp_path / "logs"
        logs.mkdir()
        train = {"tracker": "tensorboard", "logging_dir": str(logs)}
        script = 'mount -t tmpfs -o size=64k none "$1"; shift; exec "$@"'
        launcher = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh", str(logs)]
        job = start("ppo", checkpoint, tmp_path / "run", steps=steps, train=train, launcher=launcher)
        assert "tracker tensorboard" in job.finish()
        assert_same_run(tmp_path / "run", whole_folder)

    def test_wandb_without_a_server(self, checkpoint, whole, tmp_path):
        pytest.importorskip("wandb")
        whole_folder, steps = whole("ppo")
        options = dict(train={"tracker": "wandb"}, environment=NOWHERE, branch=True)
        folder = tmp_path / "run"
        said = start("ppo", checkpoint, folder, steps=steps, **options).finish()
        assert said.count("wandb cannot be reached") == 1
        assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
        assert_same_run(folder, whole_folder)

    def test_wandb_whose_own_process_dies(self, checkpoint, whole, tmp_path):
        pytest.importorskip("wandb")
        whole_folder, steps = whole("ppo")
        options = dict(train={"tracker": "wandb"}, environment={"WANDB_MODE": "offline"}, branch=True)
        job = start("ppo", checkpoint, tmp_path / "run", steps=steps, **options)
        job.wait_until_it("update", times=2)
        assert kill_children(job) > 0
        assert "The tracker wandb failed" in job.finish()
        assert_same_run(tmp_path / "run", whole_folder)


def kill_children(job: Job) -> int:
    """SIGKILL to all that a job has started; how many there were."""
    children = children_of(job)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return len(children)


def children_of(job: Job) -> list[int]:
    """Processes that a job has started from its main thread."""
    text = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text()
    return [int(child) for child in text.split()]


class TestClocks:
    @pytest.mark.parametrize("algorithm", ["ppo", "sft"])
    def test_a_clock_that_jumps(self, algorithm, checkpoint, whole, tmp_path):
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler: the clock is that of the whole process, not only Python's")
        library = tmp_path / "clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(CLOCK)], check=True)
        whole_folder, steps = whole(algorithm)
        environment = {"LD_PRELOAD": str(library)}
        start(algorithm, checkpoint, tmp_path / "run", steps=steps, environment=environment).finish()
        assert_same_run(tmp_path / "run", whole_folder)

    def test_files_from_the_future_and_from_long_ago(self, checkpoint, whole, tmp_path):
        whole_folder, steps = whole("sft")
        folder = tmp_path / "run"
        job = start("sft", checkpoint, folder, steps=steps, branch=True)
        job.wait_until_it("checkpoint", times=4)
        job.kill()
        for number, path in enumerate(sorted(folder.rglob("*"))):
            when = time.time() + (10 if number % 2 else -20) * 365 * 86400
            os.utime(path, (when, when))
        start("sft", checkpoint, folder, steps=steps, branch=True).finish()
        assert_same_run(folder, whole_folder)
