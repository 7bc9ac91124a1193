# SPDX-License-Identifier: Apache-2.0
"""The layers that every architecture is made of: linear maps, norms, tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def as_row(vector: Array, ndim: int) -> Array:
    """A parameter with leading axes of 1: rank promotion hides mistakes, so shapes are made to agree."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


class Projection(nn.Module):
    """A linear map that contracts the last axes of its input: `kernel` is (*inputs, *outputs).

    Attributes:
      inputs: Sizes of the axes contracted.
      outputs: Sizes of the axes made.
      use_bias: Adds a bias of shape `outputs`.
      init_range: Standard deviation of a fresh kernel.
      dtype: Of the computation; parameters keep their own.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool
    init_range: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., *inputs) to (..., *outputs)."""
        init = nn.initializers.normal(self.init_range)
        kernel = self.param("kernel", init, (*self.inputs, *self.outputs), jnp.float32)
        axes = tuple(range(len(self.inputs)))
        contracted = tuple(axis + x.ndim - len(self.inputs) for axis in axes)
        y = jax.lax.dot_general(
            x.astype(self.dtype), kernel.astype(self.dtype), ((contracted, axes), ((), ()))
        )
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), self.outputs, jnp.float32)
            y += as_row(bias.astype(self.dtype), y.ndim)
        return y


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axes, in float32.

    Attributes:
      kind: "layer", "rms" (no mean, no bias), or "rms_plus_one", which multiplies by 1 + scale.
      epsilon: Added to the variance.
      shape: Sizes of the axes that are normalised together.
      dtype: Of the result.
    """

    kind: str
    epsilon: float
    shape: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises, then applies scale and, for LayerNorm, bias."""
        axes = tuple(range(-len(self.shape), 0))
        x = x.astype(jnp.float32)
        if self.kind == "layer":
            x = x - x.mean(axis=axes, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=axes, keepdims=True) + self.epsilon)
        plus_one = self.kind == "rms_plus_one"
        init = nn.initializers.zeros_init() if plus_one else nn.initializers.ones_init()
        scale = self.param("scale", init, self.shape, jnp.float32).astype(jnp.float32)
        x = x * as_row(1.0 + scale if plus_one else scale, x.ndim)
        if self.kind == "layer":
            bias = self.param("bias", nn.initializers.zeros_init(), self.shape, jnp.float32)
            x = x + as_row(bias.astype(jnp.float32), x.ndim)
        return x.astype(self.dtype)


class Table(nn.Module):
    """A table of vectors looked up by id.

    Attributes:
      num_rows: Number of ids.
      width: D.
      init_range: Standard deviation of fresh vectors.
      rows: Logical name of the row axis, as in `jrl.mesh`; None where it is never split.
    """

    num_rows: int
    width: int
    init_range: float
    rows: str | None

    def setup(self) -> None:
        """Declares the table."""
        init = nn.initializers.normal(self.init_range)
        self.embedding = self.param("embedding", init, (self.num_rows, self.width), jnp.float32)

    def __call__(self, ids: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
        """The rows of these ids; NaN outside the table, so that a bad id is seen and not clipped."""
        # Whole rows on every device of the fsdp axis: a lookup in split rows would move the batch instead.
        table = constrain(self.embedding, self.rows, None)
        return constrain(jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan), "batch", None, None)

    def transposed(self, hidden: Float[Array, "*rows D"], dtype: Any) -> Float[Array, "*rows V"]:
        """Products with every row of the table, accumulated and returned in float32."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden.astype(dtype),
            self.embedding.astype(dtype),
            preferred_element_type=jnp.float32,
        )
