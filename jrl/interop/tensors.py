# SPDX-License-Identifier: Apache-2.0
"""Arrays in the kind that a script works with: who brings torch tensors gets torch tensors back.

torch is never imported here. What comes back is a copy without a gradient: writing to it changes no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_tensor(x: Any) -> bool:
    """True for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(array: Any, dtype: Any = None) -> jax.Array:
    """Lists, NumPy and torch arrays as jax has them; tracers stay what they are."""
    return jnp.asarray(array if isinstance(array, jax.Array) else np.asarray(array), dtype)


def as_torch(array: Any) -> Any:
    """A torch tensor if torch is loaded, else a NumPy array; whole numbers as int64, bfloat16 as bfloat16."""
    if is_tensor(array):
        return array
    found = np.array(array)
    if np.issubdtype(found.dtype, np.integer):
        found = found.astype(np.int64)
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    if found.dtype.name == "bfloat16":
        return torch.from_numpy(found.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(found)


def in_kind_of(given: Any, array: Any) -> Any:
    """The array as it is; beside a torch tensor, as a torch tensor on the same device.

    Args:
      given: What the caller brought. Where both are of floating point, the result has its type.
      array: Numbers, NumPy or JAX; a tuple or named tuple of them keeps its shape.
    """
    if not is_tensor(given):
        return array
    if isinstance(array, tuple):
        parts = [in_kind_of(given, part) for part in array]
        return type(array)(*parts) if hasattr(array, "_fields") else tuple(parts)
    if array is None:
        return None
    tensor: Any = sys.modules["torch"].from_numpy(np.array(array))
    same = given.is_floating_point() and tensor.is_floating_point()
    return tensor.to(device=given.device, dtype=given.dtype if same else tensor.dtype)


def batch_as(batch: Mapping[str, Any], return_tensors: str | None) -> dict[str, Any]:
    """A batch's arrays as `return_tensors` asks: "pt" as `as_torch`, "np" as they are."""
    if return_tensors != "pt":
        return dict(batch)
    return {
        name: as_torch(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()
    }


def torch_in_torch_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose arrays come back as torch tensors where it was given one."""

    @wraps(function)
    def found(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not any(is_tensor(given) for given in (*args, *kwargs.values())):
            return result
        if isinstance(result, tuple):
            return tuple(as_torch(one) if hasattr(one, "shape") else one for one in result)
        return as_torch(result)

    return found
