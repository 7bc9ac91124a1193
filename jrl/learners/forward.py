# SPDX-License-Identifier: Apache-2.0
"""Rows before the forward pass: the trunk that all epochs share, and rows that are mere padding."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from jrl.learners.accumulate import take_rows
from jrl.typing import Frozen, ILQLBatch, ModelInputs, PolicyFns, Sequences, Trunk

Masked = TypeVar("Masked", Sequences, ILQLBatch)


def trunk_of_rows(policy: PolicyFns, frozen: Frozen, inputs: ModelInputs, *, minibatch_size: int) -> Trunk:
    """The frozen trunk's output for all rows, computed a microbatch at a time.

    It does not change while only the trainable parameters do, so one pass serves all epochs of an update.

    Returns:
      What `policy.trunk` returns, with the rows of `inputs`; None where nothing below is frozen.
    """
    num_rows = inputs.tokens.shape[0]
    rows = min(minibatch_size, num_rows)
    count = -(-num_rows // rows)
    index = jnp.minimum(jnp.arange(count * rows), num_rows - 1).reshape(count, rows)
    trunk = jax.lax.map(lambda taken: policy.trunk(frozen, take_rows(inputs, taken)), index)
    return jax.tree.map(lambda x: x.reshape(count * rows, *x.shape[2:])[:num_rows], trunk)


def mask_rows(sequences: Masked, valid: jax.Array) -> Masked:
    """Rows that are mere padding lose their actions, and with them all weight."""
    return sequences._replace(mask=sequences.mask & valid[:, None])
