# SPDX-License-Identifier: Apache-2.0
"""Guards between a gradient and the parameters: clipping by norm, and skipping of steps that are not finite.

Both select where optax branches or divides, so that the compiler joins clipping, moments and parameters to as few
passes over memory as there are arrays to write.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")


def skip_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with a step that would not be finite left out and counted, however many come in a row.

    Does what `optax.apply_if_finite` does, whose state it has, but selects where that one branches: a branch keeps the
    compiler from joining the passes over parameters and moments to one, and on an accelerator the host may wait for it.
    A gradient counts as finite where its norm is.
    """

    def init(params: optax.Params) -> optax.ApplyIfFiniteState:
        counts = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two arrays: both are donated
        return optax.ApplyIfFiniteState(counts[0], jnp.array(True), counts[1], optimizer.init(params))

    def update(
        updates: optax.Updates, state: optax.ApplyIfFiniteState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ApplyIfFiniteState]:
        finite = jnp.isfinite(optax.tree.norm(updates))
        changes, inner = optimizer.update(updates, state.inner_state, params)
        skipped = (~finite).astype(jnp.int32)
        return (
            # Adding -0 changes no bit, where 0 takes the sign off a -0. Nor is it the array that sums of gradients
            # begin with: XLA for GPUs makes equal arrays once, and kept zeros of the size of all parameters until here.
            jax.tree.map(lambda u: jnp.where(finite, u, -jnp.zeros_like(u)), changes),
            optax.ApplyIfFiniteState(
                notfinite_count=skipped * (state.notfinite_count + 1),
                last_finite=finite,
                total_notfinite=state.total_notfinite + skipped,
                inner_state=select_tree(finite, inner, state.inner_state),
            ),
        )

    return optax.GradientTransformation(init, update)


def select_tree(chosen: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """`new` where a flag is set, else `old`, leaf by leaf."""
    selected: Tree = jax.tree.map(lambda x, y: jnp.where(chosen, x, y), new, old)
    return selected


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """optax's transformation of this name with one factor for all: dividing every entry costs a pass of its own."""

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
