# SPDX-License-Identifier: Apache-2.0
"""Order of a DDPO update: the sample and the denoising step that each microbatch takes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jrl.learners.accumulate import Rows, layout_rows
from jrl.learners.ddpo_config import DDPOConfig
from jrl.typing import PRNGKey


class Order(NamedTuple):
    """The passes over the samples of an epoch.

    Attributes:
      samples: Numbers of all samples, in the order of each pass.
      steps: By pass and sample, the numbers of the steps that it trains on, in order.
    """

    samples: Int[Array, "E N"]
    steps: Int[Array, "E N S"]


def shuffled_order(key: PRNGKey, num_samples: int, config: DDPOConfig) -> Order:
    """Samples in an order of their own in each pass, and for each sample its own steps in an order of their own.

    The steps of a sample follow from the key, the pass and the sample's number. Where fewer than all are trained, they
    are the first of a permutation: random ones, other ones for each sample and pass.
    """
    candidates = jnp.asarray(config.trained_steps, jnp.int32)

    def one_pass(pass_key: PRNGKey) -> Order:
        samples_key, steps_key = jax.random.split(pass_key)
        step_keys = jax.vmap(lambda sample: jax.random.fold_in(steps_key, sample))(jnp.arange(num_samples))
        draws = jax.vmap(lambda key: jax.random.uniform(key, candidates.shape))(step_keys)
        chosen = jnp.argsort(draws, axis=1)[:, : config.num_trained_steps]
        samples = jnp.argsort(jax.random.uniform(samples_key, (num_samples,)))
        return Order(samples.astype(jnp.int32), candidates[chosen])

    return jax.vmap(one_pass)(jax.random.split(key, config.train_num_inner_epochs))


def microbatches(order: Order, *, num_steps: int, batch_size: int, minibatch_size: int) -> Rows:
    """All microbatches of an update: (optimizer steps, microbatches of each, rows of one).

    A row is one denoising step of one sample; its id is sample · T + step. A microbatch takes one column of the
    shuffled steps of its samples, so it mixes timesteps; the columns of the same samples follow one another.

    Args:
      order: Of all passes.
      num_steps: T of the trajectories.
      batch_size: Samples of an optimizer step. What a pass has left over is a step of its own, padded.
      minibatch_size: Samples of a microbatch; must divide `batch_size`.
    """

    def one_pass(samples: Int[Array, "N"], steps: Int[Array, "N S"]) -> Rows:
        layout = layout_rows(samples, batch_size=batch_size, minibatch_size=minibatch_size)
        updates, groups, rows = layout.ids.shape
        columns = steps.shape[1]
        ids = (layout.ids[..., None] * num_steps + steps[layout.ids]).swapaxes(2, 3)
        valid = jnp.broadcast_to(layout.valid[:, :, None, :], ids.shape)
        shape = (updates, groups * columns, rows)
        return Rows(ids.reshape(shape), valid.reshape(shape))

    by_pass = jax.vmap(one_pass)(order.samples, order.steps)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), by_pass)
