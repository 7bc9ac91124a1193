# SPDX-License-Identifier: Apache-2.0
"""PPO's update: all epochs and minibatches of one iteration in one compiled call."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Stepper, Work, full_rows
from jrl.forward import Reader
from jrl.learners.online import init_online_state, make_online_update
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.ppo import PPOConfig, ppo_recipe
from jrl.typing import Rollouts, Scored


def update(subject: Subject, shapes: Shapes) -> Work:
    """Benchmark of PPO's update on random rollouts, with Adam and clipped gradients."""
    params, frozen = subject.load()
    config = PPOConfig(
        num_rollouts=shapes.rows,
        chunk_size=shapes.rows,
        ppo_epochs=shapes.epochs,
        gen_kwargs={"max_new_tokens": shapes.response},
    )
    optimizer = make_optimizer("adamw", {"lr": 1e-6}, make_schedule("constant", {}), max_grad_norm=1.0)
    recipe = ppo_recipe(config)
    program = make_online_update(
        Reader(subject.policy, chunk_bytes=shapes.logprob_chunk_bytes),
        optimizer,
        recipe,
        batch_size=shapes.batch_size,
        minibatch_size=shapes.minibatch_size,
    )
    rows = full_rows(subject, shapes, seed=1)
    # About what a fresh model gives to every token, so that ratios are near 1 as in training.
    logprobs = jnp.full(rows.mask.shape, -math.log(subject.lm.vocab_size), jnp.float32)
    scored = Scored(logprobs, logprobs, jnp.zeros_like(logprobs))
    scores = jnp.zeros_like(logprobs).at[:, -1].set(jnp.arange(shapes.rows) / shapes.rows)
    rollouts = Rollouts(rows, scored, scores)
    return Work(
        call=Stepper(program, init_online_state(params, optimizer, recipe), frozen, rollouts),
        tokens=shapes.epochs * shapes.rows * shapes.length,
        samples=shapes.rows,
        phases=Counts(subject).update(shapes),
    )
