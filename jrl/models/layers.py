# SPDX-License-Identifier: Apache-2.0
"""The layers that every architecture is made of: linear maps, norms, tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain, parts_of, rows_of_device, whole_over_fsdp
from jrl.models.products import Kernel, StoredKernel, contract, multiply_table
from jrl.models.quantize import QuantizedKernel

TABLES = ("embed", "layer_embed")
"""Names of a model's tables of tokens; of what layers read beside the stream it is the second."""
ROUNDED = "rounded"
"""Name of a table's copy in the dtype of the computation, beside `embedding`."""
INPUTS, OUTPUTS, WHOLE = "inputs", "outputs", "whole"
"""Ends of a table, and what an adapter may hold of one; see `Table`."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


WITH_BIAS = ("layer", "layer_plus_one")
"""Kinds of norms that have a bias."""


def as_row(vector: Array, ndim: int) -> Array:
    """A parameter with leading axes of 1: rank promotion hides mistakes, so shapes are made to agree."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


def hide_padding(x: Float[Array, "*rows V"], vocab_size: int) -> Float[Array, "*rows V"]:
    """−inf in the columns that only pad the vocabulary, to which no gradient comes. A NaN stays one."""
    return x if x.shape[-1] == vocab_size else _hide_padding(x, vocab_size)


# A ceiling: no mask of all rows may be a constant of a loop over positions; see `jrl.ops.logprobs`. The derivative of a
# minimum would divide by the number of arguments that are equal.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _hide_padding(x: Float[Array, "*rows V"], vocab_size: int) -> Float[Array, "*rows V"]:
    ceiling = jnp.where(_is_real(x, vocab_size), jnp.inf, -jnp.inf)
    return jnp.minimum(x, ceiling.astype(x.dtype))


@_hide_padding.defjvp
def _hide_padding_tangents(
    vocab_size: int, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (x,), (x_dot,) = primals, tangents
    return _hide_padding(x, vocab_size), jnp.where(_is_real(x, vocab_size), x_dot, 0.0)


def _is_real(x: Float[Array, "*rows V"], vocab_size: int) -> Bool[Array, "... V"]:
    return as_row(jnp.arange(x.shape[-1]) < vocab_size, x.ndim)


class Projection(nn.Module):
    """A linear map that contracts the last axes of its input: `kernel` is (*inputs, *outputs).

    Where the variables hold an adapter for it (collection "lora"), that is added; see `add_adapter`. A frozen kernel
    may be rounded; see `jrl.models.quantize`.

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
        kernel = stored_kernel(self, (*self.inputs, *self.outputs), self.init_range)
        if isinstance(kernel, QuantizedKernel):
            # Expanded for this product and once more for its gradient: else all expanded kernels would be kept from the
            # forward pass to the backward pass, or from before the loop over tokens to its end.
            kernel = waiting_for(x, kernel)
            y = jax.checkpoint(self._product)(x, kernel)
        else:
            y = self._product(x, kernel)
        y = add_adapter(self, x, kernel, y)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), self.outputs, jnp.float32)
            y += as_row(bias.astype(self.dtype), y.ndim)
        return y

    def whole_kernel(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The kernel as one array with its adapter in it, for who multiplies it with other things than inputs.

        A rounded kernel waits for x before it is expanded: else those of all layers would be before a loop over tokens.
        """
        kernel: Any = self.get_variable("params", "kernel")
        if isinstance(kernel, QuantizedKernel):
            kernel = waiting_for(x, kernel)
            kernel = gathered(self, {"kernel": kernel})["kernel"]
        if self.has_variable("lora", "a"):
            kernel = adapted_kernel(kernel, self.variables["lora"])
        return kernel.astype(self.dtype)

    def _product(self, x: Float[Array, "..."], kernel: Kernel) -> Float[Array, "..."]:
        if isinstance(kernel, QuantizedKernel) and rows_of_device(x.shape[0]) < x.shape[0]:
            # Else all devices compute all rows, and each multiplies its own part of the kernel.
            kernel = gathered(self, {"kernel": kernel})["kernel"]
        return contract(x.astype(self.dtype), kernel, len(self.inputs), self.dtype)


def waiting_for(x: Float[Array, "..."], kernels: Any) -> Any:
    """A tree of frozen kernels that a program does not read before x is there."""
    # Nothing tied has a tangent: JAX would tie the tangents of all of it, and make whole arrays of zeros for kernels.
    return jax.lax.optimization_barrier(jax.lax.stop_gradient((x, kernels)))[1]


def stored_kernel(
    module: nn.Module, shape: tuple[int, ...], init_range: float, name: str = "kernel"
) -> Kernel:
    """The kernel of a module as it is stored, or a fresh one of this shape."""
    # Linen compares the shape of a parameter with its initialiser's: these are no single array, or of another.
    stored: Any = module.get_variable("params", name)
    if isinstance(stored, StoredKernel):
        return stored
    kernel: Array = module.param(name, nn.initializers.normal(init_range), shape, jnp.float32)
    return kernel


def gathered(module: nn.Module, kernels: dict[str, Kernel]) -> dict[str, Kernel]:
    """Kernels of a module by name, the rounded ones whole over `fsdp`: expanded they would be more bytes."""
    rounded = {name: kernel for name, kernel in kernels.items() if isinstance(kernel, QuantizedKernel)}
    path = "/".join(("layer", *module.path))
    return kernels | whole_over_fsdp({path: rounded})[path]


def add_adapter(
    module: nn.Module, x: Float[Array, "..."], kernel: Kernel, y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Adds the output of a module's low-rank adapter, if there is one, to its product y = x · W.

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


def with_token_rows(
    found: Float[Array, "B Q D"], ids: Int[Array, "B Q"], own: Mapping[str, Array]
) -> Float[Array, "B Q D"]:
    """Vectors of ids, those of an adapter's ids from its own rows. Other rows get no gradient from them."""
    is_own = ids[..., None] == as_row(own["ids"], ids.ndim + 1)
    rows = own["rows"].astype(found.dtype)[jnp.argmax(is_own, axis=-1)]
    return jnp.where(is_own.any(axis=-1, keepdims=True), rows, found)


def with_token_logits(
    logits: Float[Array, "*rows V"],
    hidden: Float[Array, "*rows D"],
    own: Mapping[str, Array],
    old: Float[Array, "n D"],
) -> Float[Array, "*rows V"]:
    """Logits with the columns of an adapter's ids as its own rows make them.

    The difference to the old rows is added: where there is none, the logits are the base model's to the bit.
    """
    change = own["rows"].astype(hidden.dtype) - old.astype(hidden.dtype)
    return logits.at[..., own["ids"]].add(multiply_table(hidden, change), unique_indices=True)


def adapted_kernel(kernel: Kernel, leaf: Mapping[str, Array]) -> Float[Array, "..."]:
    """The kernel with which a plain projection does what `add_adapter` does, float32."""
    whole = kernel.astype(jnp.float32) + jnp.tensordot(leaf["a"], leaf["b"], 1)
    return whole * as_row(_norm_ratio(kernel, leaf), whole.ndim) if "magnitude" in leaf else whole


def _norm_ratio(kernel: Kernel, leaf: Mapping[str, Array]) -> Float[Array, "..."]:
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
      kind: "layer", which may lack the bias ("layer_no_bias"), or "rms" (no mean, no bias), which may lack the scale
        ("rms_no_scale"). "layer_plus_one" and "rms_plus_one" multiply by 1 + scale.
      epsilon: Added to the variance.
      shape: Of the scale: sizes of the last axes.
      dtype: Of the result.
      num_axes: How many of these axes are normalised together; None: all.
    """

    kind: str
    epsilon: float
    shape: tuple[int, ...]
    dtype: Any
    num_axes: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises, then applies the scale and the bias of its kind."""
        axes = tuple(range(-(self.num_axes or len(self.shape)), 0))
        x = x.astype(jnp.float32)
        if self.kind.startswith("layer"):
            x = x - x.mean(axis=axes, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=axes, keepdims=True) + self.epsilon)
        if self.kind == "rms_no_scale":
            return x.astype(self.dtype)
        plus_one = self.kind.endswith("plus_one")
        init = nn.initializers.zeros_init() if plus_one else nn.initializers.ones_init()
        scale = self.param("scale", init, self.shape, jnp.float32).astype(jnp.float32)
        x = x * as_row(1.0 + scale if plus_one else scale, x.ndim)
        if self.kind in WITH_BIAS:
            bias = self.param("bias", nn.initializers.zeros_init(), self.shape, jnp.float32)
            x = x + as_row(bias.astype(jnp.float32), x.ndim)
        return x.astype(self.dtype)


def moves_table(ids_shape: tuple[int, ...], num_rows: int, width: int, rows: str | None) -> bool:
    """True where a lookup on the mesh in force reads whole rows of a table: where it has no more of them than ids.

    Args:
      ids_shape: Rows of a batch, and ids of each.
      num_rows: Of the table.
      width: Of the table, which the fsdp axis splits where it divides it.
      rows: As of `Table`.
    """
    if parts_of("embed", width) == 1:
        return True
    own_rows = num_rows if rows is None else num_rows // parts_of(rows, num_rows)
    return rows_of_device(ids_shape[0]) * ids_shape[1] >= own_rows


class Table(nn.Module):
    """A table of vectors looked up by id.

    Where the variables hold an adapter of it (collection "lora"), each end, `inputs` and `outputs`, may have a table of
    its own (`whole`), or trained `rows` in the place of those of some `ids`.

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

    def __call__(
        self, ids: Int[Array, "B Q"], dtype: Any = None, *, is_whole: bool = False
    ) -> Float[Array, "B Q D"]:
        """The rows of these ids; NaN outside the table, so that a bad id is seen and not clipped.

        Over `fsdp` either the table moves or what is found in it: see `moves_table`. Where what is found moves, each
        device looks up its own columns for the rows of all devices that share a copy of the table. Its gradient goes
        the same way back, into these columns alone.

        Args:
          ids: To look up.
          dtype: What rows are rounded to; None: they keep their own.
          is_whole: Whether every device of the fsdp axis has whole rows already, so that nothing need move.
        """
        own: Mapping[str, Array] = self.get_variable("lora", INPUTS, {})
        whole = is_whole or moves_table(ids.shape, self.num_rows, self.width, self.rows)
        rows, columns = ("batch", None) if whole else ("replica", "embed")
        table = self.embedding if dtype is None else self._rounded()
        table = constrain(own.get(WHOLE, table), self.rows, columns)
        found = jnp.take(table, constrain(ids, rows, None), axis=0, mode="fill", fill_value=jnp.nan)
        found = constrain(found if dtype is None else found.astype(dtype), rows, None, columns)
        if (
            not whole
        ):  # one axis after the other: the compiler would move a row over two of them by replicating it
            found = constrain(found, "part of a replica", None, None)
        found = constrain(found, "batch", None, None)
        return with_token_rows(found, ids, own) if "rows" in own else found

    def transposed(self, hidden: Float[Array, "*rows D"], dtype: Any) -> Float[Array, "*rows V"]:
        """Products with every row of the table, accumulated and returned in float32."""
        own: Mapping[str, Array] = self.get_variable("lora", OUTPUTS, {})
        hidden = hidden.astype(dtype)
        table = own.get(WHOLE, self._rounded())
        logits = multiply_table(hidden, table)
        return with_token_logits(logits, hidden, own, table[own["ids"]]) if "rows" in own else logits

    def _rounded(self) -> Float[Array, "V D"]:
        """The copy that `jrl.models.rounding` left, or the table."""
        copy: Array | None = self.get_variable("params", ROUNDED)
        return self.embedding if copy is None else copy
