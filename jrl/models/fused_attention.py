# SPDX-License-Identifier: Apache-2.0
"""Attention of whole rows by one kernel: which kernel, and that of one that knows lengths.

Scoring and training read whole rows, and so do prompts before there is a cache.
No mask is made, and no (Q, S) scores are kept for the backward pass. `jax.nn.dot_product_attention` serves rows that
are padded on the right, prompts once they are turned; TPUs have a kernel of their own (`jrl.models.splash_attention`).
None reads the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice
from jaxtyping import Array, Bool, Float, Int, Shaped

from jrl.mesh import AbsentDevice, constrain_rows, platform
from jrl.models.config import LatentAttention, TransformerConfig

AttnImplementation = Literal["auto", "einsum", "xla", "cudnn", "splash"]
"""How whole rows attend: einsums with a mask (everything, everywhere), `jax.nn.dot_product_attention` by one of its
implementations, or TPUs' splash kernel; "auto" is the platform's kernel where it serves, and einsums elsewhere."""
FusedImplementation = Literal["xla", "cudnn"]
KernelImplementation = Literal[FusedImplementation, "splash"]


@partial(
    jax.tree_util.register_dataclass, data_fields=("lengths", "real", "fill"), meta_fields=("implementation",)
)
@dataclass(frozen=True)
class FusedRows:
    """Facts of the rows that a fused kernel reads.

    Attributes:
      lengths: Real tokens of each row; 1 in a row that is mere padding, as no kernel is asked for an empty row.
      real: True on real tokens.
      fill: What stands at padding: 0; NaN in a row whose padding is not on the right.
      implementation: Of `jax.nn.dot_product_attention`.
    """

    lengths: Int[Array, "B"]
    real: Bool[Array, "B L"]
    fill: Float[Array, "B"]
    implementation: FusedImplementation


def fused_rows(attention_mask: Bool[Array, "B L"], implementation: FusedImplementation) -> FusedRows:
    """Rows as a kernel is told of them.

    A kernel that knows lengths cannot read a row that is padded on the left: all of that row becomes NaN, rather than
    something that looks like a result.
    """
    lengths = attention_mask.sum(axis=1, dtype=jnp.int32)
    before = jnp.arange(attention_mask.shape[1])[None, :] < lengths[:, None]
    readable = (attention_mask == before).all(axis=1)
    return FusedRows(
        lengths=constrain_rows(jnp.maximum(lengths, 1)),
        real=attention_mask & readable[:, None],
        fill=jnp.where(readable, 0.0, jnp.nan),
        implementation=implementation,
    )


class Turned(NamedTuple):
    """Rows whose columns are turned so that their first real token stands in front, and their padding behind.

    Attributes:
      starts: The column of the first real token in rows that are not turned.
    """

    starts: Int[Array, "B"]

    def turn(self, x: Shaped[Array, "B L ..."]) -> Shaped[Array, "B L ..."]:
        """Rows, turned."""
        return _turn(x, self.starts)

    def turn_back(self, x: Shaped[Array, "B L ..."]) -> Shaped[Array, "B L ..."]:
        """Columns in the order that rows had before they were turned."""
        return _turn(x, -self.starts)


def turned(attention_mask: Bool[Array, "B L"]) -> Turned:
    """Rows that have their padding on the left, or on the right."""
    return Turned(jnp.argmax(attention_mask, axis=1).astype(jnp.int32))


def _turn(x: Shaped[Array, "B L ..."], starts: Int[Array, "B"]) -> Shaped[Array, "B L ..."]:
    columns = (jnp.arange(x.shape[1])[None, :] + starts[:, None]) % x.shape[1]
    columns = columns.reshape(columns.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, columns, axis=1, mode="promise_in_bounds")


def attend_fused(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B K L H"],
    v: Float[Array, "B K L H"],
    rows: FusedRows,
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B L N H"]:
    """Causal softmax attention of right-padded rows, N query heads over K key/value heads.

    Args:
      q: Queries.
      k: Keys, heads before positions.
      v: Values, likewise.
      rows: Their lengths.
      scale: Multiplies the scores.
      window: Keys that a query reads, its own among them; None: all before it.
    """
    real, length = rows.real[:, :, None, None], q.shape[1]
    # JAX refuses the derivative of cuDNN's kernel for rows of an odd length, as if each call had a bias.
    spare = length % 2 if rows.implementation == "cudnn" else 0

    # A kernel may leave whatever was in memory where there is padding, in the output and in its gradients: neither
    # may reach a matrix product, where NaN times 0 is NaN.
    def clean(x: Float[Array, "B L _ H"]) -> Float[Array, "B M _ H"]:
        return jnp.pad(jnp.where(real, x, 0), ((0, 0), (0, spare), (0, 0), (0, 0)))

    tokens = clean(q), clean(k.swapaxes(1, 2)), clean(v.swapaxes(1, 2))
    if rows.implementation == "cudnn" and isinstance(_meant(), AbsentDevice):
        out = _shape_of_cudnn(*tokens)
    else:
        out = jax.nn.dot_product_attention(
            *tokens,
            scale=scale,
            is_causal=True,
            query_seq_lengths=rows.lengths,
            key_value_seq_lengths=rows.lengths,
            local_window_size=None if window is None or window >= length else (window - 1, 0),
            implementation=rows.implementation,
        )
    return jnp.where(real, out[:, :length], rows.fill[:, None, None, None].astype(out.dtype))


@jax.custom_vjp
def _shape_of_cudnn(
    q: Float[Array, "B L N H"], k: Float[Array, "B L K H"], v: Float[Array, "B L K H"]
) -> Float[Array, "B L N H"]:
    """What cuDNN's kernel returns, as a shape, and what it keeps for its derivative.

    JAX traces its own call only where cuDNN is installed. Nothing runs on a device that is only imagined.
    """
    return _keep_as_cudnn(q, k, v)[0]


def _keep_as_cudnn(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    # Products: a cheap result would count as made again in the pass backward.
    out = q @ jnp.eye(q.shape[-1], dtype=q.dtype)
    statistics = q.astype(jnp.float32) @ jnp.ones((q.shape[-1], 1))  # one number of a head's query
    return out, (q, k, v, statistics, out)


def _gradients_as_cudnn(kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array]:
    q, k, v, *_ = kept
    return q * cotangent, 2 * k, 2 * v


_shape_of_cudnn.defvjp(_keep_as_cudnn, _gradients_as_cudnn)


def _meant() -> AbstractDevice | None:
    """Kind of device that a program is made for; None: of those that are here."""
    return jax.sharding.get_abstract_mesh().abstract_device


def choose_attention(
    requested: AttnImplementation, config: TransformerConfig, compute_dtype: Any
) -> Literal["einsum", KernelImplementation]:
    """The implementation that this model gets on the devices of the mesh in force, else on this process's.

    Args:
      requested: What the run asks for.
      config: The architecture.
      compute_dtype: Of activations and matrix products.
    Raises:
      ValueError: If a kernel is asked for by name that does not serve here, with the reason.
    """
    if requested == "einsum":
        return requested
    kernel: KernelImplementation = requested if requested != "auto" else _kernel_of_platform()
    reason = _NO_KERNEL[kernel](config, compute_dtype)
    if reason is not None and requested != "auto":
        _refuse(requested, reason)
    return kernel if reason is None else "einsum"


def _kernel_of_platform() -> KernelImplementation:
    return "splash" if platform() == "tpu" else "cudnn"


def require_einsum(requested: AttnImplementation, reason: str) -> None:
    """Refuses a kernel by name, for models that none serves.

    Raises:
      ValueError: With the reason.
    """
    if requested not in ("auto", "einsum"):
        _refuse(requested, reason)


def _refuse(requested: str, reason: str) -> NoReturn:
    raise ValueError(
        f'`model.attn_implementation` {requested!r} does not serve here: {reason}; "auto" takes what serves.'
    )


def _no_plain_softmax(config: TransformerConfig) -> str | None:
    """Why no kernel computes this model's attention; None where one may."""
    if any(isinstance(layer.mixer, LatentAttention) for layer in config.layers):
        return "the model has latent attention, whose keys and values differ in width"
    if any(layer.chunk is not None for layer in config.layers):
        return "the model has layers that read a row chunk by chunk"
    if config.attention_sinks:
        return "the model has attention sinks, one more score of every head"
    return "the model has ALiBi, a bias on the scores" if config.alibi else None


def _no_xla(config: TransformerConfig, compute_dtype: Any) -> str | None:
    """Why `jax.nn.dot_product_attention` does not serve the model, whatever computes it; None where it may."""
    del compute_dtype
    if config.attention_softcap is not None:
        return f"the model caps its scores (attention_softcap = {config.attention_softcap})"
    return _no_plain_softmax(config)


def _no_cudnn(config: TransformerConfig, compute_dtype: Any) -> str | None:
    """Why cuDNN's kernel does not serve; None where it does.

    The limits are those that jax checks, and cuDNN's own on the width of heads in the backward pass.
    """
    if reason := _no_xla(config, compute_dtype):
        return reason
    device, meant = jax.devices()[0], _meant()
    is_absent = meant is not None and meant.device_kind != device.device_kind
    if isinstance(meant, AbsentDevice):
        device = meant
    elif is_absent:  # it is compiled for others
        device = jax.sharding.get_mesh().devices.flat[0]
    # ROCm's GPUs have names of architectures there.
    if device.platform != "gpu" or not device.compute_capability[:1].isdigit():
        return f"it needs an NVIDIA GPU, and the model computes on {device.device_kind}"
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and {device.device_kind} has {device.compute_capability}"
    if jnp.dtype(compute_dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and `train.compute_dtype` is {jnp.dtype(compute_dtype).name}"
    widest = 256 if capability[0] == 9 else 128
    if reason := _no_such_heads(config, widest):
        return reason
    widest = max(config.head_dims)
    if is_absent and widest > 128:  # jax 0.10 asks the process's own devices how wide heads may be
        return (
            f"JAX compiles its kernel for heads wider than 128, here {widest}, only where the GPU itself is"
        )
    return None


def _no_such_heads(config: TransformerConfig, widest: int) -> str | None:
    """Why a kernel does not serve the widths of the model's heads; None where it does."""
    if all(size % 8 == 0 and size <= widest for size in config.head_dims):
        return None
    sizes = " and ".join(str(size) for size in config.head_dims)
    return f"its heads are a multiple of 8 and at most {widest} wide, and the model's are {sizes}"


def _no_splash(config: TransformerConfig, compute_dtype: Any) -> str | None:
    """Why the splash kernel does not serve; None where it does."""
    if reason := _no_plain_softmax(config):
        return reason
    if (here := platform()) != "tpu":
        return f"it needs a TPU, and the model computes on a {here}"
    if jnp.dtype(compute_dtype) not in (jnp.bfloat16, jnp.float32):
        return f"it computes in bfloat16 or float32, and `train.compute_dtype` is {jnp.dtype(compute_dtype).name}"
    return _no_such_heads(config, 256)


_NO_KERNEL: Mapping[KernelImplementation, Callable[[TransformerConfig, Any], str | None]] = {
    "xla": _no_xla,
    "cudnn": _no_cudnn,
    "splash": _no_splash,
}
