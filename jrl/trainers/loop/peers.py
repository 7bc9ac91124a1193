# SPDX-License-Identifier: Apache-2.0
"""Common stops of a job's processes: asked to, by a failure that all of them had, or because one is gone."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.distributed import PeerError, gather, meet
from jrl.mesh import replicated
from jrl.trainers.checkpoints.resume import checkpoints_in

_AGREEMENT_SECONDS = 10
"""How long a process that fails looks whether the others fail as well."""
# What the runtimes say when another process is gone, all in lower case.
_LOST = (
    "gloo",
    "nccl",
    "connection reset",
    "connection closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "heartbeat",
    "coordination service",
    "another task died",
    "barrier",
)


def check_same(
    config: Mapping[str, Mapping[str, Any]], data_sha256: Mapping[str, str], num_steps: int
) -> None:
    """Refuses processes that would not do the same; all call it, and one alone is not asked.

    Args:
      config: Section → field → value.
      data_sha256: Fingerprints of the data, as `Trainer.data_sha256` gives them.
      num_steps: Optimizer steps that the run is to make at most.
    Raises:
      PeerError: In all processes, naming what differs.
    """
    if jax.process_count() == 1:
        return
    own = {"number of optimizer steps": str(num_steps)}
    own |= {f"data of `{name}`": digest for name, digest in data_sha256.items()}
    for section, fields in config.items():
        # Of what is not plain the kind must do: its `repr` may hold an address.
        own |= {
            f"`{section}.{name}`": json.dumps(value, sort_keys=True, default=lambda x: type(x).__qualname__)
            for name, value in fields.items()
        }
    first, *others = (word.plain for word in gather(own))
    names = sorted(first.keys() | {name for other in others for name in other})
    differing = [name for name in names if any(other.get(name) != first.get(name) for other in others)]
    if differing:
        raise PeerError(
            f"The {1 + len(others)} processes of the job must hold the same data, in the same order, and the same "
            f"configuration; these differ: {', '.join(differing)}. Data taken from a set or from a folder's listing "
            "has another order in each process, and no process may read a part of the data alone: jrl shares out rows "
            "itself."
        )


def start_vote(mesh: Mesh, asked: bool) -> jax.Array:
    """Starts a vote on stopping; its result, above 0 if any process asks, is computed on the devices behind their work.

    Args:
      mesh: Over the devices of all processes, which all call this.
      asked: Whether this one does.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    flags = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.full(1, asked, np.int32))
    found: jax.Array = _counting(mesh)(flags)
    return found


@functools.cache
def _counting(mesh: Mesh) -> Any:
    return jax.jit(jnp.sum, out_shardings=replicated(mesh))


def fail_together(error: BaseException, meeting: str) -> bool:
    """True where all processes fail alike at this moment, so that what needs them all can still be done.

    Args:
      error: This one's.
      meeting: A name that is the same where they are at the same step.
    """
    if jax.process_count() == 1:
        return True
    if peer_is_lost(error):
        return False
    try:
        meet(f"{meeting}_{type(error).__name__}", seconds=_AGREEMENT_SECONDS)
    except Exception:  # too late, or gone: the runtime has several words for it
        return False
    return True


def peer_is_lost(error: BaseException) -> bool:
    """True where an error of this process is the runtime's word that another is gone."""
    if not isinstance(error, jax.errors.JaxRuntimeError) and type(error) is not ValueError:
        return False
    code, _, text = str(error).partition(": ")
    return code.isupper() and any(word in text.lower() for word in _LOST)


def say_end(error: BaseException, run_dir: Path) -> None:
    """Says on stderr why this process of several ends, and how the run goes on."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    why = "lost another process of the job" if peer_is_lost(error) else "failed, and so the job ends"
    found = checkpoints_in(run_dir)
    where = (
        f"from its last checkpoint, {found[max(found)]},"
        if found
        else "from its start (it has no checkpoint)"
    )
    text = (
        f"Process {jax.process_index()} of {jax.process_count()} {why} ({reason}). The run goes on {where} when it is "
        f"started again with `train.resume_from_checkpoint: {run_dir}`, also with fewer processes.\n"
    )
    os.write(2, text.encode())
