# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from jrl.data.demonstrations.completions import CompletionSet

PROMPTS, COMPLETIONS = [[5, 6, 7], [8]], [[9, 1], [2, 3, 4]]
PAD = 0


def completion_set(start=None, **changes):
    options = {"pad_token_id": PAD, "max_length": 16, "seed": 0} | changes
    return CompletionSet(PROMPTS, COMPLETIONS, decoder_start_token_id=start, **options)


def rows(batch):
    """(tokens, learned tokens) of each row."""
    return sorted(
        (tokens[real].tolist(), tokens[1:][mask].tolist())
        for tokens, real, mask in zip(
            batch.inputs.tokens, batch.inputs.attention_mask, batch.mask, strict=True
        )
    )


def test_lore_1_1_the_sampled_ids_are_learned_and_nothing_is_added():
    batch = completion_set().batch(0, 2)
    assert rows(batch) == [([5, 6, 7, 9, 1], [9, 1]), ([8, 2, 3, 4], [2, 3, 4])]
    assert batch.starts.tolist() == [0, 0] and batch.inputs.context_tokens is None


def test_an_encoder_reads_the_prompts():
    batch = completion_set(start=0).batch(0, 2)
    assert rows(batch) == [([0, 2, 3, 4], [2, 3, 4]), ([0, 9, 1], [9, 1])]
    contexts = {
        tuple(row[real].tolist()): tuple(tokens[: len(completion) + 1].tolist())
        for row, real, tokens, completion in zip(
            batch.inputs.context_tokens,
            batch.inputs.context_mask,
            batch.inputs.tokens,
            [COMPLETIONS[0 if tokens[1] == 9 else 1] for tokens in batch.inputs.tokens],
            strict=True,
        )
    }
    assert contexts == {(5, 6, 7): (0, 9, 1), (8,): (0, 2, 3, 4)}


@pytest.mark.parametrize("start", [None, 0])
def test_a_batch_that_is_not_filled_has_masked_copies(start):
    batch = completion_set(start=start).batch(0, 5)
    assert batch.mask.any(axis=1).sum() == 2 and batch.mask.shape[0] == 5


def test_every_pass_has_each_row_once_in_an_order_of_its_own():
    prompts = [[token] for token in range(2, 12)]
    found = CompletionSet(
        prompts, [[1]] * 10, pad_token_id=PAD, max_length=8, seed=3, decoder_start_token_id=None
    )
    orders = [
        np.concatenate([found.batch(step, 5).inputs.tokens[:, 0] for step in (first, first + 1)]).tolist()
        for first in (0, 2)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(2, 12))
    assert orders[0] != orders[1]


def test_rows_are_no_wider_than_allowed():
    assert completion_set(max_length=5).batch(0, 2).inputs.tokens.shape == (2, 5)
    assert completion_set().batch(0, 2).inputs.tokens.shape == (2, 8)
