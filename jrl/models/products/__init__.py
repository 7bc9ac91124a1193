# SPDX-License-Identifier: Apache-2.0
"""The one seam between a model and the platform: every product with weights, and the two of attention.

A model calls these functions and knows of no platform. The set behind them is `PLAIN`, or `CPU` where the mesh in
force is of CPUs (without a mesh: where JAX computes on one). Both agree to rounding, and both are differentiable by
every transform of JAX, any number of times. `GPU` has the products of `PLAIN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jrl.mesh import platform
from jrl.models.products import blocks, cpu, plain
from jrl.models.products.turned import TurnedKernel, turn_kernels
from jrl.models.quantize import QuantizedKernel
from jrl.typing import Params

Kernel = Float[Array, "..."] | QuantizedKernel | TurnedKernel
"""A kernel in any of the ways it is stored."""
StoredKernel = (QuantizedKernel, TurnedKernel)
"""The ways that are no single array of the kernel's own shape."""
MIXED_VALUES = "mixed_values"
"""What `mix_values` calls its result."""


@dataclass(frozen=True)
class Products:
    """Products that a platform may compute in a form of its own; see the functions of these names.

    Attributes:
      multiply_table: Products of rows with all rows of a table.
      score_keys: Products of queries and keys.
      mix_values: Sums of values by weights.
      grouped_dot: A matrix for each group of rows.
      loop_weights: Parameters laid out for a loop over tokens.
      shares_layers: Equal layers share one body of a program; see `jrl.models.layer_loop`.
    """

    multiply_table: Callable[[Array, Array], Array]
    score_keys: Callable[[Array, Array], Array]
    mix_values: Callable[[Array, Array], Array]
    grouped_dot: Callable[[Array, Array, Array], Array]
    loop_weights: Callable[[Params, int, int], Params]
    shares_layers: bool


PLAIN = Products(
    plain.multiply_table, plain.score_keys, plain.mix_values, plain.grouped_dot, lambda tree, *_: tree, True
)
GPU = replace(PLAIN, shares_layers=False)
CPU = Products(cpu.multiply_table, cpu.score_keys, cpu.mix_values, blocks.grouped_dot, turn_kernels, False)


def products() -> Products:
    """The set of `jrl.mesh.platform()`."""
    return {"cpu": CPU, "gpu": GPU}.get(platform(), PLAIN)


def contract(
    x: Float[Array, "*rows *inputs"], kernel: Kernel, num_inputs: int, dtype: Any
) -> Float[Array, "*rows *outputs"]:
    """x · W over the last `num_inputs` axes of x, added up and returned in `dtype`.

    A kernel that is an array, or rounded, becomes one of x's dtype first.
    """
    if isinstance(kernel, TurnedKernel):
        return kernel.product(x, dtype)
    return plain.contract(x, kernel.astype(x.dtype), num_inputs, dtype)


def multiply_table(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Products of all rows with all rows of a table, in float32."""
    return products().multiply_table(rows, table)


def score_keys(q: Float[Array, "B K M H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K M S"]:
    """q · k of every query and key of one key/value head, in float32."""
    return products().score_keys(q, k)


def mix_values(weights: Float[Array, "B K M S"], v: Float[Array, "B K S H"]) -> Float[Array, "B K M H"]:
    """Σ over the keys of weight · v, in float32. The result is named, for `jax.checkpoint`'s policies."""
    return checkpoint_name(products().mix_values(weights, v), MIXED_VALUES)


def grouped_dot(
    rows: Float[Array, "M K"], kernels: Float[Array, "E K N"], sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Each row times the matrix of its group; see `plain.grouped_dot`."""
    return products().grouped_dot(rows, kernels, sizes)


def reads_slices(num_queries: int) -> bool:
    """True where `score_keys` and `mix_values` read the first keys of an array as they lie, and do not copy them first.

    Seen in compiled loops. The compiler for TPUs makes a slice part of the product. The one for GPUs does where the
    product is a plain sum, that of a single query, and not where it calls a kernel for matrices. That for CPUs copies.

    Args:
      num_queries: Queries that read one key/value head.
    """
    here = platform()
    return here == "tpu" or (here == "gpu" and num_queries == 1)


def loop_weights(tree: Params, num_rows: int, num_tokens: int) -> Params:
    """`PolicyFns.loop_weights`: the parameters as a loop over so many tokens of so many rows reads them best."""
    return products().loop_weights(tree, num_rows, num_tokens)
