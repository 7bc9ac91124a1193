# SPDX-License-Identifier: Apache-2.0
"""Memory of devices: what JAX lets programs have of it, and what to do where that does not suffice.

By itself JAX takes three quarters of a GPU's memory for programs, and no program gets more, whether or not it is taken
at the start. (docs.jax.dev, "GPU memory allocation", which says of a coming JAX that it lets it grow.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax

GPU_SHARE = 0.75
"""Part of a GPU's memory that JAX lets programs have unless it is told otherwise."""
GPU_MOST = 0.95
"""Part that it may be told: CUDA's context, its libraries and NCCL keep the rest."""
_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_SMALLER = (
    "The device has too little memory for this run. A smaller microbatch (`train.minibatch_size`) makes updates "
    "smaller, fewer rows a call (`method.chunk_size`) make sampling smaller; docs/hardware.md lists more, and "
    "`jrl plan` says what a recipe takes."
)
GPU_ADVICE = (
    f"by itself JAX takes {GPU_SHARE:.0%} of a GPU's memory; {_VARIABLE}={GPU_MOST} lets it take more"
)


def usable_bytes() -> int | None:
    """Bytes that programs may have on the first device; None: it is no accelerator, or does not say."""
    with suppress(RuntimeError):
        found = jax.local_devices()[0].memory_stats()
        return None if found is None else found.get("bytes_limit")
    return None


def gpu_advice() -> str | None:
    """Says how programs get more of this process's GPU; None: it has none, or the user has said how much they get."""
    is_told = any(os.environ.get(name) for name in (_VARIABLE, _OLD_VARIABLE))
    has_share = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    if is_told or not has_share:
        return None
    with suppress(RuntimeError):
        return GPU_ADVICE if jax.default_backend() == "gpu" else None
    return None


def is_worth_more(total: int, memory_bytes: int) -> bool:
    """True where programs of so many bytes in all fit a GPU that gives them more than it does by itself."""
    return GPU_SHARE * memory_bytes < total <= GPU_MOST * memory_bytes


def note_if_out_of_memory(error: BaseException) -> None:
    """Adds to an error, once, what helps where a device had too little memory; that may be what caused the error."""
    cause: BaseException | None = error
    while cause is not None and not _is_out_of_memory(cause):
        cause = cause.__cause__
    if cause is None or _SMALLER in getattr(error, "__notes__", ()):
        return
    error.add_note(_SMALLER)
    if found := gpu_advice():
        error.add_note(f"{found[0].upper()}{found[1:]}.")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def noting_out_of_memory() -> Iterator[None]:
    """Inside, errors of a device that has too little memory get a note of what helps."""
    try:
        yield
    except Exception as error:
        note_if_out_of_memory(error)
        raise
