# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling: keeps the gradients of a float16 network out of that format's smallest numbers.

The factor acts on cotangents alone: losses, metrics and the gradients that come out are those of the unscaled loss, so
nothing else needs to know of it. An overflow shows as a gradient that is not finite, which every optimizer step skips.

Reference: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Tree = TypeVar("Tree")

SMALLEST = 1.0
LARGEST = 2.0**24


@struct.dataclass
class LossScale:
    """State of the scaling.

    Attributes:
      factor: By which cotangents are multiplied inside the network.
      good_steps: Optimizer steps without overflow since the factor last changed.
    """

    factor: Float[Array, ""]
    good_steps: Int[Array, ""]


def init_loss_scale(factor: float) -> LossScale:
    """State before the first step."""
    return LossScale(jnp.asarray(factor, jnp.float32), jnp.zeros((), jnp.int32))


def next_loss_scale(state: LossScale, finite: Bool[Array, ""], *, growth_every: int) -> LossScale:
    """Half the factor after an overflow, twice after so many steps without one, in [1, 2^24].

    Args:
      state: Before.
      finite: Whether the gradient of this optimizer step was.
      growth_every: Steps without overflow after which the factor grows.
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= growth_every
    factor = jnp.where(finite, jnp.where(grows, state.factor * 2.0, state.factor), state.factor * 0.5)
    return LossScale(jnp.clip(factor, SMALLEST, LARGEST), jnp.where(grows, 0, good))


def scale_cotangents(tree: Tree, factor: Float[Array, ""]) -> Tree:
    """Returns the tree unchanged, but multiplies its tangents and the gradients that flow back by the factor."""
    scaled: Tree = _scaled(tree, factor)
    return scaled


@jax.custom_jvp
def _scaled(tree: Any, factor: Array) -> Any:
    del factor
    return tree


@_scaled.defjvp
def _scaled_tangents(primals: tuple[Any, Array], tangents: tuple[Any, Array]) -> tuple[Any, Any]:
    (tree, factor), (tree_dot, _) = primals, tangents
    return tree, jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree_dot)
