# SPDX-License-Identifier: Apache-2.0
"""Kernels turned, outputs first: how a loop over tokens on a CPU reads them fastest.

XLA's CPU compiler copies the right operand of a product into tiles before it multiplies, and reads the left one as it
lies. A step of decoding has few rows, so that nearly all there is to read are kernels: as they are trained, (inputs,
outputs), each is copied anew for every token. Turned before the loop and put on the left, it is only read.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jrl.mesh import path_name
from jrl.models.products.cpu import FEWEST_ROWS, LEAST_SIZE, MOST_ROWS
from jrl.models.products.plain import on_one_device
from jrl.models.quantize import QuantizedKernel, num_input_axes
from jrl.typing import Params

# Of cross-attention k and v read the encoder's answer once. Latent attention reads k_up and v_up as whole arrays, which
# are no right operands.
_READ_EVERY_TOKEN = re.compile(
    r"(^|/)layers_\d+/((attn/)?(attn|mamba)/(?![kv]_up/)\w+|cross/[qo]|(shared_)?mlp/\w+)/kernel$|^lm_head/kernel$"
)
_FEWEST_TOKENS = 16
"""Tokens of a loop from which turning pays for itself: GPT-2's kernels, 8 rows, broke even at 10."""


class TurnedKernel(struct.PyTreeNode):
    """A kernel whose outputs are its first axes.

    Attributes:
      values: (*outputs, *inputs).
      num_inputs: Axes that are inputs.
    """

    values: Float[Array, "*outputs *inputs"]
    num_inputs: int = struct.field(pytree_node=False)

    def astype(self, dtype: Any) -> Float[Array, "*inputs *outputs"]:
        """The kernel as it is trained."""
        return _turn(self.values, self.values.ndim - self.num_inputs).astype(dtype)

    def product(self, x: Float[Array, "*rows *inputs"], dtype: Any) -> Float[Array, "*rows *outputs"]:
        """x · W, added up and returned in `dtype`."""
        num_outputs, num_rows = self.values.ndim - self.num_inputs, x.ndim - self.num_inputs
        inputs = tuple(range(num_outputs, self.values.ndim)), tuple(range(num_rows, x.ndim))
        y = jax.lax.dot_general(
            self.values.astype(x.dtype), x, (inputs, ((), ())), preferred_element_type=dtype
        )
        # Without the barrier XLA would swap the operands, to be spared the transposition.
        return _turn(jax.lax.optimization_barrier(y), num_outputs)


def turn_kernels(tree: Params, num_rows: int, num_tokens: int) -> Params:
    """The weights that a loop over tokens reads, with kernels of the blocks and of the head turned where that pays.

    It does for a few rows, on one device, and for large kernels in float32; all others stay as they are.

    Args:
      tree: Parameters.
      num_rows: B of the loop.
      num_tokens: Most tokens that it makes: each kernel is copied once for all of them.
    """
    if not (on_one_device() and FEWEST_ROWS <= num_rows <= MOST_ROWS and num_tokens >= _FEWEST_TOKENS):
        return tree

    def turned(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_name(path)
        rounded = isinstance(leaf, QuantizedKernel) or leaf.dtype != jnp.float32
        if rounded or leaf.size < LEAST_SIZE or not _READ_EVERY_TOKEN.search(name):
            return leaf
        num_inputs = num_input_axes(name)
        return TurnedKernel(_turn(leaf, num_inputs), num_inputs)

    return jax.tree_util.tree_map_with_path(
        turned, dict(tree), is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel)
    )


def _turn(array: Array, num_first: int) -> Array:
    """The first axes made the last."""
    axes = range(array.ndim)
    return array.transpose(*axes[num_first:], *axes[:num_first])
