# SPDX-License-Identifier: Apache-2.0
"""What `docs/launch.md` says of schedulers, as far as one machine can show it: their variables make two processes one.

JAX reads the variables; here no scheduler sets them. The port is made of the job's number, as JAX makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from jrl.distributed import HEARTBEAT_TIMEOUT_SECONDS
from tests.processes.conftest import STEPS, assert_same_run, read_outcome, specify
from tests.processes.job import Job

WORKER = Path(__file__).with_name("worker.py")
PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
PORTS = 2**12
"""JAX takes a port among the last so many, counted by the job's number."""


def job_number() -> int:
    """A number of a job whose port nobody listens on."""
    for job in range(os.getpid() % PORTS, PORTS):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", 2**16 - PORTS + job))
            return job
    raise AssertionError("every port is taken")


def slurm(job: int) -> Callable[[int], Mapping[str, str]]:
    """Variables of `srun` with two tasks on one node."""
    return lambda process: {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def open_mpi(job: int) -> Callable[[int], Mapping[str, str]]:
    """Variables of Open MPI 4's `mpirun -np 2` on one host."""
    return lambda process: {
        "OMPI_MCA_orte_hnp_uri": f"{job * 2**12}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [slurm, open_mpi])
def test_two_processes_of_a_scheduler_are_as_one(scheduler, run, checkpoints, tmp_path):
    file = specify(tmp_path, checkpoints["gpt2"], "sft", "vowels", {"train": {"total_steps": STEPS["sft"]}})
    Job([WORKER, file], tmp_path / "logs", num_processes=2, scheduler=scheduler(job_number())).succeed()
    assert_same_run(read_outcome(tmp_path, 2), run("sft", 1, 2))


def test_the_page_names_what_jrl_reads():
    source = (Path(__file__).parents[2] / "jrl" / "distributed.py").read_text(encoding="utf-8")
    flags = (Path(__file__).parents[2] / "jrl" / "cli" / "multihost.py").read_text(encoding="utf-8")
    assert set(re.findall(r"JRL_[A-Z_]+", PAGE)) == set(re.findall(r"JRL_[A-Z_]+", source))
    table = PAGE.partition("## Flags and variables")[2]
    for flag in re.findall(r"^\| `--([\w-]+)`", table, re.MULTILINE):
        assert f'"{flag}"' in flags or f'"--{flag}"' in flags, flag
    assert f"default {HEARTBEAT_TIMEOUT_SECONDS} |" in table
