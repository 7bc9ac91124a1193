# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in fewer bits: bfloat16, int8 with a scale for each output, or 4-bit NormalFloat.

Only weights are rounded; products are computed in the compute dtype, on weights that are expanded where they are used.
int8 and nf4 apply to the kernels of the blocks' projections and experts, which are most of a model; all else becomes
bfloat16, but for a few small leaves (`float32_paths`). On a CPU XLA expands the kernels of a program all at once: there
the saving is one of arrays at rest.

The rounding is qwix's (`pip install qwix`); NormalFloat: Dettmers et al. 2023, arXiv:2305.14314,
appendix E.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jrl.mesh import path_name, platform, tree_shardings
from jrl.typing import Params

BLOCK = 64
"""Inputs that share a scale under nf4, as in bitsandbytes."""
_NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the sixteen numbers of 4-bit NormalFloat stand for, as shares of a block's largest (the paper's appendix E)."""
_KERNEL = re.compile(
    r"layers_\d+/((attn/)?(attn|mamba|cross|(shared_)?mlp)/\w+/kernel|experts/(gate|up|down|latent_(down|up)/kernel))$"
)
_EXACT = re.compile(
    r"layers_\d+/((attn/)?(attn|mamba)/(log_rates|decay_bias|step_bias|skip|sinks)|experts/choice_bias)$"
)
_CHOICE_BIAS, _ROUTER = "experts/choice_bias", "experts/router/kernel"


class QuantizedKernel(struct.PyTreeNode):
    """A rounded kernel, or a stack of them. Its input axes are one.

    Attributes:
      values: int8 (inputs, *outputs); under nf4 uint8 (inputs / 2, *outputs), two numbers of 4 bits in each, the even
        input in the low bits: jax keeps its own 4-bit arrays in whole bytes on some backends.
      scales: float32 (1, *outputs); under nf4 (inputs / block, *outputs).
      inputs: Sizes of the kernel's input axes.
      kind: "int8" or "nf4".
      stacked: Whether both arrays have one more axis, their first: one kernel for each expert.
    """

    values: Int[Array, "*stack rows *outputs"]
    scales: Float[Array, "*stack blocks *outputs"]
    inputs: tuple[int, ...] = struct.field(pytree_node=False)
    kind: str = struct.field(pytree_node=False)
    stacked: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel that the numbers stand for: (*stack, *inputs, *outputs)."""
        start = int(self.stacked)
        return (*self.values.shape[:start], *self.inputs, *self.values.shape[start + 1 :])

    def astype(self, dtype: Any) -> Float[Array, "*stack *inputs *outputs"]:
        """The kernel that the numbers stand for."""
        if self.stacked:
            return jax.vmap(lambda one: one.astype(dtype))(self.replace(stacked=False))
        if self.kind == "nf4":
            return self._levels_times_scales().astype(dtype)
        expanded = _qwix().dequantize(_qwix().QArray(self.values, self.scales, qtype=self.kind))
        return expanded.reshape(self.shape).astype(dtype)

    def _levels_times_scales(self) -> Float[Array, "*inputs *outputs"]:
        """What numbers of 4 bits stand for."""
        blocks, *outputs = self.scales.shape
        level = _chosen_level if platform() == "tpu" else _looked_up_level
        halves = [
            level(half).reshape(blocks, -1, *outputs) * self.scales[:, None]
            for half in (self.values & 15, self.values >> 4)
        ]
        # Scaled before: XLA gathers split numbers whole where they are brought together first.
        return jnp.stack(halves, axis=2).reshape(self.shape)


def _looked_up_level(values: Int[Array, "rows *outputs"]) -> Float[Array, "rows *outputs"]:
    """The level of each number of 4 bits: one of sixteen, which needs no check."""
    return jnp.asarray(_NF4_LEVELS, jnp.float32).at[values].get(mode="promise_in_bounds")


def _chosen_level(values: Int[Array, "rows *outputs"]) -> Float[Array, "rows *outputs"]:
    """The same, chosen by one bit after the other.

    XLA for TPUs writes a lookup out for every number: a kernel of 2,048 x 2,048 is 24 MiB of code, and two layers of
    Llama 2 7B took the compiler more than 22 GB.
    """
    found: list[Any] = list(_NF4_LEVELS)
    for bit in range(4):
        is_set = (values >> bit) & 1 == 1
        found = [jnp.where(is_set, odd, even) for even, odd in zip(found[0::2], found[1::2], strict=True)]
    return found[0].astype(jnp.float32)


def quantize_kernel(
    kernel: Float[Array, "*stack *inputs *outputs"],
    kind: Literal["int8", "nf4"],
    *,
    input_axes: int = 1,
    stacked: bool = False,
) -> QuantizedKernel:
    """Rounds a kernel.

    Args:
      kernel: (*inputs, *outputs), or (experts, *inputs, *outputs).
      kind: "int8": 255 equal steps over ± the largest weight of each output. "nf4": 16 steps, spaced for normally
        distributed weights, over ± the largest of each block of 64 inputs of an output.
      input_axes: Leading axes that are inputs.
      stacked: Whether an axis of experts comes before them: each is rounded as if it were alone.
    Raises:
      ValueError: If nf4 is asked for and the number of inputs is odd.
    """
    if stacked:
        alone = partial(quantize_kernel, kind=kind, input_axes=input_axes)
        return jax.vmap(alone)(kernel).replace(stacked=True)
    inputs, outputs = kernel.shape[:input_axes], kernel.shape[input_axes:]
    matrix = kernel.astype(jnp.float32).reshape(math.prod(inputs), *outputs)
    channels = tuple(range(1, matrix.ndim))
    if kind == "int8":
        rounded = _qwix().quantize(matrix, "int8", channelwise_axes=channels)
        return QuantizedKernel(rounded.qvalue, rounded.scale, inputs, kind)
    block = math.gcd(matrix.shape[0], BLOCK)
    if block < 2:
        raise ValueError(
            f"nf4 packs pairs of inputs: a kernel must have an even number, got {matrix.shape[0]}."
        )
    rounded = _qwix().quantize(matrix, "nf4", channelwise_axes=channels, tiled_axes={0: block})
    values = rounded.qvalue.astype(jnp.uint8)
    return QuantizedKernel(values[0::2] | (values[1::2] << 4), rounded.scale, inputs, kind)


def float32_paths(paths: Iterable[str]) -> set[str]:
    """Paths of a tree's leaves that stay float32 under any `frozen_dtype`.

    A router of sigmoids and its bias do, because rounding would choose other experts; so do the small numbers that
    steer a recurrence, and attention's sinks. A router of a softmax does not.
    """
    exact = {path for path in paths if _EXACT.search(path)}
    biases = (path for path in exact if path.endswith(_CHOICE_BIAS))
    return exact | {path.removesuffix(_CHOICE_BIAS) + _ROUTER for path in biases}


def quantize_frozen(
    frozen: Params, kind: str, *, keep: tuple[str, ...] = (), mesh: Mesh | None = None
) -> dict[str, Any]:
    """A frozen tree in fewer bits. Leaf by leaf: one matrix at a time is in float32.

    Args:
      frozen: Parameters.
      kind: "float32" (as it is), "bfloat16", "int8" or "nf4".
      keep: Top-level entries that stay as they are.
      mesh: Where the parameters lie, and the rounded ones shall; None: on one device.
    """
    if kind == "float32":
        return dict(frozen)
    exact = float32_paths(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(frozen)))

    def rounded(path: tuple[Any, ...], leaf: Array) -> Any:
        name = path_name(path)
        if name.split("/")[0] in keep or name in exact:
            return leaf
        if kind == "bfloat16" or not _KERNEL.search(name):
            return leaf.astype(jnp.bfloat16)
        return _quantize_leaf(name, leaf, kind, mesh)

    return jax.tree_util.tree_map_with_path(rounded, dict(frozen))


def _quantize_leaf(name: str, leaf: Array, kind: str, mesh: Mesh | None) -> QuantizedKernel:
    """A kernel of this path rounded, and placed as `jrl.mesh` says."""
    options: dict[str, Any] = {
        "kind": kind,
        "input_axes": num_input_axes(name),
        "stacked": not name.endswith("/kernel"),
    }
    shardings = None
    if mesh is not None:
        # Left to itself, the compiler would gather on every device what it finds hard to split.
        shape = jax.eval_shape(partial(quantize_kernel, **options), leaf)
        shardings = tree_shardings(mesh, {name: shape})[0][name]
    compiled = jax.jit(quantize_kernel, static_argnames=tuple(options), out_shardings=shardings)
    return compiled(leaf, **options)


def num_input_axes(name: str) -> int:
    """Leading axes of a block's kernel that are inputs: the one that follows attention reads heads and their width."""
    return 2 if name.endswith("/o/kernel") else 1


def num_weights(tree: Params) -> int:
    """Number of weights that a tree stands for: a rounded kernel counts as the original."""

    def size(leaf: Any) -> int:
        return math.prod(leaf.shape)

    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
    return sum(size(leaf) for leaf in leaves)


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as error:
        raise ImportError(
            "`model.frozen_dtype` int8 and nf4 need qwix: pip install qwix. bfloat16 needs nothing."
        ) from error
    return qwix
