# SPDX-License-Identifier: Apache-2.0
"""Several processes as one job on this machine, as a scheduler would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def environment_of(process: int, num_processes: int, num_devices: int, port: int) -> dict[str, str]:
    """What a process of a job finds in its environment; a single one finds no job."""
    found = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} "
        "--xla_backend_optimization_level=0",
    }
    found.pop("JRL_DISTRIBUTED", None)
    if num_processes == 1:
        return found
    return found | {
        "JRL_DISTRIBUTED": "1",
        "JRL_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JRL_NUM_PROCESSES": str(num_processes),
        "JRL_PROCESS_ID": str(process),
    }


class Job:
    """Running processes; what each prints goes into a file of its own.

    Args:
      program: What stands behind `python` on the command line, the same for all.
      folder: Of the logs.
      num_processes: How many.
      num_devices: Virtual devices of each.
      variables: Further environment.
      by_flags: Whether the program is told of the job by flags of jrl's command line, and not by the environment.
      scheduler: Variables that a scheduler sets for a process of this number, in the place of jrl's own but for
        `JRL_DISTRIBUTED`.
    """

    def __init__(
        self,
        program: Sequence[object],
        folder: Path,
        *,
        num_processes: int,
        num_devices: int = 1,
        variables: Mapping[str, str] | None = None,
        by_flags: bool = False,
        scheduler: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"process_{process}.log" for process in range(num_processes)]
        port = free_port()
        self.processes = []
        for process, log in enumerate(self.logs):
            told = num_processes if not by_flags and scheduler is None else 1
            environment = environment_of(process, told, num_devices, port) | dict(variables or {})
            if scheduler is not None:
                environment |= {"JRL_DISTRIBUTED": "1", **scheduler(process)}
            flags = ["--coordinator-address", f"127.0.0.1:{port}", "--num-processes", num_processes]
            flags = [*flags, "--process-id", process] if by_flags else []
            with log.open("w", encoding="utf-8") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, program), *map(str, flags)],
                        cwd=folder,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self, *, timeout: float = 300.0) -> list[int]:
        """Exit codes of all processes; those that still run at the end of the time are killed, and it is an error."""
        ends = time.monotonic() + timeout
        try:
            return [process.wait(timeout=max(ends - time.monotonic(), 0.1)) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the job ran longer than {timeout:g} s\n{self.output()}") from error
        finally:
            self.end()

    def succeed(self, *, timeout: float = 300.0) -> None:
        """Waits until all processes have ended well."""
        codes = self.wait(timeout=timeout)
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.output()}"

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def output(self, process: int | None = None) -> str:
        """What was printed, by one process or by all."""
        chosen = self.logs if process is None else [self.logs[process]]
        return "\n".join(f"== {log.name}\n{log.read_text(encoding='utf-8')[-6000:]}" for log in chosen)
