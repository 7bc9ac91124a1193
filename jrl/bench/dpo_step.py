# SPDX-License-Identifier: Apache-2.0
"""Benchmark of direct preference optimisation: an optimizer step."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Stepper, Work, full_rows
from jrl.forward import Reader
from jrl.learners.dpo import init_dpo_state, make_dpo_update
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.typing import PreferenceBatch


def dpo_step(subject: Subject, shapes: Shapes) -> Work:
    """A step on `shapes.rows` pairs, the reference's log-probabilities given, with Adam and clipped gradients."""
    params, frozen = subject.load()
    params = {name: value for name, value in params.items() if name != "v_head"}
    optimizer = make_optimizer("adamw", {"lr": 1e-6}, make_schedule("constant", {}), max_grad_norm=1.0)
    program = make_dpo_update(
        Reader(subject.policy, chunk_bytes=shapes.logprob_chunk_bytes),
        optimizer,
        DPOConfig(gen_kwargs={"max_new_tokens": shapes.response}),
        batch_size=shapes.rows,
        minibatch_size=shapes.step_minibatch_size,
    )
    chosen, rejected = (full_rows(subject, shapes, seed=seed) for seed in (1, 2))
    reference = jnp.full(chosen.mask.shape, -math.log(subject.lm.vocab_size), jnp.float32)
    batch = PreferenceBatch(chosen, rejected, jnp.ones((shapes.rows,), bool), reference, reference)
    return Work(
        call=Stepper(program, init_dpo_state(params, optimizer), frozen, batch),
        tokens=2 * shapes.rows * shapes.length,
        samples=shapes.rows,
        phases=Counts(subject).step(shapes, rows_per_item=2),
    )
