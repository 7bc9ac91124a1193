# SPDX-License-Identifier: Apache-2.0
"""Rows before the forward pass: the trunk that all epochs share, rows that are mere padding, both halves of pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jrl.learners.accumulate import take_rows
from jrl.mesh import constrain_rows, constrain_rows_alone, hold_split
from jrl.ops.checks import check_same_shape
from jrl.typing import Frozen, ILQLBatch, ModelInputs, PolicyFns, Sequences, Trunk

Tree = TypeVar("Tree")
Masked = TypeVar("Masked", Sequences, ILQLBatch)


def trunk_of_rows(policy: PolicyFns, frozen: Frozen, inputs: ModelInputs, *, minibatch_size: int) -> Trunk:
    """The frozen trunk's output for all rows, computed a microbatch at a time.

    It does not change while only the trainable parameters do, so one pass serves all epochs of an update.

    Returns:
      What `policy.trunk` returns, with the rows of `inputs`; None where nothing below is frozen.
    """
    return map_rows(
        lambda ids: policy.trunk(hold_split(frozen, ids), take_rows(inputs, ids)),
        inputs.tokens.shape[0],
        minibatch_size=minibatch_size,
    )


def map_rows(compute: Callable[[Int[Array, "R"]], Tree], num_rows: int, *, minibatch_size: int) -> Tree:
    """`compute` of all rows of a batch, given the numbers of at most `minibatch_size` of them at a time.

    Returns:
      What `compute` returns, a tree of arrays with a leading row axis, with `num_rows` rows.
    """
    rows = min(minibatch_size, num_rows)
    count = -(-num_rows // rows)
    # Each microbatch takes every `count`-th row, so it has some of every device, and its results stay where its rows
    # are. Rows in sequence would have to be gathered on every device before they could be split again.
    index = jnp.minimum(jnp.arange(rows * count), num_rows - 1).reshape(rows, count).T
    found = jax.lax.map(compute, index)

    def whole(x: Array) -> Array:
        return constrain_rows_alone(x.swapaxes(0, 1).reshape(rows * count, *x.shape[2:])[:num_rows])

    flat: Tree = jax.tree.map(whole, found)
    return flat


def mask_rows(sequences: Masked, valid: jax.Array) -> Masked:
    """Rows that are mere padding lose their actions, and with them all weight."""
    return sequences._replace(mask=sequences.mask & valid[:, None])


def interleave(chosen: Tree, rejected: Tree) -> Tree:
    """Interleaves the halves of each pair as rows 2i and 2i + 1 of every array, so that one forward pass reads them.

    A pair stays on the device that holds it: stacking all chosen rows on all rejected ones would move half of them.

    Raises:
      ValueError: If two arrays differ in shape.
    """

    def both(x: jax.Array, y: jax.Array) -> jax.Array:
        check_same_shape("rejected", y, "chosen", x)
        return constrain_rows(jnp.stack([x, y], axis=1).reshape(2 * x.shape[0], *x.shape[1:]))

    joined: Tree = jax.tree.map(both, chosen, rejected)
    return joined


def separate(tree: Any) -> tuple[Any, Any]:
    """Inverse of `interleave`: (chosen, rejected)."""
    pairs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), tree)
    return jax.tree.map(lambda x: x[:, 0], pairs), jax.tree.map(lambda x: x[:, 1], pairs)
