# SPDX-License-Identifier: Apache-2.0
"""Disks that are really full and folders that really refuse: the run goes on, or does not begin."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.faults.jobs import assert_same_run, last_step, records, start

pytestmark = pytest.mark.slow
# A mount of the process's own, which goes with it; needs no rights, but a kernel that lets users have namespaces.
PRIVATE = ["unshare", "--user", "--map-root-user", "--mount"]
UNPRIVILEGED = [
    "unshare",
    "--user",
    "--map-user=1000",
]  # whoever starts the tests: modes count for this process


def mounted(script, *folders):
    """Launches a command after a shell script about `$1`, `$2`..."""
    shifts = f"shift {len(folders)}"
    return [*PRIVATE, "sh", "-ec", f'{script}; {shifts}; exec "$@"', "sh", *map(str, folders)]


@pytest.fixture(autouse=True)
def _namespaces():
    if shutil.which("unshare") is None or subprocess.run([*PRIVATE, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody make a mount namespace")


@pytest.fixture
def disk(tmp_path):
    """Where the run's own disk of 8 MiB is mounted."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def run_on(disk, checkpoint, steps, algorithm="ppo", **times):
    """(output, copy of the run's folder) of a run whose disk is full for a time."""
    copy = disk.parent / "copy"
    job = start(
        algorithm,
        checkpoint,
        disk / "run",
        steps=steps,
        launcher=mounted('mount -t tmpfs -o size=8m none "$1"', disk),
        disk={"full": str(disk), "copy_to": str(copy), **times},
    )
    return job.finish(), copy


@pytest.mark.parametrize("algorithm", ["ppo", "sft"])
def test_a_disk_that_is_full_for_a_time_costs_nothing(algorithm, checkpoint, whole, disk):
    whole_folder, steps = whole(algorithm)
    said, copy = run_on(disk, checkpoint, steps, algorithm, fill_at=steps // 4, free_at=steps * 3 // 4)
    assert " 0 bytes free" in said
    assert "could not be written to" in said and "The run goes on; kept: checkpoint_" in said
    assert "its lines wait in memory" in said
    assert_same_run(copy, whole_folder)


def test_a_disk_that_stays_full_leaves_the_older_checkpoints(checkpoint, whole, disk):
    whole_folder, steps = whole("ppo")
    said, copy = run_on(disk, checkpoint, steps, fill_at=100, free_at=None)
    assert "were never written: the disk refused them to the end" in said
    assert 0 < last_step(copy) <= 100 + 12
    assert [record["step"] for record in records(copy)] == sorted(record["step"] for record in records(copy))
    start("ppo", checkpoint, copy, steps=steps, branch=True).finish()
    assert_same_run(copy, whole_folder)


@pytest.mark.parametrize(("size", "status"), [("8m", 0), ("128k", 1)])
def test_the_command_fails_where_its_last_checkpoint_does(size, status, checkpoint, disk, tmp_path):
    (tmp_path / "texts.jsonl").write_text('"the cat"\n"the dog"\n')
    command = [
        *(sys.executable, "-m", "jrl", "sft", "--samples", str(tmp_path / "texts.jsonl")),
        *("--model.model_path", checkpoint, "--tokenizer.tokenizer_path", checkpoint),
        *("--train.checkpoint_dir", str(disk / "run"), "--train.batch_size", "2", "--train.seq_length", "64"),
        *("--train.total_steps", "1", "--train.eval_interval", "0"),
    ]
    launcher = mounted(f'mount -t tmpfs -o size={size} none "$1"', disk)
    done = subprocess.run([*launcher, *command], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("Checkpoint 1 could not be written to" in done.stderr) is bool(status)


def test_a_read_only_folder_ends_the_run_before_its_first_step(checkpoint, disk):
    (disk / "run").mkdir()
    launcher = mounted('mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"', disk)
    train = {"resume_from_checkpoint": None}
    said = start("sft", checkpoint, disk / "run", steps=8, train=train, launcher=launcher).finish(status=1)
    assert "Read-only file system" in said and "train.checkpoint_dir" in said
    assert "begins update" not in said
    assert not any((disk / "run").iterdir())


def test_a_folder_that_turns_read_only_costs_nothing_but_its_checkpoints(checkpoint, whole, tmp_path):
    whole_folder, steps = whole("ppo")
    folder = tmp_path / "run"
    job = start("ppo", checkpoint, folder, steps=steps, launcher=UNPRIVILEGED)
    try:
        job.wait_until_it("checkpoint", times=2)
        os.chmod(folder, 0o555)
        job.wait_for(lambda text: "could not be written to" in text)
    finally:
        os.chmod(folder, 0o755)
    assert "Permission denied" in job.finish()
    assert_same_run(folder, whole_folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts"])
def test_records_that_cannot_be_kept_end_the_run_before_its_first_step(name, checkpoint, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    if name == "rollouts":
        (folder / name).write_text("")
    else:
        (folder / name).mkdir()
    train = {"resume_from_checkpoint": None}
    said = start("ppo", checkpoint, folder, steps=8, train=train, branch=True).finish(status=1)
    assert "nothing is trained: make room, or set `train.checkpoint_dir`" in said
    assert "begins update" not in said


def test_half_a_compiled_program_is_compiled_anew(checkpoint, tmp_path):
    programs = tmp_path / "programs"
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    options = dict(steps=8, environment=environment)
    start(
        "sft", checkpoint, tmp_path / "first", **options
    ).finish()  # no branch: the import reads where they lie
    entries = list(programs.glob("*-cache"))
    for number, entry in enumerate(entries):
        content = entry.read_bytes()
        entry.write_bytes([content[: len(content) // 2], b"", content[::-1]][number % 3])
    start("sft", checkpoint, tmp_path / "second", **options).finish()
    assert len(entries) > 3
    assert_same_run(tmp_path / "second", tmp_path / "first")
