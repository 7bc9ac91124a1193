# SPDX-License-Identifier: Apache-2.0
import copy

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jrl.data.demonstrations.dialogue import DialogueSet, tokenize_dialogue
from jrl.data.tokenizer import load_tokenizer, tokenize
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer

BOS_ID = tiny_tokenizer().convert_tokens_to_ids("^")


def tokenizer_with(*, side="right", bos="^"):
    tokenizer = load_tokenizer(tiny_tokenizer(), truncation_side=side)
    tokenizer.bos_token = bos
    return tokenizer


def ids(text):
    return tokenize(tiny_tokenizer(), [text])[0]


def row(messages, *, max_length=16, side="right", bos="^"):
    """(ids of the whole row, learned ids, cut) of a dialogue."""
    found, truncated = tokenize_dialogue(
        tokenize(tiny_tokenizer(), messages), tokenizer_with(side=side, bos=bos), max_length=max_length
    )
    learned = [token for token, flag in zip(found.tokens, found.learned, strict=True) if flag]
    return found.tokens, learned, truncated


class TestTokenizeDialogue:
    """The cases that trlX's own tests hold."""

    DIALOGUE = ("b", "dna", "c", "ek")

    def test_eos_follows_the_output(self):
        assert row(["b", "dna"]) == ([*ids("bdna"), EOS_ID], [*ids("dna"), EOS_ID], False)

    def test_eos_in_the_text_is_not_doubled(self):
        assert row(["b", "dna<eos>"]) == row(["b", "dna"])

    def test_only_outputs_are_learned(self):
        assert row(self.DIALOGUE) == ([*ids("bdnacek"), EOS_ID], [*ids("dnaek"), EOS_ID], False)

    def test_lore_1_8_a_cut_end_teaches_no_eos(self):
        assert row(self.DIALOGUE, max_length=4) == (ids("bdna"), ids("dna"), True)

    def test_left_truncation_keeps_the_end(self):
        kept = [*ids("cek"), EOS_ID]
        assert row(self.DIALOGUE, max_length=4, side="left") == (kept, kept[1:], True)
        # e k EOS would start with an output: BOS takes the first place.
        kept = [*ids("k"), EOS_ID]
        assert row(self.DIALOGUE, max_length=3, side="left") == ([BOS_ID, *kept], kept, True)

    def test_bos_stands_before_an_output_that_comes_first(self):
        assert row(["", "dna"]) == ([BOS_ID, *ids("dna"), EOS_ID], [*ids("dna"), EOS_ID], False)

    def test_bos_takes_a_token_from_a_full_row(self):
        assert row(["", "dna"], max_length=4) == ([BOS_ID, *ids("dna")], ids("dna"), True)
        kept = [*ids("na"), EOS_ID]
        assert row(["", "dna"], max_length=4, side="left") == ([BOS_ID, *kept], kept, True)

    def test_eos_stands_in_for_a_missing_bos(self):
        assert row(["", "a"], bos=None)[0] == [EOS_ID, *ids("a"), EOS_ID]


def dialogue_set(samples, *, max_length=16, seed=0, tokenizer=None):
    return DialogueSet(samples, tokenizer or tokenizer_with(), max_length=max_length, seed=seed)


def targets(batch):
    """Ids that each row learns."""
    return [
        tokens[mask].tolist() for tokens, mask in zip(batch.inputs.tokens[:, 1:], batch.mask, strict=True)
    ]


class TestBatch:
    def test_a_text_is_learned_whole_and_ends(self):
        batch = dialogue_set(["abc"]).batch(0, 1)
        assert batch.inputs.tokens.tolist() == [[*ids("abc"), EOS_ID] + [PAD_ID] * 4]
        assert batch.inputs.attention_mask.sum() == 4
        assert targets(batch) == [[*ids("bc"), EOS_ID]]
        assert batch.starts.tolist() == [0] and batch.mask.shape == (1, 7)
        assert (batch.inputs.tokens.dtype, batch.starts.dtype, batch.mask.dtype) == (np.int32, np.int32, bool)

    def test_bos_where_the_tokenizer_writes_it(self):
        tokenizer = tokenizer_with()
        processor = TemplateProcessing(single="^ $A", special_tokens=[("^", BOS_ID)])
        tokenizer.backend_tokenizer.post_processor = processor
        batch = dialogue_set(["abc"], tokenizer=tokenizer).batch(0, 1)
        assert batch.inputs.tokens[0, 0] == BOS_ID
        assert targets(batch) == [[*ids("abc"), EOS_ID]]

    def test_lore_1_3_pad_may_be_eos(self):
        tokenizer = tokenizer_with()
        tokenizer.pad_token = tokenizer.eos_token
        batch = dialogue_set(["abc", ["a", "bcdef"]], tokenizer=tokenizer).batch(0, 2)
        assert sorted(targets(batch)) == sorted([[*ids("bc"), EOS_ID], [*ids("bcdef"), EOS_ID]])
        assert sorted(batch.inputs.attention_mask.sum(axis=1)) == [4, 7]

    def test_lore_1_7_prompts_are_context(self):
        batch = dialogue_set([["ab", "cd", "ef", "gh"]]).batch(0, 1)
        assert targets(batch) == [[*ids("cdgh"), EOS_ID]]

    def test_a_pass_holds_every_sample_once_and_fills_up_with_masked_rows(self):
        found = dialogue_set(["ab", "cde", "fghi", "jk", ["l", "mnopqrstu"]], seed=1)
        passes = []
        for epoch in range(2):
            batches = [found.batch(2 * epoch + step, 3) for step in range(2)]
            assert [batch.mask.shape[0] for batch in batches] == [3, 3]
            learned = [tuple(one) for batch in batches for one in targets(batch)]
            assert learned.count(()) == 1 and len(set(learned)) == 6
            assert batches[1].inputs.attention_mask.any(axis=1).all()
            passes.append(learned)
        assert passes[0] != passes[1]

    def test_lore_9_1_a_step_is_a_function_of_the_seed(self):
        samples = ["ab", "cde", "fghi", "jk", "lm"]
        forward = [dialogue_set(samples, seed=7).batch(step, 2).inputs.tokens for step in range(9)]
        again = dialogue_set(samples, seed=7)
        for step in reversed(range(9)):
            np.testing.assert_array_equal(again.batch(step, 2).inputs.tokens, forward[step])
        other = [dialogue_set(samples, seed=8).batch(step, 2).inputs.tokens for step in range(9)]
        assert any(one.tolist() != two.tolist() for one, two in zip(forward, other, strict=True))

    def test_width_stays_within_the_limit(self):
        assert dialogue_set(["abcdefghi"], max_length=10).batch(0, 1).inputs.tokens.shape == (1, 10)


class TestTruncation:
    def test_lore_1_13_cut_samples_are_counted_and_empty_ones_dropped(self):
        with pytest.warns(UserWarning, match=r"2 of 3 samples have more than 4 tokens .* 1 lost all") as seen:
            found = dialogue_set(["abcdef", ["abcdef", "g"], ["a", "b"]], max_length=4)
        assert len(seen) == 1
        assert (len(found), found.num_truncated, found.num_dropped) == (2, 2, 1)

    def test_lore_1_8_a_cut_text_teaches_no_end(self):
        with pytest.warns(UserWarning, match="cut on the right"):
            found = dialogue_set(["abcdef"], max_length=4)
        assert targets(found.batch(0, 1)) == [ids("bcd")]

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="nothing to learn from is left of 1 samples at 4 tokens"):
            dialogue_set([["abcdef", "g"]], max_length=4)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["a", ["b", "c", "d"]], r"sample 1 must alternate prompts and outputs.*got 3"),
        (["a", []], r"sample 1 .* got 0"),
        (["a", ["b", 3]], "sample 1 must be a text or a list"),
        (["ab", 3], "sample 1 must be a text or a list"),
        (["ab", ""], r"sample 1 .* has no tokens"),
        ([], "at least one sample"),
        ("ab", "list of samples"),
    ],
)
def test_bad_samples_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        dialogue_set(samples)


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must have an EOS token"):
        dialogue_set(["ab"], tokenizer=tokenizer)


def test_samples_are_not_changed():
    samples = [["a", "b"], "cd"]
    dialogue_set(samples)
    assert samples == [["a", "b"], "cd"]
