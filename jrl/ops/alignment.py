# SPDX-License-Identifier: Apache-2.0
"""The token shift: windows of predictions over padded rows. No other module shifts.

A causal model that has read `tokens[: s + 1]` predicts `tokens[s + 1]`. A *window* is a run of T such predictions:
index t of the window speaks of the state at column `starts + t` and of the action at column `starts + t + 1`. From
here on every per-token array is (B T), and nothing else slices.

    tokens    p0 p1 p2 a0 a1 eos pad        starts = 2 (prompt length 3, minus 1), T = 4
    states          p2 a0 a1 eos            columns 2 3 4 5
    targets         a0 a1 eos pad           columns 3 4 5 6
    mask             1  1  1   0

Reference: none; bookkeeping of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jrl.typing import Completions, ModelInputs, Sequences


def window_columns(starts: Int[Array, "B"], *, width: int, length: int) -> Int[Array, "B T"]:
    """Columns of the states of a window of `width` positions, clipped to the row so that padding may overhang.

    Args:
      starts: Column of each window's first state, in [0, length).
      width: T, positions of the window.
      length: L, columns of a row.
    Returns:
      Column of each state, in [0, length).
    Example:
      >>> window_columns(jnp.array([1, 3]), width=3, length=5).tolist()
      [[1, 2, 3], [3, 4, 4]]
    """
    columns = starts[:, None] + jnp.arange(width, dtype=starts.dtype)[None, :]
    return jnp.clip(columns, 0, length - 1)


def states_at(hidden: Float[Array, "B L D"], columns: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Hidden states at given columns, (B L D) to (B T D); the columns need not be consecutive.

    Args:
      hidden: States of whole rows.
      columns: In [0, L), T of each row.
    Returns:
      State of each column, in the order of the columns.
    Example:
      >>> states_at(jnp.array([[[0.0], [1.0], [2.0]]]), jnp.array([[0, 2]])).tolist()
      [[[0.0], [2.0]]]
    """
    return jnp.take_along_axis(hidden, columns[:, :, None], axis=1)


def targets_at(tokens: Int[Array, "B L"], columns: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Actions chosen in the states at given columns: the token one column to the right of each.

    Args:
      tokens: Ids of whole rows.
      columns: Column of each state, in [0, L); at the last one the row's last token is returned.
    Returns:
      Ids, one for each state.
    Example:
      >>> targets_at(jnp.array([[5, 6, 7, 8, 9]]), jnp.array([[0, 3]])).tolist()
      [[6, 9]]
    """
    return jnp.take_along_axis(tokens, jnp.minimum(columns + 1, tokens.shape[1] - 1), axis=1)


def window_states(
    hidden: Float[Array, "B L D"], starts: Int[Array, "B"], *, width: int
) -> Float[Array, "B T D"]:
    """Hidden states from which the window's actions are predicted, (B L D) to (B T D).

    Args:
      hidden: States of whole rows.
      starts: Column of each window's first state.
      width: T, positions of the window.
    Returns:
      States of the window, with those of the last column repeated where it overhangs its row.
    Example:
      >>> window_states(jnp.array([[[0.0], [1.0], [2.0]]]), jnp.array([1]), width=2).tolist()
      [[[1.0], [2.0]]]
    """
    return states_at(hidden, window_columns(starts, width=width, length=hidden.shape[1]))


def window_targets(tokens: Int[Array, "B L"], starts: Int[Array, "B"], *, width: int) -> Int[Array, "B T"]:
    """Actions of a window: the token one column to the right of each state.

    Args:
      tokens: Ids of whole rows.
      starts: Column of each window's first state.
      width: T, positions of the window.
    Returns:
      Ids of the window, with the row's last one repeated where the window overhangs it.
    Example:
      >>> window_targets(jnp.array([[5, 6, 7, 8, 0]]), jnp.array([1]), width=3).tolist()
      [[7, 8, 0]]
    """
    columns = window_columns(starts + 1, width=width, length=tokens.shape[1])
    return jnp.take_along_axis(tokens, columns, axis=1)


def next_tokens(rows: Shaped[Array, "B L"]) -> Shaped[Array, "B L-1"]:
    """Tokens after each column: whole rows without their first, which nothing predicts.

    Args:
      rows: Ids, labels or flags of whole rows, one a token.
    Returns:
      Index t speaks of the token in column t + 1, as that of `next_predictions` does.
    Example:
      >>> next_tokens(jnp.array([[5, 6, 7]])).tolist()
      [[6, 7]]
    """
    return rows[:, 1:]


def next_predictions(rows: Shaped[Array, "B L *rest"]) -> Shaped[Array, "B L-1 *rest"]:
    """Predictions of the token after each column: whole rows without their last, of which nothing follows.

    Args:
      rows: Logits, states or flags of whole rows, one a column.
    Returns:
      Index t speaks of the token in column t + 1, as that of `next_tokens` does.
    Example:
      >>> next_predictions(jnp.array([[[0.1], [0.2], [0.3]]])).shape
      (1, 2, 1)
    """
    return rows[:, :-1]


def next_values(values: Shaped[Array, "B T"]) -> Shaped[Array, "B T"]:
    """Values of the state after each action of a window: V(s_{t+1}), and 0 after the last column.

    Args:
      values: V(s_t) of the window's states, 0 where there is none.
    Returns:
      Index t speaks of the state that the action of index t leads to.
    Example:
      >>> next_values(jnp.array([[0.25, 0.5, 1.0]])).tolist()
      [[0.5, 1.0, 0.0]]
    """
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def learned_targets(learned: Sequence[bool] | Bool[np.ndarray, "*B L"]) -> Bool[np.ndarray, "*B T"]:
    """Flags of the tokens that are learned, at the positions that predict them: T = L − 1, on the host.

    The first token of a row is predicted by no position, so its flag is dropped.

    Args:
      learned: Flag of each token of a row, or of rows; True where the token is a target.
    Returns:
      Flags of a window that starts at column 0: index t speaks of the token in column t + 1.
    Example:
      >>> learned_targets([True, False, True, True]).tolist()
      [False, True, True]
    """
    return np.asarray(learned, bool)[..., 1:]


def length_mask(lengths: Int[Array, "B"], *, width: int) -> Bool[Array, "B T"]:
    """Mask that is True on the first `lengths` columns of each row.

    Masks come from lengths, never from `tokens == pad`: a padding id may be a real token elsewhere.

    Args:
      lengths: Real columns of each row, in [0, width].
      width: T, columns of the mask.
    Returns:
      True on the first `lengths` columns.
    Example:
      >>> length_mask(jnp.array([2, 0]), width=3).tolist()
      [[True, True, False], [False, False, False]]
    """
    return jnp.arange(width, dtype=lengths.dtype)[None, :] < lengths[:, None]


def join(prompts: ModelInputs, completions: Completions, *, pad_token_id: int) -> Sequences:
    """Concatenates left-padded prompts and right-padded completions to one right-padded row each.

    Args:
      prompts: Rows (B P), left-padded.
      completions: Sampled rows (B T).
      pad_token_id: Fills the columns after each completion.
    Returns:
      Rows of P + T columns, `starts` = prompt length − 1, mask = the sampled tokens, with holes where an environment
      wrote.
    Example:
      >>> prompts = ModelInputs(jnp.array([[0, 5]]), jnp.array([[False, True]]))
      >>> written = Completions(jnp.array([[7, 8, 0]]), jnp.array([2]), jnp.ones(1, bool), jnp.zeros((1, 3)))
      >>> join(prompts, written, pad_token_id=0).inputs.tokens.tolist()
      [[5, 7, 8, 0, 0]]
    """
    prompt_width, width = prompts.tokens.shape[1], completions.tokens.shape[1]
    prompt_lengths = jnp.sum(prompts.attention_mask, axis=1, dtype=jnp.int32)
    lengths = prompt_lengths + completions.lengths
    both = jnp.concatenate([prompts.tokens, completions.tokens], axis=1)
    total = prompt_width + width
    columns = jnp.arange(total, dtype=jnp.int32)[None, :] + (prompt_width - prompt_lengths)[:, None]
    tokens = jnp.take_along_axis(both, jnp.minimum(columns, total - 1), axis=1)
    mask = length_mask(lengths, width=total)
    actions = length_mask(completions.lengths, width=width)
    experts = completions.experts
    if experts is not None:
        # Of the last token there is a record only where other rows went on: without it no row depends on another.
        columns = jnp.minimum(columns, total - 2)[:, :, None, None]
        known = length_mask(lengths - 1, width=total)[:, :, None, None]
        experts = jnp.where(known, jnp.take_along_axis(experts, columns, axis=1), -1)
    return Sequences(
        inputs=prompts._replace(
            tokens=jnp.where(mask, tokens, pad_token_id), attention_mask=mask, experts=experts
        ),
        starts=prompt_lengths - 1,
        mask=actions if completions.actions is None else actions & completions.actions,
    )
