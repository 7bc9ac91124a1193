# SPDX-License-Identifier: Apache-2.0
"""trlX's helpers around models: moments, whitening, log-probabilities. torch tensors in, torch tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl import interop
from jrl.interop import as_array, in_kind_of
from jrl.ops import logprobs, masking

__all__ = [
    "RunningMoments",
    "flatten_dict",
    "get_global_statistics",
    "get_tensor_stats",
    "logprobs_of_labels",
    "whiten",
]


class RunningMoments(interop.RunningMoments):
    """Mean and deviation of all values so far, in the kind of the last batch; attributes as in TRL's."""

    _last: Any = None

    @property
    def mean(self) -> Any:
        """Mean of all values."""
        return in_kind_of(self._last, super().mean)

    @property
    def std(self) -> Any:
        """Standard deviation, n − 1."""
        return in_kind_of(self._last, super().std)

    def update(self, xs: Any) -> tuple[Any, Any]:
        """Takes a batch into account; returns mean and standard deviation (n − 1) of the batch alone."""
        self._last = xs
        found: tuple[Any, Any] = in_kind_of(xs, super().update(xs))
        return found


def get_global_statistics(xs: Any, group: Any = None) -> tuple[Any, Any, int]:
    """(mean, population variance, count) of all values; arrays are global here, so that no `group` is needed."""
    del group
    x = as_array(xs, jnp.float32)
    return in_kind_of(xs, jnp.mean(x)), in_kind_of(xs, jnp.var(x)), x.size


def whiten(xs: Any, shift_mean: bool = True, distributed: bool = True, group: Any = None) -> Any:
    """Values in units of their deviation (n − 1), and centred if asked; over all of a global array."""
    del distributed, group
    x = as_array(xs, jnp.float32)
    whitened = masking.whitened_by(x, mean=jnp.mean(x), variance=jnp.var(x, ddof=1), shift_mean=shift_mean)
    return in_kind_of(xs, whitened)


def logprobs_of_labels(logits: Any, labels: Any) -> Any:
    """Log-probability (...,) of each label under logits (..., V); nothing is shifted."""
    z = masking.at_least_float32(as_array(logits, None))
    return in_kind_of(logits, logprobs.logprobs_from_logits(z, as_array(labels, jnp.int32)))


def flatten_dict(d: Mapping[str, Any], parent_key: str = "", sep: str = "/") -> dict[str, Any]:
    """Nested mappings as one, names joined by `sep` behind `parent_key`."""
    return interop.flat_names(d, sep=sep, prefix=f"{parent_key}{sep}" if parent_key else "")


def get_tensor_stats(xs: Any, mask: Any, n: Any) -> dict[str, Any]:
    """Mean, smallest, largest and deviation of the values where the mask is not 0; all 0 where there are no values.

    Args:
      xs: Values.
      mask: Of the same shape.
      n: Number of values that the mask keeps.
    """
    x, real = as_array(xs, jnp.float32), as_array(mask, bool)
    if not x.size:
        return {"mean": 0, "min": 0, "max": 0, "std": 0}
    count = as_array(n, jnp.float32)
    mean = masking.masked_sum(x, real) / count
    found = {
        "mean": mean,
        "min": jnp.min(jnp.where(real, x, np.inf)),
        "max": jnp.max(jnp.where(real, x, -np.inf)),
        "std": jnp.sqrt(masking.masked_sum(jnp.square(x - mean), real) / count),
    }
    return {name: in_kind_of(xs, value) for name, value in found.items()}
