# SPDX-License-Identifier: Apache-2.0
"""The products of a model in plain JAX: the default set, and the definition that every tuned form must agree with."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.products.trilinear import Forms, multiply


def contract(
    x: Float[Array, "*rows *inputs"], kernel: Float[Array, "*inputs *outputs"], num_inputs: int, dtype: Any
) -> Float[Array, "*rows *outputs"]:
    """x · W over the last `num_inputs` axes of x and the first of W, added up and returned in `dtype`.

    The axes of the rows are merged first: so they are one axis in the gradient of W too. With two, XLA's CPU compiler
    copies the cotangent transposed, with the sum of the residual stream's gradient fused into that copy. So are inputs
    and outputs on one device; over several, each of their axes may be split.
    """
    rows, inputs = x.shape[: x.ndim - num_inputs], x.shape[x.ndim - num_inputs :]
    outputs = kernel.shape[num_inputs:]
    if on_one_device():
        kernel = kernel.reshape(math.prod(inputs), math.prod(outputs))
        inputs = (math.prod(inputs),)
    contracted = tuple(range(1, len(inputs) + 1)), tuple(range(len(inputs)))
    x = x.reshape(math.prod(rows), *inputs)
    y = jax.lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=dtype)
    return y.reshape(*rows, *outputs)


def on_one_device() -> bool:
    """True where the mesh in force, if there is one, has a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def multiply_table(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Products of all rows with all rows of a table, rounded to the dtype of the rows first, in float32.

    The gradient of a float32 table is added up and returned in float32: logits are read in pieces, and under bfloat16
    the sum of the pieces' gradients would round each of them.
    """
    return multiply(_table_forms(rows.dtype), 2, rows, table)


@functools.cache
def _table_forms(dtype: Any) -> Forms:
    """Rows, table and products, each from the other two. The axes of the rows are merged as in `contract`."""

    def rows(table: Float[Array, "V D"], products: Float[Array, "*rows V"]) -> Float[Array, "*rows D"]:
        return _product("mv,vd->md", _rounded(products), table.astype(dtype))

    def table(rows: Float[Array, "*rows D"], products: Float[Array, "*rows V"]) -> Float[Array, "V D"]:
        merged = rows.reshape(-1, rows.shape[-1])
        return _sum_of_products(
            "mv,md->vd", _rounded(products).reshape(len(merged), -1), merged.astype(dtype)
        )

    def products(rows: Float[Array, "*rows D"], table: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
        return _product("md,vd->mv", rows.astype(dtype), table.astype(dtype))

    def _rounded(products: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        # Once for both gradients. Inside a product, XLA for GPUs computes the softmax anew for every tile of it.
        small = products.astype(dtype)
        return small if small.dtype == products.dtype else jax.lax.optimization_barrier(small)

    return rows, table, products


def _product(
    spec: str, rows: Float[Array, "*rows X"], matrix: Float[Array, "..."]
) -> Float[Array, "*rows Y"]:
    merged = rows.reshape(-1, rows.shape[-1])
    return _sum_of_products(spec, merged, matrix).reshape(*rows.shape[:-1], -1)


def _sum_of_products(spec: str, x: Array, y: Array) -> Float[Array, "..."]:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def score_keys(q: Float[Array, "B K M H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K M S"]:
    """q · k of every query and key of one key/value head, in float32."""
    return jnp.einsum("bkmh,bksh->bkms", q, k, preferred_element_type=jnp.float32)


def mix_values(weights: Float[Array, "B K M S"], v: Float[Array, "B K S H"]) -> Float[Array, "B K M H"]:
    """Σ over the keys of weight · v, in float32."""
    return jnp.einsum("bkms,bksh->bkmh", weights, v, preferred_element_type=jnp.float32)


def grouped_dot(
    rows: Float[Array, "M K"], kernels: Float[Array, "E K N"], sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Each row times the matrix of its group, accumulated in float32 and returned in the dtype of the rows.

    No row depends on another. On NVIDIA GPUs the cost is up to the version of XLA: it multiplies all rows with all
    matrices unless cuDNN takes the product (openxla/xla, pull requests 40189 and 42313).

    Args:
      rows: Sorted by group: first those of group 0.
      kernels: One matrix a group.
      sizes: Rows in each group; they add up to M.
    """
    return jax.lax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32).astype(rows.dtype)
