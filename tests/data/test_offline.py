# SPDX-License-Identifier: Apache-2.0
"""Rewarded samples: where the actions are, and what each earns."""

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jrl.data.offline import RewardedSet, check_rewards, index_arrays, standardized
from jrl.data.tokenizer import load_tokenizer
from tests.tiny import EOS_ID, PAD_ID, tiny_t5_tokenizer, tiny_tokenizer

A_TO_U = "abcdefghijklmnopqrstu"
END, PAD = 21, 22


def letters(side="right"):
    """The tokenizer of trlX's examples: a..u are 0..20, BOS is EOS is 21, PAD is 22."""
    vocabulary = {token: index for index, token in enumerate([*A_TO_U, "|", "_"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = dict(bos_token="|", eos_token="|", pad_token="_")
    return load_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special), truncation_side=side
    )


def rewarded(samples, rewards, *, max_length=16, seed=0, side="right", tokenizer=None, start=None):
    return RewardedSet(
        samples,
        rewards,
        tokenizer or letters(side),
        max_length=max_length,
        seed=seed,
        decoder_start_token_id=start,
    )


def rows_of(batch):
    """(ids, columns, actions, rewards) of every row that is no padding, in the order of their ids."""
    found = []
    for tokens, real, columns, mask, rewards in zip(
        batch.inputs.tokens,
        batch.inputs.attention_mask,
        batch.columns,
        batch.mask,
        batch.rewards,
        strict=True,
    ):
        if mask.any():
            taken = columns[mask]
            found.append(
                (tokens[real].tolist(), taken.tolist(), tokens[taken + 1].tolist(), rewards[mask].tolist())
            )
    return sorted(found)


class TestAgainstTrlx:
    """The vectors that trlX's own code gives, release 0.7.0."""

    DIALOGUES = (["b", "dna"], ["c", "ek", "j", "na"])

    def test_index_arrays(self):
        found = rewarded(self.DIALOGUES, [1, 3])
        assert [row.tokens for row in found.rows] == [[1, 3, 13, 0, END], [2, 4, 10, 9, 13, 0, END]]
        arrays = [tuple(array.tolist() for array in index_arrays(row)) for row in found.rows]
        assert arrays == [
            ([0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 1, 1, 1, 0]),
            ([0, 1, 3, 4, 5], [0, 1, 3, 4, 5, 6], [1, 1, 1, 1, 1, 0]),
        ]
        np.testing.assert_allclose(found.rewards, [-0.7071068, 0.7071068], atol=5e-8)

    def test_texts_stand_after_bos(self):
        found = rewarded(["ab", "c", "d"], [0, 1, 5])
        assert [row.tokens for row in found.rows] == [[END, 0, 1, END], [END, 2, END], [END, 3, END]]
        np.testing.assert_allclose(found.rewards, [-0.7559289, -0.3779645, 1.1338934], atol=5e-8)

    @pytest.mark.parametrize(
        ("max_length", "side", "tokens", "learned"),
        [
            (4, "right", [1, 3, 13, 0], [3, 13, 0]),
            (4, "left", [2, 4, 10, END], [4, 10, END]),
            (3, "left", [END, 10, END], [10, END]),
        ],
    )
    def test_cut_samples(self, max_length, side, tokens, learned):
        with pytest.warns(UserWarning, match=f"cut on the {side}"):
            found = rewarded([["b", "dna", "c", "ek"]], [1.0], max_length=max_length, side=side)
        assert (found.num_truncated, found.num_dropped) == (1, 0)
        (row,) = found.rows
        assert row.tokens == tokens and np.array(tokens)[index_arrays(row)[0] + 1].tolist() == learned


class TestBatch:
    def test_lore_8_6_the_last_action_alone_earns_and_actions_stand_one_after_another(self):
        batch = rewarded([["b", "dna"], ["c", "ek", "j", "na"]], [1, 3]).batch(0, 2)
        half = np.float32(np.sqrt(0.5))
        assert rows_of(batch) == [
            ([1, 3, 13, 0, END], [0, 1, 2, 3], [3, 13, 0, END], [0, 0, 0, -half]),
            ([2, 4, 10, 9, 13, 0, END], [0, 1, 3, 4, 5], [4, 10, 13, 0, END], [0, 0, 0, 0, half]),
        ]
        assert batch.inputs.tokens.shape == (2, 8) and batch.mask.shape == (2, 7)
        dtypes = (batch.columns.dtype, batch.mask.dtype, batch.rewards.dtype)
        assert dtypes == (np.int32, bool, np.float32)
        assert not batch.columns[~batch.mask].any() and not batch.rewards[~batch.mask].any()
        assert set(batch.inputs.tokens[~batch.inputs.attention_mask].tolist()) == {PAD}

    def test_a_long_prompt_does_not_widen_the_window(self):
        batch = rewarded([["a" * 40, "b"], ["c", "d" * 9]], [0, 1], max_length=64).batch(0, 2)
        assert batch.inputs.tokens.shape == (2, 48) and batch.mask.shape == (2, 16)

    def test_a_pass_holds_every_sample_once_and_its_reward_goes_with_it(self):
        samples = [["a", letter * count] for count, letter in enumerate("bcdef", start=1)]
        found = rewarded(samples, [1, 2, 3, 4, 5], seed=1)
        passes = []
        for epoch in range(2):
            batches = [found.batch(2 * epoch + step, 3) for step in range(2)]
            assert [batch.mask.any(axis=1).sum() for batch in batches] == [3, 2]
            seen = sorted(row for batch in batches for row in rows_of(batch))
            assert [(row[0][1:-1], row[3][-1]) for row in seen] == [
                ([1 + count] * (1 + count), np.float32(found.rewards[count])) for count in range(5)
            ]
            passes.append([batch.inputs.tokens[:, 1].tolist() for batch in batches])
        assert passes[0] != passes[1]

    def test_lore_9_1_a_step_is_a_function_of_the_seed(self):
        def columns(seed):
            found = rewarded(["ab", "cde", "fghi", "jk", "lm"], range(5), seed=seed)
            return [found.batch(step, 2) for step in (3, 0, 3)]

        first, _, again = columns(7)
        for one, two in zip(first[1:], again[1:], strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(first.rewards, columns(7)[0].rewards)

    def test_masks_come_from_lengths_where_pad_is_eos(self):
        tokenizer = letters()
        tokenizer.pad_token = tokenizer.eos_token
        (short, _) = rows_of(rewarded(["a", "bcdef"], [0, 1], tokenizer=tokenizer).batch(0, 2))
        assert short[:3] == ([END, 0, END], [0, 1], [0, END])


class TestSeq2Seq:
    def test_the_first_output_token_is_an_action(self):
        tokenizer = load_tokenizer(tiny_t5_tokenizer())
        found = rewarded([["ab", "cd"], ["e", "f"]], [0, 1], tokenizer=tokenizer, start=PAD_ID)
        ids = {text: tokenizer(text)["input_ids"] for text in ("ab", "cd", "e", "f")}
        (long, short) = sorted(rows_of(found.batch(0, 2)), key=lambda row: -len(row[0]))
        assert long[:3] == ([PAD_ID, *ids["cd"]], [0, 1, 2], ids["cd"]) and ids["cd"][-1] == EOS_ID
        assert short[:3] == ([PAD_ID, *ids["f"]], [0, 1], ids["f"])
        assert found.contexts == [ids["ab"], ids["e"]]
        batch = found.batch(0, 2)
        contexts = [
            tokens[mask].tolist()
            for tokens, mask in zip(batch.inputs.context_tokens, batch.inputs.context_mask, strict=True)
        ]
        assert sorted(contexts) == sorted(found.contexts)

    @pytest.mark.parametrize("sample", ["a text", ["a", "b", "c", "d"]])
    def test_only_pairs(self, sample):
        with pytest.raises(ValueError, match=r"sample 1 must be a pair \[prompt, output\] .* seq2seq"):
            rewarded(
                [["a", "b"], sample], [0, 1], tokenizer=load_tokenizer(tiny_t5_tokenizer()), start=PAD_ID
            )


class TestTruncation:
    def test_lore_1_13_samples_without_actions_are_dropped_with_their_rewards(self):
        samples = [["abcdef", "g"], ["a", "b"], ["c", "d"], "ijklmn"]
        with pytest.warns(UserWarning, match=r"2 of 4 samples have more than 4 tokens .* 1 lost all") as seen:
            found = rewarded(samples, [100, 1, 2, 3], max_length=4)
        assert len(seen) == 1
        assert (len(found), found.num_truncated, found.num_dropped) == (3, 2, 1)
        np.testing.assert_allclose(found.rewards, [-1, 0, 1], atol=1e-12)
        assert [row.tokens for row in found.rows] == [[0, 1, END], [2, 3, END], [END, 8, 9, 10]]

    def test_no_actions_left_at_all(self):
        with pytest.raises(ValueError, match="nothing to learn from is left of 1 samples at 4 tokens"):
            rewarded([["abcdef", "g"]], [1.0], max_length=4)


class TestRewards:
    def test_one_reward_and_equal_rewards_become_zero_and_are_said(self):
        assert rewarded(["ab"], [5.0]).rewards.tolist() == [0.0]
        with pytest.warns(UserWarning, match=r"All 3 rewards are 0\.1: .* only their likelihood is learned"):
            found = rewarded(["ab", "c", "d"], [0.1, 0.1, 0.1])
        assert found.rewards.tolist() == [0.0, 0.0, 0.0]

    def test_shift_and_scale_change_nothing(self):
        rewards = np.array([0.3, -2.0, 5.0, 1.0])
        np.testing.assert_allclose(standardized(rewards), standardized(1000 * rewards - 7), atol=1e-12)

    def test_any_numbers_will_do(self):
        found = check_rewards([True, 2, np.float32(0.5), np.array([4.0])[0]], num_samples=4)
        assert found.tolist() == [1.0, 2.0, 0.5, 4.0] and found.dtype == np.float64
        assert check_rewards(np.array([1.0, 2.0]), num_samples=2).tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_non_finite_rewards_are_named(self, bad):
        with pytest.raises(ValueError, match=f"`rewards`: entry 1 must be finite, got {bad}"):
            rewarded(["a", "b"], [0.0, bad])

    @pytest.mark.parametrize("bad", ["1.0", None, [1.0, 2.0]])
    def test_what_is_no_number_is_named(self, bad):
        with pytest.raises(TypeError, match="`rewards`: entry 1 must be a number"):
            rewarded(["a", "b"], [0.0, bad])

    def test_counts_must_agree(self):
        with pytest.raises(ValueError, match="one entry a sample: got 1 for 2 samples"):
            rewarded(["a", "b"], [0.0])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["a", ["b", "c", "d"]], r"sample 1 must alternate prompts and outputs.*got 3"),
        (["a", ["b", 3]], "sample 1 must be a text or a list"),
        (["a", ""], r"sample 1 \(''\) has no tokens"),
        ([], "at least one sample"),
    ],
)
def test_bad_samples_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        rewarded(samples, [0.0] * len(samples))


def test_bos_in_the_text_is_not_doubled():
    assert rewarded(["|ab"], [0]).rows == rewarded(["ab"], [0]).rows


def test_samples_are_not_changed_and_fingerprints_tell_samples_from_rewards():
    samples, rewards = [["a", "b"], "cd"], [1.0, 2.0]
    first = rewarded(samples, rewards)
    assert (samples, rewards) == ([["a", "b"], "cd"], [1.0, 2.0])
    other = rewarded(samples, [2.0, 4.0])
    # Standardised they are the same; a run was given others all the same.
    np.testing.assert_allclose(first.rewards, other.rewards, rtol=1e-12)
    assert first.sha256() == other.sha256() and first.rewards_sha256() != other.rewards_sha256()
    assert first.sha256() != rewarded(["cd", ["a", "b"]], rewards).sha256()


def test_a_merge_across_messages_does_not_move_the_border():
    # "t" + "h" is one token of this tokenizer: messages are tokenised one by one.
    tokenizer = load_tokenizer(tiny_tokenizer())
    found = rewarded([["t", "h"]], [0], tokenizer=tokenizer)
    assert len(found.rows[0].tokens) == 3 and index_arrays(found.rows[0])[0].tolist() == [0, 1]
