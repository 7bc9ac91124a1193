# SPDX-License-Identifier: Apache-2.0
"""Sampling: prompts in, completions out, no row ends early."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Work
from jrl.compilation import COMPILER_OPTIONS
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs


def decode(subject: Subject, shapes: Shapes) -> Work:
    """Benchmark of sampling: a call of the compiled sampler."""
    params, frozen = subject.load()
    generate = jax.jit(
        make_generate(subject.policy, max_new_tokens=shapes.response, eos_token_ids=(), pad_token_id=0),
        compiler_options=COMPILER_OPTIONS,
    )
    tokens = subject.tokens(shapes.rows, shapes.prompt, seed=1)
    prompts = ModelInputs(tokens, jnp.ones(tokens.shape, bool))
    knobs = SamplingKnobs(jnp.float32(1))
    row_ids, key = jnp.arange(shapes.rows), jax.random.key(2)
    return Work(
        call=lambda: generate(params, frozen, prompts, row_ids, knobs, key),
        tokens=shapes.rows * shapes.response,
        samples=shapes.rows,
        phases=Counts(subject).decode(shapes),
    )
