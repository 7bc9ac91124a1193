# SPDX-License-Identifier: Apache-2.0
"""What every recurrence of `jrl.models.mixers` must do, whatever its inputs are: a tuple of arrays (B, tokens, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.mixers.chunks import CHUNK

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
STARTS = (0, 11, CHUNK, CHUNK + 1, 2 * CHUNK - 3)
"""Where segments begin: within chunks, and at their borders and beside them."""


def part(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Tokens `start` to `stop`."""
    return type(inputs)(*(x[:, start:stop] for x in inputs))


def by_steps(step: Callable[[Any, Any], Any], inputs: Any, state: Any) -> Any:
    """What is read, and the state after it, token by token."""

    def one(state: Any, column: Any) -> Any:
        read, state = step(type(inputs)(*(x[:, None] for x in column)), state)
        return state, read[:, 0]

    after, read = jax.lax.scan(one, state, type(inputs)(*(x.swapaxes(0, 1) for x in inputs)))
    return read.swapaxes(0, 1), after


def assert_two_parts_are_the_rows(
    rows: Callable[..., Any], inputs: Any, state: Any, *, atol: float, rtol: float = 1e-7
) -> None:
    """The state goes on from a part that ends within a chunk."""
    length = inputs[0].shape[1]
    wanted, wanted_after = rows(inputs, state)
    first, middle = rows(part(inputs, 0, 37), state)
    second, after = rows(part(inputs, 37, length), middle)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), wanted, rtol=rtol, atol=atol)
    np.testing.assert_allclose(after, wanted_after, rtol=rtol, atol=atol)


def assert_segments_begin_anew(
    rows: Callable[..., Any], inputs: Any, zero: Any, *, atol: float, rtol: float = 1e-7
) -> None:
    """Each segment of packed rows is read as a row of its own, and the last one leaves its state."""
    rows_count, length = inputs[0].shape[:2]
    segments = jnp.sum(jnp.arange(length)[None] >= jnp.asarray(STARTS)[:, None], axis=0)
    read, state = rows(inputs, zero, jnp.broadcast_to(segments, (rows_count, length)))
    for start, stop in zip(STARTS, [*STARTS[1:], length], strict=True):
        wanted, last = rows(part(inputs, start, stop), zero)
        np.testing.assert_allclose(read[:, start:stop], wanted, rtol=rtol, atol=atol)
    np.testing.assert_allclose(state, last, rtol=rtol, atol=atol)
