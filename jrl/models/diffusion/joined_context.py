# SPDX-License-Identifier: Apache-2.0
"""The context that several text encoders make together: their vectors, and behind them the pooled ones as one row.

A row of ids is the rows of all encoders, end to end.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FIRST, SECOND, THIRD = "text_encoder", "text_encoder_2", "text_encoder_3"
"""Folders of the encoders, and names of their weights."""


def join_context(tokens: Float[Array, "B Q D"], pooled: Float[Array, "B P"]) -> Float[Array, "B Q2 D"]:
    """The context that the transformer reads: a prompt's embedding, and its pooled one as one more row behind it.

    Args:
      tokens: One vector a token.
      pooled: At most as wide; the row is filled up with zeros.
    """
    row = jnp.pad(pooled.astype(tokens.dtype), ((0, 0), (0, tokens.shape[-1] - pooled.shape[-1])))
    return jnp.concatenate([tokens, row[:, None]], axis=1)


def check_context(context: Float[Array, "B Q D"], width: int) -> None:
    """Refuses a context of another width, or without the row of the pooled prompt.

    Raises:
      ValueError: Saying which shape is read.
    """
    if context.ndim != 3 or context.shape[-1] != width or context.shape[1] < 2:
        raise ValueError(
            f"`context` must have shape (rows, tokens + 1, {width}), got {context.shape}. Is the pooled prompt its "
            "last row, as `join_context` makes it?"
        )


def check_ids(tokens: Int[Array, "B Q"], length: int, *, of: str) -> None:
    """Refuses rows of ids that are not as long as those of all encoders together.

    Args:
      tokens: Ids.
      length: Of a row.
      of: Whose ids they are, "both" or "all" text encoders'.
    Raises:
      ValueError: Saying how long.
    """
    if tokens.shape[1] != length:
        raise ValueError(
            f"`tokens` must have {length} columns, the rows of {of} text encoders end to end, got {tokens.shape[1]}. "
            "Do they come from the model's own tokenizer?"
        )
