# SPDX-License-Identifier: Apache-2.0
"""Flags that make a command one process of a job: read and taken away before the command reads its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jrl.distributed import HEARTBEAT_TIMEOUT_SECONDS, join


def add_job_flags(command: argparse.ArgumentParser) -> None:
    """The flags, in a group of their own; each in the spelling of either kind of configuration."""
    group = command.add_argument_group(
        "several processes", "The same command is started in each; they share one folder and one seed."
    )
    group.add_argument(
        "--distributed", action="store_true", help="join the job that SLURM, Kubernetes, ... or flags tell of"
    )
    for name, kind, metavar, text in (
        (
            "coordinator-address",
            str,
            "HOST:PORT",
            "of process 0; where no scheduler says it, with the next two",
        ),
        ("num-processes", int, "N", "of the job"),
        ("process-id", int, "K", "of this process, from 0"),
        (
            "heartbeat-timeout-seconds",
            int,
            "S",
            f"after which a lost process ends the job; default: {HEARTBEAT_TIMEOUT_SECONDS}",
        ),
    ):
        group.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, metavar=metavar, help=text)


def join_job(words: Sequence[str]) -> list[str]:
    """Joins the job that flags or the environment tell of, if they tell of one; the words without those flags.

    Each value is a flag's, else a variable's, else what the scheduler says or the default; see `jrl.distributed.join`.

    Raises:
      ValueError: If they say too little, or a number that cannot be.
      RuntimeError: If the job cannot be joined.
    """
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_job_flags(reader)
    flags, others = reader.parse_known_args(list(words))
    given = flags.coordinator_address, flags.num_processes, flags.process_id
    join(
        *given,
        heartbeat_timeout_seconds=flags.heartbeat_timeout_seconds,
        asked=flags.distributed or any(value is not None for value in given),
    )
    return others
