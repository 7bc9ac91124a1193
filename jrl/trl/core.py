# SPDX-License-Identifier: Apache-2.0
"""TRL's small helpers over `jrl.ops`: masked statistics, log-probabilities, controllers, samplers of lengths.

Arrays of any kind come in (lists, NumPy, jax, torch on the CPU). Given a torch tensor the functions of arrays return
torch tensors, without a gradient; given anything else, jax arrays. A mask counts where it is not 0;
what stands elsewhere is never met by any arithmetic, so NaN may stand there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jrl.interop import (
    AdaptiveKLController,
    FixedKLController,
    RunningMoments,
    as_array,
    set_seed,
    torch_in_torch_out,
)
from jrl.ops import logprobs as logprob_ops
from jrl.ops import masking
from jrl.trl.models import ModelHandle

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "LengthSampler",
    "RunningMoments",
    "add_suffix",
    "average_torch_dicts",
    "clip_by_value",
    "convert_to_scalar",
    "disable_dropout_in_model",
    "entropy_from_logits",
    "exact_div",
    "flatten_dict",
    "get_global_statistics",
    "logprobs_from_logits",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "pad_to_length",
    "pad_to_size",
    "respond_to_batch",
    "set_seed",
    "stack_dicts",
    "stats_to_np",
    "whiten",
]


class LengthSampler:
    """Draws lengths in [min_value, max_value), the upper bound excluded, from NumPy's global generator.

    Args:
      min_value: Smallest length.
      max_value: One more than the largest.
    Raises:
      ValueError: If there is no such length.
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if min_value >= max_value:
            raise ValueError(f"`max_value` must be above `min_value`, got {max_value} and {min_value}.")
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        """Draws a length."""
        return int(np.random.choice(self.values))


@torch_in_torch_out
def masked_mean(values: Any, mask: Any, axis: int | None = None) -> Float[Array, "..."]:
    """Mean where the mask is not 0, over everything or along `axis`; 0 (TRL: NaN) where nothing is."""
    return masking.masked_mean(as_array(values), as_array(mask) != 0, axis=axis)


@torch_in_torch_out
def masked_var(values: Any, mask: Any, unbiased: bool = True) -> Float[Array, ""]:
    """Variance where the mask is not 0, with n − 1 in the denominator, or n; 0 (TRL: an error) of too few values."""
    return masking.masked_variance(as_array(values), as_array(mask) != 0, ddof=int(unbiased))


@torch_in_torch_out
def masked_whiten(values: Any, mask: Any, shift_mean: bool = True) -> Float[Array, "..."]:
    """All values, masked ones too, in units of the deviation where the mask is not 0, and centred if asked.

    Example:
      >>> whitened = masked_whiten([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[0, 1, 1], [1, 1, 0]])
      >>> [round(x, 4) for x in whitened[0].tolist()]
      [-1.9365, -1.1619, -0.3873]
    """
    x, counted = as_array(values), as_array(mask)
    return masking.whitened_by(
        x, mean=masked_mean(x, counted), variance=masked_var(x, counted), shift_mean=shift_mean
    )


@torch_in_torch_out
def whiten(values: Any, shift_mean: bool = True) -> Float[Array, "..."]:
    """Whitens over all values."""
    return masked_whiten(values, jnp.ones(np.shape(values)), shift_mean)


@torch_in_torch_out
def logprobs_from_logits(logits: Any, labels: Any, gather: bool = True) -> Float[Array, "..."]:
    """Log-probability of each label, or with `gather=False` of the whole vocabulary; nothing is shifted."""
    z = as_array(logits)
    if not gather:
        return jax.nn.log_softmax(masking.at_least_float32(z), axis=-1)
    return logprob_ops.logprobs_from_logits(z, as_array(labels))


@torch_in_torch_out
def entropy_from_logits(logits: Any) -> Float[Array, "..."]:
    """Entropy of the softmax over the last axis, in nats."""
    return logprob_ops.entropy_from_logits(as_array(logits))


@torch_in_torch_out
def clip_by_value(x: Any, tensor_min: Any, tensor_max: Any) -> Shaped[Array, "..."]:
    """Each entry of `x` moved into [min, max]; the bounds may be arrays. Where they cross, the lower one holds."""
    return jnp.maximum(jnp.minimum(as_array(x), as_array(tensor_max)), as_array(tensor_min))


def flatten_dict(nested: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """Nested mappings as one, names joined by `sep`.

    Raises:
      ValueError: If a name holds `sep` already.
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if sep in name:
            raise ValueError(f"`nested` must have no name with {sep!r} in it, got {name!r}.")
        if isinstance(value, Mapping):
            flat |= {f"{name}{sep}{inner}": found for inner, found in flatten_dict(value, sep).items()}
        else:
            flat[name] = value
    return flat


def stack_dicts(stats_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Each name's values flattened and stacked, shorter ones padded with −1 behind."""
    stacked = {}
    for name in stats_dicts[0]:
        rows = [as_array(stats[name]).ravel() for stats in stats_dicts]
        width = max(row.shape[0] for row in rows)
        stacked[name] = jnp.stack(
            [jnp.pad(row, (0, width - row.shape[0]), constant_values=-1) for row in rows]
        )
    return stacked


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as NumPy, those of one entry as Python numbers; bfloat16 becomes float32."""
    found = {}
    for name, value in stats_dict.items():
        if isinstance(value, jax.Array):
            value = value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value
            value = np.asarray(value)
        found[name] = (
            value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
        )
    return found


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of one entry as Python numbers; the rest as it is."""
    one = {name for name, value in stats.items() if hasattr(value, "item") and np.size(value) == 1}
    return {name: value.item() if name in one else value for name, value in stats.items()}


def add_suffix(input_dict: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """Appends a suffix to the names of a dictionary."""
    return {name + suffix: value for name, value in input_dict.items()}


@torch_in_torch_out
def pad_to_size(tensor: Any, size: int, dim: int = 1, padding: int = 50256) -> Array:
    """Exactly `size` entries along `dim`, filled up behind.

    Raises:
      ValueError: If there are more.
    """
    found = as_array(tensor)
    if found.shape[dim] > size:
        raise ValueError(
            f"`size` must be at least the {found.shape[dim]} entries along `dim` {dim}, got {size}."
        )
    return pad_to_length(found, size, padding, dim)


@torch_in_torch_out
def pad_to_length(tensor: Any, length: int, pad_value: int | float, dim: int = -1) -> Array:
    """Pads to at least `length` entries along `dim`, behind; nothing is cut."""
    found = as_array(tensor)
    missing = [(0, 0)] * found.ndim
    missing[dim] = (0, max(length - found.shape[dim], 0))
    return jnp.pad(found, missing, constant_values=pad_value)


def average_torch_dicts(list_of_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Mean of every name's arrays over the mappings."""
    return {
        name: jnp.mean(jnp.stack([as_array(one[name]) for one in list_of_dicts]), axis=0)
        for name in list_of_dicts[0]
    }


def exact_div(a: int, b: int, custom_error_message: str = "") -> int:
    """a / b where that is a whole number.

    Raises:
      ValueError: If it is not.
    """
    if a % b:
        hint = f" {custom_error_message}" if custom_error_message else ""
        raise ValueError(f"`a` must be a multiple of `b`, got {a} and {b}.{hint}")
    return a // b


def disable_dropout_in_model(model: ModelHandle) -> None:
    """Nothing to do: every pass of PPO and DPO is deterministic."""
    del model


@torch_in_torch_out
def get_global_statistics(xs: Any, mask: Any = None) -> tuple[Array, Array, int]:
    """(mean, population variance, count) of all values, or of those where the mask is not 0."""
    x = as_array(xs)
    real = jnp.ones(x.shape, bool) if mask is None else as_array(mask) != 0
    mean, variance = masking.masked_mean(x, real), masking.masked_variance(x, real, ddof=0)
    return mean, variance, int(jnp.sum(real))


def respond_to_batch(
    model: ModelHandle, queries: Any, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Int[np.ndarray, "B T"]:
    """Samples exactly `txt_len` ids after each query (B P), whatever they are: no id ends a row.

    Args:
      model: Who writes.
      queries: Rows of one length.
      txt_len: New tokens.
      top_k: Keeps so many of the most probable tokens; 0 keeps all.
      top_p: Keeps the nucleus of this mass.
    """
    rows = model.generate(
        queries, max_new_tokens=txt_len, do_sample=True, top_k=top_k, top_p=top_p, eos_token_id=[]
    )
    return rows[:, -txt_len:]
