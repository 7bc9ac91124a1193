# SPDX-License-Identifier: Apache-2.0
"""Benchmark of supervised fine-tuning: an optimizer step."""

from __future__ import annotations

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Stepper, Work, full_rows
from jrl.forward import Reader
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state


def sft_step(subject: Subject, shapes: Shapes) -> Work:
    """A step on `shapes.rows` rows whose completions are learned, with Adam and clipped gradients."""
    params, frozen = subject.load()
    params = {name: value for name, value in params.items() if name != "v_head"}
    optimizer = make_optimizer("adamw", {"lr": 1e-6}, make_schedule("constant", {}), max_grad_norm=1.0)
    program = make_sft_update(
        Reader(subject.policy, chunk_bytes=shapes.logprob_chunk_bytes),
        optimizer,
        batch_size=shapes.rows,
        minibatch_size=shapes.step_minibatch_size,
    )
    return Work(
        call=Stepper(
            program, init_train_state(params, optimizer), frozen, full_rows(subject, shapes, seed=1)
        ),
        tokens=shapes.rows * shapes.length,
        samples=shapes.rows,
        phases=Counts(subject).step(shapes, rows_per_item=1),
    )
