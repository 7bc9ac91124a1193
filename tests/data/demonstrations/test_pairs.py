# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from jrl.data.demonstrations.pairs import PairSet
from jrl.data.tokenizer import load_tokenizer, tokenize
from tests.tiny import EOS_ID, PAD_ID, tiny_t5_tokenizer, tiny_tokenizer

PAIRS = (["abc", "xy"], ["d", "uvw"], ["ef", "z<eos>"])


def ids(text):
    return tokenize(tiny_t5_tokenizer(), [text])[0]


def pair_set(samples=PAIRS, *, max_length=16, seed=0, side="right"):
    tokenizer = load_tokenizer(tiny_t5_tokenizer(), truncation_side=side)
    return PairSet(samples, tokenizer, max_length=max_length, seed=seed, decoder_start_token_id=PAD_ID)


def rows(found):
    """(context, decoder row, learned ids) of each sample, in a set order."""
    inputs, starts, mask = found.batch(0, len(found))
    assert starts.tolist() == [0] * len(found)
    return sorted(
        (
            inputs.context_tokens[row][inputs.context_mask[row]].tolist(),
            inputs.tokens[row][inputs.attention_mask[row]].tolist(),
            inputs.tokens[row, 1:][mask[row]].tolist(),
        )
        for row in range(len(found))
    )


class TestRows:
    def test_golden(self):
        assert rows(pair_set()) == sorted(
            ([*ids(prompt), EOS_ID], [PAD_ID, *ids(output), EOS_ID], [*ids(output), EOS_ID])
            for prompt, output in (("abc", "xy"), ("d", "uvw"), ("ef", "z"))
        )

    def test_an_empty_output_is_an_end(self):
        assert rows(pair_set([["a", ""]])) == [([*ids("a"), EOS_ID], [PAD_ID, EOS_ID], [EOS_ID])]

    @pytest.mark.parametrize(("side", "prompt", "output"), [("right", "abc", "uvw"), ("left", "cde", "xy")])
    def test_prompts_keep_their_end_and_outputs_lose_it(self, side, prompt, output):
        with pytest.warns(UserWarning, match="1 of 1 samples have a prompt of more than 3 tokens"):
            found = pair_set([["abcde", "uvwxy"]], max_length=4, side=side)
        kept = ids(output) + [EOS_ID] * (side == "left")
        assert rows(found) == [([*ids(prompt), EOS_ID], [PAD_ID, *kept], kept)]
        assert (found.num_truncated, found.num_dropped) == (1, 0)


class TestBatches:
    def test_every_sample_once_a_pass_and_copies_are_masked(self):
        found = pair_set()
        first, last = found.batch(0, 2), found.batch(1, 2)
        assert [part.mask.any(axis=1).tolist() for part in (first, last)] == [[True, True], [True, False]]
        contexts = [row.tobytes() for row in (*first.inputs.context_tokens, last.inputs.context_tokens[0])]
        assert len(set(contexts)) == 3

    def test_widths_are_buckets(self):
        inputs, _, mask = pair_set([["a" * 9, "b"]]).batch(0, 1)
        assert (inputs.context_tokens.shape, inputs.tokens.shape, mask.shape) == ((1, 16), (1, 8), (1, 7))
        assert inputs.context_tokens.dtype == np.int32 and inputs.context_mask.dtype == bool

    def test_the_fingerprint_tells_prompts_from_outputs(self):
        found = {pair_set([pair]).sha256() for pair in (["a", "bc"], ["ab", "c"], ["a", "cb"])}
        assert len(found) == 3


@pytest.mark.parametrize("sample", ["text", ["a"], ["a", "b", "c", "d"], ["a", 1]])
def test_only_pairs_of_texts(sample):
    with pytest.raises(ValueError, match=r"sample 1 must be a pair \[prompt, output\] of texts"):
        pair_set([["a", "b"], sample])


def test_what_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match=r"`max_length` must leave room .* got 1"):
        pair_set(max_length=1)
    with pytest.raises(ValueError, match="`samples` must be a list"):
        pair_set([])


def test_a_prompt_without_tokens_is_refused():
    plain = load_tokenizer(tiny_tokenizer())
    with pytest.raises(ValueError, match="prompt of sample 1 has no tokens"):
        PairSet([["a", "b"], ["", "c"]], plain, max_length=8, seed=0, decoder_start_token_id=PAD_ID)
    # Where the tokenizer puts an end behind it, there is something to read.
    assert len(pair_set([["", "c"]])) == 1
