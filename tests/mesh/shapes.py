# SPDX-License-Identifier: Apache-2.0
"""Arrays that are only described, with the places they would have: what a program is compiled from without memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jrl.mesh import tree_shardings


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    """An array of this size, on no device yet."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def key_shape() -> Any:
    """A random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def on(mesh: Mesh, tree: Any, places: NamedSharding | None = None) -> Any:
    """Shapes placed by the table of `jrl.mesh`, or all of them as `places` says."""
    found = tree_shardings(mesh, tree)[0] if places is None else jax.tree.map(lambda _: places, tree)
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, found)
