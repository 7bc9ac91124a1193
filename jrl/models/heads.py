# SPDX-License-Identifier: Apache-2.0
"""Value heads: read the last hidden states, answer in float32, and say 0 until they are trained."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

VALUE_HEADS = ("mlp", "linear")


class Dense(nn.Module):
    """A float32 linear layer with bias."""

    features: int
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows F"]:
        """(..., D) to (..., features)."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        return x @ kernel.astype(jnp.float32) + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


class ValueHead(nn.Module):
    """One value a state.

    A fresh head is 0 everywhere: a critic that starts large and random dominates the first updates.

    Attributes:
      kind: "mlp" is D → 2D, ReLU, → 1; "linear" is D → 1.
    """

    kind: str

    @nn.compact
    def __call__(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
        """Values, float32 whatever the compute dtype."""
        x = hidden.astype(jnp.float32)
        if self.kind == "mlp":
            x = jax.nn.relu(Dense(2 * x.shape[-1], nn.initializers.lecun_normal(), name="hidden")(x))
        return Dense(1, nn.initializers.zeros_init(), name="out")(x).squeeze(-1)


def value_heads(
    kind: str | None, params: Mapping[str, Any], hidden: Float[Array, "*rows D"]
) -> dict[str, Array]:
    """`PolicyFns.heads` of a model with this value head, or without one."""
    if kind is None:
        return {}
    values: Any = ValueHead(kind).apply({"params": params["v_head"]}, hidden)
    return {"values": values}


def check_value_head(kind: str | None) -> None:
    """Raises ValueError unless `kind` is None, "mlp" or "linear"."""
    if kind is not None and kind not in VALUE_HEADS:
        raise ValueError(f"`value_head` must be one of {', '.join(VALUE_HEADS)} or None, got {kind!r}.")


def init_value_head(kind: str, width: int, key: Array) -> dict[str, Any]:
    """Fresh parameters of a value head over hidden states of this width.

    Raises:
      ValueError: If there is no head of this kind.
    """
    check_value_head(kind)
    return _init(kind, width, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(kind: str, width: int, key: Array) -> dict[str, Any]:
    return dict(ValueHead(kind).init(key, jnp.zeros((1, width)))["params"])
