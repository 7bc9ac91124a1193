# SPDX-License-Identifier: Apache-2.0
"""What trlX's scripts ask accelerate: who this process is."""

from __future__ import annotations

from typing import Any

import jax


class Accelerator:
    """The part of accelerate's object that scripts touch: who this process is."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process."""
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
    def device(self) -> jax.Device:
        """The first local device; arrays go to the mesh by themselves."""
        return jax.local_devices()[0]

    def wait_for_everyone(self) -> None:
        """Returns: processes meet in the compiled programs."""

    def unwrap_model(self, model: Any) -> Any:
        """The model as it is: nothing wraps it."""
        return model

    def print(self, *objects: Any) -> None:
        """Prints on the first process."""
        if self.is_main_process:
            print(*objects)
