# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several processes write into one folder, and any number of processes read."""

import json
import time
from pathlib import Path

import pytest

from tests.processes.job import Job

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("saving_worker.py")
HEARTBEAT = 30


def run(what, folder, num_processes, *, succeeds=True):
    job = Job(
        [WORKER, what, folder],
        folder.with_name("logs"),
        num_processes=num_processes,
        num_devices=4 // num_processes,
        variables={"JRL_HEARTBEAT_TIMEOUT_SECONDS": str(300 if succeeds else HEARTBEAT)},
    )
    if succeeds:
        job.succeed(timeout=400.0)
    return job


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    run("two", folder, 2)
    return folder


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_two_processes_save_and_others_restore(saved, num_processes):
    job = run("load", saved, num_processes)
    words = [job.output(process).split("restored ")[1].splitlines()[0] for process in range(num_processes)]
    assert len(set(words)) == 1 and words[0].startswith("2 True ")
    assert ("exact in state, not in bits" in job.output(0)) == (num_processes != 2)


def test_both_wrote_and_nothing_else_is_left(saved):
    files = json.loads((saved / "checkpoint_2" / "manifest.json").read_text())["files"]
    for process in (0, 1):
        assert any(name.startswith(f"state/ocdbt.process_{process}/d/") for name in files)
    assert sorted(path.name for path in (saved / "checkpoint_2").iterdir()) == [
        "config.yaml",
        "cursor.json",
        "hf_model",
        "manifest.json",
        "state",
    ]


def test_a_disk_that_is_full_for_one_costs_one_checkpoint_and_is_told_once(tmp_path):
    folder = tmp_path / "run"
    job = run("full", folder, 2)
    assert job.output().count("Checkpoint 2 could not be written") == 1
    assert "Process 1 could not write its part" in job.output(0) and "kept: checkpoint_1" in job.output(0)
    for process in (0, 1):
        assert "failed True" in job.output(process)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_3", "run.lock"]


def test_what_process_0_refuses_all_refuse(saved):
    job = run("refused", saved, 2)
    for process in (0, 1):
        assert "refused: " in job.output(process) and "train.overwrite" in job.output(process)


def test_hosts_that_do_not_share_the_folder_are_refused(tmp_path):
    job = run("elsewhere", tmp_path / "run", 2)
    for process in (0, 1):
        said = job.output(process)
        assert "refused: Process 1 of 2 failed" in said and "must share `train.checkpoint_dir`" in said


def test_a_failure_of_one_ends_all_at_once(tmp_path):
    job = run("alone", tmp_path / "run", 4, succeeds=False)
    job.processes[1].wait(timeout=300.0)
    ended = time.monotonic()
    codes = job.wait(timeout=HEARTBEAT)
    assert time.monotonic() - ended < HEARTBEAT / 2
    assert codes[1] == 1 and 0 not in codes
    assert "OSError: nobody else has this" in job.output(1)
