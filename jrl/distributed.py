# SPDX-License-Identifier: Apache-2.0
"""Many processes as one run: how they find each other, and the few things that they tell each other on the host.

Every process runs the same program on the same arguments. What is on the devices is one array over all of them; the
compiler puts the collectives. What is on the host is equal everywhere unless a function here says whose it is. There
is no scheduler in jrl: SLURM, Kubernetes, Open MPI or the TPU runtime start the processes, and `jax.distributed` joins
them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_TIMEOUT_SECONDS = 60
_TEXT = "text"


class Word(NamedTuple):
    """What one process told the others.

    Attributes:
      plain: Anything that JSON holds.
      arrays: NumPy arrays by name.
    """

    plain: Any
    arrays: dict[str, np.ndarray]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: list[int] | None = None,
    heartbeat_timeout_seconds: int = HEARTBEAT_TIMEOUT_SECONDS,
) -> None:
    """Joins this process to its job; before anything of JAX is computed. A second call does nothing.

    Under SLURM, Open MPI, Kubernetes and on TPU pods the arguments are read from what the scheduler left in the
    environment; elsewhere the first three are given.

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes: Processes of the job.
      process_id: Of this one, 0 to `num_processes` − 1.
      local_device_ids: Accelerators of this host that this process takes; None: all, or what the scheduler says.
      heartbeat_timeout_seconds: When a process that no longer answers ends the job.
    Raises:
      RuntimeError: If JAX has computed something already.
      ValueError: If the environment does not say what the arguments leave out.
    """
    if jax.distributed.is_initialized():
        return
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )


def is_main() -> bool:
    """Whether this is the process that writes what is written once: logs, model files, manifests."""
    return jax.process_index() == 0


def gather(plain: Any = None, arrays: Mapping[str, np.ndarray] | None = None) -> list[Word]:
    """What every process says, in the order of the processes. All must call it, and wait here for each other.

    Args:
      plain: Anything that JSON holds; NaN and infinities are kept.
      arrays: NumPy arrays of any shapes, which may differ between processes.
    """
    if jax.process_count() == 1:
        return [Word(plain, dict(arrays or {}))]
    own = _encode(plain, arrays or {})
    sizes = multihost_utils.process_allgather(np.asarray([own.size], np.int32)).ravel()
    padded = np.pad(own, (0, int(sizes.max()) - own.size))
    rows = multihost_utils.process_allgather(padded)
    return [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def from_main(plain: Any) -> Any:
    """What process 0 says; what the others pass is not read. All must call it."""
    return gather(plain if is_main() else None)[0].plain


def _encode(plain: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    file = io.BytesIO()
    text: Any = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    np.savez(file, allow_pickle=False, **{_TEXT: text}, **{f"array_{name}": x for name, x in arrays.items()})
    return np.frombuffer(file.getvalue(), np.uint8)


def _decode(row: np.ndarray) -> Word:
    with np.load(io.BytesIO(row.tobytes()), allow_pickle=False) as found:
        plain = json.loads(found[_TEXT].tobytes())
        arrays = {name.removeprefix("array_"): found[name] for name in found.files if name != _TEXT}
    return Word(plain, arrays)
