# SPDX-License-Identifier: Apache-2.0
"""The layers that every architecture is made of: linear maps, norms, tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain
from jrl.models.quantize import QuantizedKernel

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}

# Rows between which `table_first` is the faster form on a CPU (GPT-2's table, two cores: 1.5 to 1.9 times at 4 to 32
# rows, 1.1 times at 64), and numbers in the least table for which it is: smaller ones stay in the cache of a core.
FEWEST_ROWS, MOST_ROWS = 4, 64
LEAST_TABLE = 2**19


def as_row(vector: Array, ndim: int) -> Array:
    """A parameter with leading axes of 1: rank promotion hides mistakes, so shapes are made to agree."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def contract(
    x: Float[Array, "*rows *inputs"], kernel: Float[Array, "*inputs *outputs"], num_inputs: int
) -> Float[Array, "*rows *outputs"]:
    """x · W over the last `num_inputs` axes of x and the first of W.

    The gradient of W is computed as xᵀ·g. The derived one is (gᵀ·x)ᵀ, for which XLA's CPU compiler copies g transposed
    and, fused with that copy, adds up the residual stream's gradient anew from the last layer down: time quadratic in
    the number of layers. The axes of the rows are one there: of two, the copy of x transposed, with what made x fused
    into it, took longer than the product (GPT-2's `down`, 16 rows of 64: 40 ms, now 17). The other axes stay as they
    are: each may be split over devices.
    """
    start = x.ndim - num_inputs
    contracted = tuple(range(start, x.ndim)), tuple(range(num_inputs))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


def _contract_forward(x: Array, kernel: Array, num_inputs: int) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, kernel, num_inputs), (x, kernel)


def _contract_backward(num_inputs: int, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = kept
    start = x.ndim - num_inputs
    outputs = tuple(range(start, g.ndim)), tuple(range(num_inputs, kernel.ndim))
    num_rows = math.prod(x.shape[:start])
    x_rows, g_rows = (part.reshape(num_rows, *part.shape[start:]) for part in (x, g))
    return (
        jax.lax.dot_general(g, kernel, (outputs, ((), ()))),
        jax.lax.dot_general(x_rows, g_rows, (((0,), (0,)), ((), ()))),
    )


contract.defvjp(_contract_forward, _contract_backward)


class Projection(nn.Module):
    """A linear map that contracts the last axes of its input: `kernel` is (*inputs, *outputs).

    Where the variables hold an adapter for it (collection "lora"), that is added; see `add_adapter`. A frozen kernel
    may be rounded; see `jrl.models.quantize`. The gradient is written by hand (`contract`), so there is no forward mode
    (`jax.jvp`, `jax.jacfwd`).

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
        kernel = self._kernel()
        if isinstance(kernel, QuantizedKernel):
            # Expanded for this product and once more for its gradient: else all expanded kernels would be kept from the
            # forward pass to the backward pass, or from before the loop over tokens to its end.
            x, kernel = jax.lax.optimization_barrier((x, kernel))
            kernel = jax.lax.stop_gradient(kernel)
            y = jax.checkpoint(self._product)(x, kernel)
        else:
            y = self._product(x, kernel)
        y = add_adapter(self, x, kernel, y)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), self.outputs, jnp.float32)
            y += as_row(bias.astype(self.dtype), y.ndim)
        return y

    def _product(
        self, x: Float[Array, "..."], kernel: Float[Array, "..."] | QuantizedKernel
    ) -> Float[Array, "..."]:
        return contract(x.astype(self.dtype), kernel.astype(self.dtype), len(self.inputs))

    def _kernel(self) -> Float[Array, "..."] | QuantizedKernel:
        # Linen compares the shape of a parameter with its initialiser's: a rounded kernel is several arrays.
        stored: Any = self.get_variable("params", "kernel")
        if isinstance(stored, QuantizedKernel):
            return stored
        init = nn.initializers.normal(self.init_range)
        return self.param("kernel", init, (*self.inputs, *self.outputs), jnp.float32)


def add_adapter(
    module: nn.Module,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | QuantizedKernel,
    y: Float[Array, "..."],
) -> Float[Array, "..."]:
    """What the low-rank adapter of a module, if there is one, makes of its product y = x · W.

        y ← (y + x·a·b) · m / ‖W + a·b‖

    Its variables are `a` (*inputs, r), `b` (r, *outputs) with the scale inside, for DoRA `magnitude` m (*outputs), and
    `rate` of a dropout on x, which acts only where a dropout key is given. Without m the last factor is absent.
    """
    if not module.has_variable("lora", "a"):
        return y
    leaf = module.variables["lora"]
    a, b = leaf["a"].astype(y.dtype), leaf["b"].astype(y.dtype)
    if "rate" in leaf and module.has_rng("dropout"):
        kept = jax.random.bernoulli(module.make_rng("dropout"), 1.0 - leaf["rate"], x.shape)
        x = jnp.where(kept, x / (1.0 - leaf["rate"]), 0.0)
    y = y + jnp.tensordot(jnp.tensordot(x.astype(y.dtype), a, a.ndim - 1), b, 1)
    if "magnitude" not in leaf:
        return y
    return y * as_row(_norm_ratio(kernel, leaf).astype(y.dtype), y.ndim)


def adapted_kernel(
    kernel: Float[Array, "..."] | QuantizedKernel, leaf: Mapping[str, Array]
) -> Float[Array, "..."]:
    """The kernel with which a plain projection does what `add_adapter` does, float32."""
    whole = kernel.astype(jnp.float32) + jnp.tensordot(leaf["a"], leaf["b"], 1)
    return whole * as_row(_norm_ratio(kernel, leaf), whole.ndim) if "magnitude" in leaf else whole


def _norm_ratio(
    kernel: Float[Array, "..."] | QuantizedKernel, leaf: Mapping[str, Array]
) -> Float[Array, "..."]:
    """DoRA's m / ‖W + a·b‖, 0 where the weight is 0 (columns that pad the vocabulary). The norm is a constant."""
    w, a, b = jax.lax.stop_gradient((kernel.astype(jnp.float32), leaf["a"], leaf["b"]))
    inputs = tuple(range(a.ndim - 1))
    # ‖W + a·b‖² = ‖W‖² + 2 (aᵀW)·b + b·(aᵀa)b, so that no second array of the size of W is made.
    squares = jnp.square(w).sum(axis=inputs)
    squares += (2 * jnp.tensordot(a, w, (inputs, inputs)) * b).sum(axis=0)
    squares += (jnp.tensordot(jnp.tensordot(a, a, (inputs, inputs)), b, 1) * b).sum(axis=0)
    norm = jnp.sqrt(jnp.maximum(squares, 0.0))
    return jnp.where(norm > 0, leaf["magnitude"] / jnp.where(norm > 0, norm, 1.0), 0.0)


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
        hidden, table = hidden.astype(dtype), self.embedding.astype(dtype)
        is_thin = hidden.ndim == 2 and FEWEST_ROWS <= len(hidden) <= MOST_ROWS
        if is_thin and table.size >= LEAST_TABLE:
            return jax.lax.platform_dependent(hidden, table, cpu=table_first, default=rows_first)
        return rows_first(hidden, table)


def rows_first(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Products of all rows with all rows of a table, in float32: the form for accelerators, and for many rows."""
    return jnp.einsum("...d,vd->...v", rows, table, preferred_element_type=jnp.float32)


def table_first(rows: Float[Array, "B D"], table: Float[Array, "V D"]) -> Float[Array, "B V"]:
    """The same for a few rows on a CPU, as a step of decoding has them.

    There XLA copies the right operand of a product into tiles before it multiplies, and reads the left one as it lies.
    With few rows, nearly all there is to read is the table: on the left it is not copied.
    """
    products = jnp.einsum("vd,bd->vb", table, rows, preferred_element_type=jnp.float32)
    # Without the barrier XLA would swap the operands, to be spared the transposition.
    return jax.lax.optimization_barrier(products).T
