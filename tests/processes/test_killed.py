# SPDX-License-Identifier: Apache-2.0
"""One process of a job is really killed: the others end, say so, and the run goes on from its last checkpoint."""

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jrl.trainers.checkpoints.manifest import read_manifest
from tests.processes.conftest import assert_same_run, read_outcome, specify
from tests.processes.job import Job

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("hurt_worker.py")
HEARTBEAT = 20
STEPS = {"ppo": 12, "sft": 10}
INTERVAL = {"ppo": 4, "sft": 3}
# Where the killed process stands: algorithm, processes, and the hurt.
KILLS = {
    "rollout": ("ppo", 2, {"process": 1, "moment": "rollout", "step": 6}),
    "save": ("sft", 2, {"process": 1, "moment": "save", "step": 6}),
    "update": ("sft", 4, {"process": 2, "moment": "update", "step": 7}),
    "coordinator": ("sft", 2, {"process": 0, "moment": "update", "step": 7}),
}


def start(folder, checkpoint, algorithm, num_processes, hurt=None, *, checkpoint_interval=None):
    """A job whose run lies in `folder / "run"`, and resumes from what lies there."""
    sections = {
        "train": {
            "total_steps": STEPS[algorithm],
            "checkpoint_interval": checkpoint_interval or INTERVAL[algorithm],
            "eval_interval": 1000,
            "resume_from_checkpoint": str(folder / "run"),
            "keep_checkpoints": 10,
        }
    }
    file = specify(folder, checkpoint, algorithm, "vowels", sections)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hurt": hurt}))
    return Job(
        [WORKER, file],
        folder / ("logs" if hurt is None else "logs_hurt"),
        num_processes=num_processes,
        # The unhurt ones may end one long after the other where the machine is busy.
        variables={"JRL_HEARTBEAT_TIMEOUT_SECONDS": str(300 if hurt is None else HEARTBEAT)},
    )


@pytest.fixture(scope="module")
def whole(checkpoints, tmp_path_factory):
    """Uninterrupted runs, each made once."""
    known = {}

    def outcome(algorithm, num_processes):
        if (algorithm, num_processes) not in known:
            folder = tmp_path_factory.mktemp("whole")
            start(folder, checkpoints["gpt2"], algorithm, num_processes).succeed(timeout=600.0)
            known[algorithm, num_processes] = read_outcome(folder, num_processes)
        return known[algorithm, num_processes]

    return outcome


def wait_for_the_end(job, victim):
    """Seconds from the death of one process to the end of the last."""
    job.processes[victim].wait(timeout=600.0)
    died = time.monotonic()
    codes = job.wait(timeout=3 * HEARTBEAT)
    assert codes[victim] == -signal.SIGKILL, job.output()
    assert all(code != 0 for code in codes), job.output()
    return time.monotonic() - died


def assert_equal_bits(got, expected):
    """The same history (but for clocks), samples and parameters."""
    assert got.results[0]["history"] == expected.results[0]["history"]
    assert got.rollouts == expected.rollouts
    assert got.params.keys() == expected.params.keys()
    for name, leaf in expected.params.items():
        np.testing.assert_array_equal(got.params[name], leaf, err_msg=name)


@pytest.mark.parametrize("where", KILLS)
def test_a_job_ends_with_the_killed_process_and_resumes_bit_for_bit(where, checkpoints, whole, tmp_path):
    algorithm, num_processes, hurt = KILLS[where]
    folder, checkpoint = tmp_path / "job", checkpoints["gpt2"]
    job = start(folder, checkpoint, algorithm, num_processes, hurt | {"signal": signal.SIGKILL})
    seconds = wait_for_the_end(job, hurt["process"])
    print(f"the last process ended {seconds:.1f} s after the killed one")
    assert seconds < HEARTBEAT + 5, job.output()
    for process in set(range(num_processes)) - {hurt["process"]}:
        # One that computes with the dead is told by an error; one that idles is ended by the runtime, in its words.
        said = job.output(process)
        assert "lost another process of the job" in said or "another task died" in said, said
    words = "".join(job.output().split())  # the console breaks lines
    assert f"resume_from_checkpoint:{folder / 'run'}" in words
    shutil.copytree(folder / "run", tmp_path / "alone" / "run")
    start(folder, checkpoint, algorithm, num_processes).succeed(timeout=600.0)
    assert_equal_bits(read_outcome(folder, num_processes), whole(algorithm, num_processes))
    if where in ("rollout", "update"):
        resumed = start(tmp_path / "alone", checkpoint, algorithm, 1)
        resumed.succeed(timeout=600.0)
        assert "exact in state, not in bits" in resumed.output()
        assert_same_run(read_outcome(tmp_path / "alone", 1), whole(algorithm, num_processes))


def test_a_signal_to_one_process_stops_all_at_one_step(checkpoints, whole, tmp_path):
    folder, checkpoint = tmp_path / "job", checkpoints["gpt2"]
    hurt = {"process": 1, "moment": "update", "step": 4, "signal": signal.SIGTERM}
    start(folder, checkpoint, "sft", 2, hurt).succeed(timeout=600.0)
    histories = [result["history"] for result in read_outcome(folder, 2).results]
    last = [history[-1]["step"] for history in histories]
    assert last[0] == last[1] and 4 <= last[0] < STEPS["sft"]
    assert (folder / "run" / f"checkpoint_{last[0]}" / "manifest.json").exists()
    start(folder, checkpoint, "sft", 2).succeed(timeout=600.0)
    assert_equal_bits(read_outcome(folder, 2), whole("sft", 2))


def test_a_damaged_checkpoint_is_passed_over_by_all(checkpoints, whole, tmp_path):
    folder, checkpoint = tmp_path / "job", checkpoints["gpt2"]
    # The one before is whole then: a save waits for it.
    hurt = {"process": 0, "moment": "save", "step": 9, "signal": signal.SIGKILL}
    job = start(folder, checkpoint, "sft", 2, hurt)
    wait_for_the_end(job, 0)
    files = [path for path in (folder / "run" / "checkpoint_6" / "state").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    resumed = start(folder, checkpoint, "sft", 2)
    resumed.succeed(timeout=600.0)
    assert "Falling back to" in resumed.output(0) and "checkpoint_3" in resumed.output(0)
    assert "Not a whole checkpoint" in resumed.output(0) and "Not a whole checkpoint" not in resumed.output(1)
    assert_equal_bits(read_outcome(folder, 2), whole("sft", 2))


@pytest.mark.parametrize("interval", [3, 1000])
def test_all_end_alike_where_another_run_took_their_folder(interval, checkpoints, tmp_path):
    """Noticed at the next checkpoint, or told with the figures of an iteration where none is due."""
    folder, checkpoint = tmp_path / "job", checkpoints["gpt2"]
    hurt = {"process": 0, "moment": "update", "step": 4, "signal": None}
    job = start(folder, checkpoint, "sft", 2, hurt, checkpoint_interval=interval)
    assert job.wait(timeout=300.0) == [1, 1], job.output()
    [displaced] = folder.glob("run_displaced_*")
    for process in (0, 1):
        said = job.output(process)
        assert "PeerError: Process 0 of 2 failed: InUseError: Another run is working in" in said, said
        assert str(displaced) in said and "lost another process" not in said, said
    [saved] = displaced.glob("checkpoint_*")
    assert 4 < int(saved.name.removeprefix("checkpoint_")) < STEPS["sft"]
    assert read_manifest(saved)["step"] == int(saved.name.removeprefix("checkpoint_"))
    assert not [path for path in (folder / "run").glob("checkpoint_*") if path.name != "checkpoint_3"]
    steps = [json.loads(line)["step"] for line in (displaced / "metrics.jsonl").read_text().splitlines()]
    assert steps[:5] == [0, 1, 2, 3, 4]
