# SPDX-License-Identifier: Apache-2.0
"""Scoring: log-probabilities under policy and reference, and values, of whole rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Work, full_rows
from jrl.compilation import COMPILER_OPTIONS
from jrl.models.policy import init_reference
from jrl.rollout.score import make_score


def score(subject: Subject, shapes: Shapes) -> Work:
    """Benchmark of scoring: a pass over all rows."""
    params, frozen = subject.load()
    reference = init_reference(params)
    program = jax.jit(
        make_score(subject.policy, logprob_chunk_bytes=shapes.logprob_chunk_bytes),
        compiler_options=COMPILER_OPTIONS,
    )
    rows, temperature = full_rows(subject, shapes, seed=1), jnp.float32(1)
    return Work(
        call=lambda: program(params, frozen, reference, rows, temperature),
        tokens=shapes.rows * shapes.length,
        samples=shapes.rows,
        phases=Counts(subject).score(shapes),
    )
