# SPDX-License-Identifier: Apache-2.0
"""Other programs that get in a run's way: a second run, a tracker, a clock that somebody sets."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, assert_same_run, start

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
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    return len(children)


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
