# SPDX-License-Identifier: Apache-2.0
"""Rows as a recurrent layer reads them: real tokens first, so that no padding comes between two of them.

A state takes up one token after the other, and a convolution reads the tokens before. Padding, on whichever side or
between, must be as if it were not there: rows are put in this order, computed, and put back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class RecurrentRows(NamedTuple):
    """Tokens that a recurrent layer takes up, in the order in which it does.

    Attributes:
      real: True on real tokens, which come first in every row.
      segments: Of packed rows: a state begins anew where the number changes; None: one segment.
      order: Column that each place reads; None: rows are in this order already.
      places: Where each column goes: the inverse.
    """

    real: Bool[Array, "B Q"]
    segments: Int[Array, "B Q"] | None = None
    order: Int[Array, "B Q"] | None = None
    places: Int[Array, "B Q"] | None = None

    @property
    def counts(self) -> Int[Array, "B"]:
        """Real tokens of each row."""
        return self.real.sum(axis=1, dtype=jnp.int32)

    def take(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """The rows with real tokens first, and 0 for padding, which may hold anything."""
        if self.order is not None:
            assert self.places is not None
            x = _permute(x, self.order, self.places)
        return jnp.where(self.real[:, :, None], x, 0)

    def put_back(self, y: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Puts the answer for each token into its own column."""
        if self.order is None:
            return y
        assert self.places is not None
        return _permute(y, self.places, self.order)


def recurrent_rows(
    attention_mask: Bool[Array, "B Q"],
    segment_ids: Int[Array, "B Q"] | None = None,
    *,
    is_right_padded: bool = False,
) -> RecurrentRows:
    """The order of some rows.

    Args:
      attention_mask: True on real tokens.
      segment_ids: Of packed rows; None: one segment.
      is_right_padded: Real tokens come first already.
    """
    if is_right_padded or attention_mask.shape[1] == 1:
        return RecurrentRows(attention_mask, segment_ids)
    order = jnp.argsort(~attention_mask, axis=1, stable=True)

    def sort(x: Any) -> Any:
        return jnp.take_along_axis(x, order, axis=1)

    segments = None if segment_ids is None else sort(segment_ids)
    return RecurrentRows(sort(attention_mask), segments, order, jnp.argsort(order, axis=1))


@jax.custom_vjp
def _permute(
    rows: Float[Array, "B Q D"], order: Int[Array, "B Q"], inverse: Int[Array, "B Q"]
) -> Float[Array, "B Q D"]:
    """Each row's columns in another order. The gradient gathers too: that of a gather would scatter."""
    return jnp.take_along_axis(rows, order[:, :, None], axis=1, mode="promise_in_bounds")


def _forward(rows: Any, order: Any, inverse: Any) -> Any:
    return _permute(rows, order, inverse), (order, inverse)


def _backward(orders: Any, cotangent: Any) -> Any:
    order, inverse = orders
    return _permute(cotangent, inverse, order), None, None


_permute.defvjp(_forward, _backward)
