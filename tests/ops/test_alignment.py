# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.alignment import (
    join,
    learned_targets,
    length_mask,
    next_predictions,
    next_tokens,
    next_values,
    states_at,
    targets_at,
    window_columns,
    window_states,
    window_targets,
)
from jrl.typing import Completions, ModelInputs

PAD, EOS = 0, 9


def completions(tokens: list[list[int]], lengths: list[int]) -> Completions:
    shape = jnp.array(tokens).shape
    return Completions(
        tokens=jnp.array(tokens),
        lengths=jnp.array(lengths),
        terminated=jnp.zeros(shape[0], bool),
        logprobs=jnp.zeros(shape),
    )


class TestWholeRows:
    def test_a_row_is_the_window_that_starts_at_column_0(self):
        tokens = jnp.array([[1, 2, 3, 4], [5, 6, EOS, PAD]])
        starts = jnp.zeros(2, jnp.int32)
        assert next_tokens(tokens).tolist() == window_targets(tokens, starts, width=3).tolist()
        hidden = jnp.arange(24.0).reshape(2, 4, 3)
        assert next_predictions(hidden).tolist() == window_states(hidden, starts, width=3).tolist()


class TestWindow:
    def test_golden(self):
        # columns 0..5: p0 p1 p2 a0 a1 eos. Prompt of 3: starts = 2, states p2 a0 a1, actions a0 a1 eos.
        tokens, starts = jnp.array([[1, 2, 3, 4, 5, EOS]]), jnp.array([2])
        assert window_columns(starts, width=3, length=6).tolist() == [[2, 3, 4]]
        assert window_targets(tokens, starts, width=3).tolist() == [[4, 5, EOS]]
        hidden = tokens[:, :, None].astype(jnp.float32)
        assert window_states(hidden, starts, width=3)[:, :, 0].tolist() == [[3.0, 4.0, 5.0]]

    def test_targets_of_whole_rows_begin_at_the_second_token(self):
        # prompt of 2, two learned tokens: the states in columns 1 and 2 predict them; the first flag is dropped.
        flags = [False, False, True, True]
        assert learned_targets(flags).tolist() == [False, True, True]
        assert learned_targets(np.array([flags, [True, False, False, True]])).tolist() == [
            [False, True, True],
            [False, False, True],
        ]
        assert not learned_targets([True]).any() and not learned_targets([]).any()

    def test_overhang_is_clipped_to_the_row(self):
        assert window_columns(jnp.array([2]), width=4, length=4).tolist() == [[2, 3, 3, 3]]

    def test_lore_1_6_states_predict_the_token_one_to_the_right(self):
        """A model whose state at column s is s itself: the action of each state is the token at s + 1."""
        tokens = jnp.arange(10, 22).reshape(2, 6)
        starts = jnp.array([0, 3])
        columns = jnp.broadcast_to(jnp.arange(6.0)[None, :, None], (2, 6, 1))
        states = window_states(columns, starts, width=2)[:, :, 0]
        targets = window_targets(tokens, starts, width=2)
        for row in range(2):
            for t in range(2):
                assert targets[row, t] == tokens[row, int(states[row, t]) + 1]
        assert targets.tolist() == [[11, 12], [20, 21]]


def test_the_next_value_is_one_to_the_right_and_0_at_the_end():
    values = jnp.array([[0.25, 0.5, 1.0], [2.0, 0.0, 0.0]])
    np.testing.assert_array_equal(next_values(values), [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]])
    weights = jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    slope = jax.grad(lambda v: jnp.sum(weights * next_values(v)))(values)
    np.testing.assert_array_equal(slope, [[0.0, 1.0, 2.0], [0.0, 8.0, 16.0]])


class TestColumns:
    def test_golden(self):
        # A dialogue p0 a0 eos p1 a1: the actions a0, eos and a1 are chosen in columns 0, 1 and 3.
        tokens = jnp.array([[1, 2, EOS, 3, 4]])
        columns = jnp.array([[0, 1, 3]])
        assert targets_at(tokens, columns).tolist() == [[2, EOS, 4]]
        hidden = tokens[:, :, None].astype(jnp.float32)
        assert states_at(hidden, columns)[:, :, 0].tolist() == [[1.0, 2.0, 3.0]]

    def test_a_run_of_columns_is_a_window(self):
        tokens, starts = jnp.arange(12).reshape(2, 6), jnp.array([0, 3])
        columns = window_columns(starts, width=3, length=6)
        np.testing.assert_array_equal(targets_at(tokens, columns), window_targets(tokens, starts, width=3))


class TestLengthMask:
    def test_lore_1_5_everything_after_the_end_is_masked_and_nothing_before(self):
        """The end at index 0, in the middle, last, and a row without any token."""
        mask = length_mask(jnp.array([1, 3, 4, 0]), width=4)
        expected = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
        np.testing.assert_array_equal(mask, np.array(expected, bool))


class TestJoin:
    prompts = ModelInputs(
        tokens=jnp.array([[PAD, PAD, 1, 2], [3, 4, 5, 6]]),
        attention_mask=jnp.array([[False, False, True, True], [True, True, True, True]]),
    )

    def test_golden(self):
        joined = join(self.prompts, completions([[7, EOS, PAD], [8, 7, 8]], [2, 3]), pad_token_id=PAD)
        assert joined.inputs.tokens.tolist() == [[1, 2, 7, EOS, PAD, PAD, PAD], [3, 4, 5, 6, 8, 7, 8]]
        assert jnp.sum(joined.inputs.attention_mask, axis=1).tolist() == [4, 7]
        assert joined.starts.tolist() == [1, 3]
        assert joined.mask.tolist() == [[True, True, False], [True, True, True]]

    def test_sampled_ids_are_the_trained_ids(self):
        sampled = completions([[7, 7, EOS], [EOS, PAD, PAD]], [3, 1])
        joined = join(self.prompts, sampled, pad_token_id=PAD)
        targets = window_targets(joined.inputs.tokens, joined.starts, width=3)
        np.testing.assert_array_equal(targets[joined.mask], sampled.tokens[joined.mask])

    def test_eos_is_an_action_even_where_it_is_the_padding(self):
        joined = join(self.prompts, completions([[7, EOS, EOS], [EOS, EOS, EOS]], [2, 1]), pad_token_id=EOS)
        targets = window_targets(joined.inputs.tokens, joined.starts, width=3)
        assert jnp.sum((targets == EOS) & joined.mask, axis=1).tolist() == [1, 1]

    @pytest.mark.parametrize("pads", [0, 1, 5])
    def test_left_padding_changes_nothing(self, pads):
        sampled = completions([[7, EOS, PAD], [8, 7, 8]], [2, 3])
        wide = ModelInputs(*(jnp.pad(x, ((0, 0), (pads, 0))) for x in self.prompts[:2]))
        plain = join(self.prompts, sampled, pad_token_id=PAD)
        padded = join(wide, sampled, pad_token_id=PAD)
        np.testing.assert_array_equal(padded.inputs.tokens[:, :7], plain.inputs.tokens)
        np.testing.assert_array_equal(padded.starts, plain.starts)
        assert not padded.inputs.attention_mask[:, 7:].any()

    def test_jit_equals_eager(self):
        sampled = completions([[7, EOS, PAD], [8, 7, 8]], [2, 3])
        eager = join(self.prompts, sampled, pad_token_id=PAD)
        jitted = jax.jit(join, static_argnames="pad_token_id")(self.prompts, sampled, pad_token_id=PAD)
        jax.tree.map(np.testing.assert_array_equal, eager, jitted)
