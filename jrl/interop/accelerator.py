# SPDX-License-Identifier: Apache-2.0
"""Stand-in for accelerate's `Accelerator`, of which scripts ask which process they are."""

from __future__ import annotations

import sys
from typing import Any

import jax


class Accelerator:
    """The part of accelerate's object that scripts touch: who this process is."""

    @property
    def is_main_process(self) -> bool:
        """True in the first process."""
        return jax.process_index() == 0

    is_local_main_process = is_main_process

    @property
    def process_index(self) -> int:
        """Number of this process."""
        return jax.process_index()

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return jax.process_count()

    @property
    def device(self) -> Any:
        """Device for a script's tensors: torch's CPU where torch is loaded, else the first local device of JAX.

        Arrays go to the mesh by themselves.
        """
        torch = sys.modules.get("torch")
        return jax.local_devices()[0] if torch is None else torch.device("cpu")

    def wait_for_everyone(self) -> None:
        """Returns: processes meet in the compiled programs."""

    def unwrap_model(self, model: Any) -> Any:
        """The model as it is: nothing wraps it."""
        return model

    def prepare(self, *objects: Any) -> Any:
        """Returns the objects unchanged."""
        return objects[0] if len(objects) == 1 else objects

    def gather(self, x: Any) -> Any:
        """The rows of all processes: one process alone has them all.

        Raises:
          RuntimeError: In a job of several processes, whose rows this does not fetch.
        """
        if self.num_processes > 1:
            raise RuntimeError(
                "`gather` must be called in one process, got several: steps' figures are global already."
            )
        return x

    gather_for_metrics = gather

    def print(self, *objects: Any) -> None:
        """Prints on the first process."""
        if self.is_main_process:
            print(*objects)
