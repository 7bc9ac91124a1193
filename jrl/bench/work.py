# SPDX-License-Identifier: Apache-2.0
"""A benchmark as a value: what is called again and again, and what it needs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jrl.bench.counts import Phase
from jrl.bench.models import Shapes, Subject
from jrl.compilation import COMPILER_OPTIONS
from jrl.typing import ModelInputs, Sequences


@dataclass(frozen=True)
class Work:
    """A benchmark, ready to run.

    Attributes:
      call: Does it once and returns arrays that are still being computed.
      tokens: What `tokens_per_second` counts: sampled ones of sampling, read ones of all else.
      samples: Rows (pairs of DPO) of a call.
      phases: What it needs at least.
      parts: Seconds of its parts by name, one entry a call; empty where it has none.
    """

    call: Callable[[], Any]
    tokens: int
    samples: int
    phases: tuple[Phase, ...]
    parts: dict[str, list[float]] = field(default_factory=dict)


def full_rows(subject: Subject, shapes: Shapes, *, seed: int) -> Sequences:
    """Random rows without padding: `shapes.rows` of a prompt and a whole completion."""
    tokens = subject.tokens(shapes.rows, shapes.length, seed=seed)
    return Sequences(
        inputs=ModelInputs(tokens, jnp.ones(tokens.shape, bool)),
        starts=jnp.full((shapes.rows,), shapes.prompt - 1, jnp.int32),
        mask=jnp.ones((shapes.rows, shapes.response), bool),
    )


class Stepper:
    """An update whose state is donated to the next call.

    Args:
      update: `(state, frozen, batch, key) -> (state, metrics)`; compiled here.
      state: Before the first step.
      frozen: What does not train.
      batch: The same for every step.
    """

    def __init__(self, update: Any, state: Any, frozen: Any, batch: Any) -> None:
        self._update = jax.jit(update, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
        self._state, self._frozen, self._batch = state, frozen, batch

    def __call__(self) -> Any:
        """Takes a step; the state counts as a result, so that whoever waits waits for all of it."""
        self._state, metrics = self._update(self._state, self._frozen, self._batch, jax.random.key(0))
        return self._state, metrics
