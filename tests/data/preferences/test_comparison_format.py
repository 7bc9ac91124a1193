# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jrl.data.batching import bucket_length
from jrl.data.preferences.preference_set import ComparisonSet
from jrl.data.tokenizer import load_tokenizer, tokenize
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer

BOS_ID = tiny_tokenizer().convert_tokens_to_ids("^")
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def tokenizer_with(*, bos=None, template=None):
    tokenizer = load_tokenizer(tiny_tokenizer())
    if bos is not None:
        tokenizer.bos_token = bos
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
        )
    tokenizer.chat_template = template
    return tokenizer


def ids(text):
    return tokenize(tiny_tokenizer(), [text])[0]


def pair(chosen, rejected, prompt=None, **columns):
    found = {"chosen": chosen, "rejected": rejected, **columns}
    return found if prompt is None else {"prompt": prompt, **found}


def comparison_set(*records, tokenizer=None, max_length=64, seed=0, **options):
    return ComparisonSet(
        list(records), tokenizer or tokenizer_with(), max_length=max_length, seed=seed, **options
    )


def said(role, content):
    return {"role": role, "content": content}


USER, GOOD, BAD = said("user", "hi"), said("assistant", "yes"), said("assistant", "no")


class TestRows:
    @pytest.mark.parametrize("record", [pair("he", "o", "at"), pair("athe", "ato")])
    def test_prompt_and_completion_are_one_text(self, record):
        assert comparison_set(record).rows == [([*ids("athe"), EOS_ID], [*ids("ato"), EOS_ID], 0.0)]

    def test_lore_1_10_bos_comes_once_and_eos_is_not_doubled(self):
        found = comparison_set(
            pair("b<eos>", "c", "a"), pair("^ab", "^ac"), tokenizer=tokenizer_with(bos="^")
        )
        expected = ([BOS_ID, *ids("ab"), EOS_ID], [BOS_ID, *ids("ac"), EOS_ID], 0.0)
        assert found.rows == [expected, expected]

    @pytest.mark.parametrize(
        "record",
        [
            pair([GOOD], [BAD], [USER]),
            pair([USER, GOOD], [USER, BAD]),
            pair([USER, GOOD], [USER, BAD], [USER]),
        ],
        ids=["explicit", "implicit", "repeated"],
    )
    def test_messages(self, record):
        prompt = [*ids("[user]hi"), EOS_ID, *ids(" [assistant]")]
        rows = comparison_set(record, tokenizer=tokenizer_with(template=TEMPLATE)).rows
        assert rows == [([*prompt, *ids("yes"), EOS_ID], [*prompt, *ids("no"), EOS_ID], 0.0)]

    def test_dialogues_need_no_common_message(self):
        record = pair([USER, GOOD], [said("user", "ho"), BAD])
        assert len(comparison_set(record, tokenizer=tokenizer_with(template=TEMPLATE))) == 1

    def test_an_encoder_reads_its_own_special_tokens(self):
        tokenizer = load_tokenizer(tiny_tokenizer())
        tokenizer.eos_token = None
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="^ $A |", special_tokens=[(text, ids(text)[0]) for text in "^|"]
        )
        assert comparison_set(pair("b", "c", "a"), tokenizer=tokenizer).rows == [
            (ids("^ab|"), ids("^ac|"), 0.0)
        ]

    @pytest.mark.parametrize("margin", [2, 2.0, "2", np.float32(2)])
    def test_margins(self, margin):
        rows = comparison_set(pair("a", "b", margin=margin), pair("c", "d", margin=None)).rows
        assert [row.margin for row in rows] == [2.0, 0.0]


class TestTokenColumns:
    @pytest.mark.parametrize(
        "names",
        [
            ("input_ids_chosen", "input_ids_rejected"),
            ("chosen_input_ids", "rejected_input_ids"),
            ("chosen_ids", "rejected_ids"),
        ],
    )
    def test_ids_are_taken_as_they_are(self, names):
        record = {names[0]: [5, 6, 7], names[1]: np.array([5, 8]), "margin": 1.5}
        assert comparison_set(record).rows == [([5, 6, 7], [5, 8], 1.5)]

    def test_padding_of_either_side_is_left_out(self):
        record = {
            "input_ids_chosen": [PAD_ID, 5, PAD_ID],
            "attention_mask_chosen": [0, 1, 1],
            "input_ids_rejected": [7, PAD_ID],
            "attention_mask_rejected": [1, 0],
        }
        # Masks say what is padding, not ids: the last one is a token.
        assert comparison_set(record).rows == [([5, PAD_ID], [7], 0.0)]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"input_ids_rejected": [0.5]},
                r"must be a list of token ids .* got shapes \(1,\) .* dtype float64",
            ),
            ({"attention_mask_chosen": [1]}, r"of row 1 must be a list .* got shapes \(2,\) and \(1,\)"),
            ({"input_ids_chosen": [5, -100]}, "`input_ids_chosen` of row 1 must be ids of the tokenizer"),
            ({"input_ids_rejected": [97]}, r"in \[0, 97\), got 97"),
            ({"margin": float("inf")}, "`margin` of row 1 must be a finite number, got inf"),
        ],
    )
    def test_bad_rows_are_named(self, change, message):
        record = {"input_ids_chosen": [5, 6], "input_ids_rejected": [7]}
        with pytest.raises(ValueError, match=message):
            comparison_set(record, record | change)

    def test_a_missing_column_is_named(self):
        with pytest.raises(
            ValueError, match=r"row 0 needs the column 'rejected_ids', it has \['chosen_ids'\]"
        ):
            comparison_set({"chosen_ids": [5]})


class TestLimits:
    def test_long_pairs_are_left_out_not_cut(self):
        with pytest.warns(
            UserWarning, match="2 of 3 pairs have a text of more than 4 tokens .* 1 are left"
        ) as seen:
            found = comparison_set(pair("abcd", "e"), pair("abc", "abd"), pair("f", "ghij"), max_length=4)
        assert (found.kept, found.num_dropped, found.num_truncated) == ([1], 2, 0)
        assert seen[0].filename == __file__

    def test_nothing_left(self):
        with pytest.raises(ValueError, match=r"all 2 pairs have a text of more than 2 tokens \(.* needs 3\)"):
            comparison_set(pair("ab", "c"), pair("abc", "d"), max_length=2)


class TestBatch:
    def test_golden(self):
        batch = comparison_set(pair("abc", "d", margin=0.5)).batch(0, 2)
        assert batch.chosen.tokens.tolist() == [[*ids("abc"), EOS_ID] + [PAD_ID] * 4] * 2
        assert batch.rejected.tokens.tolist() == [[*ids("d"), EOS_ID] + [PAD_ID] * 6] * 2
        assert batch.chosen.attention_mask.sum(axis=1).tolist() == [4, 4]
        assert (batch.valid.tolist(), batch.margins.tolist()) == ([True, False], [0.5, 0.5])
        kinds = batch.chosen.tokens.dtype, batch.chosen.attention_mask.dtype, batch.margins.dtype
        assert kinds == (np.int32, bool, np.float32)

    def test_both_halves_have_the_width_of_the_longest(self):
        batch = comparison_set(pair("a" * 20, "b")).batch(0, 1)
        assert batch.chosen.tokens.shape == batch.rejected.tokens.shape == (1, bucket_length(21))
        batch = comparison_set(pair("a", "b" * 8), max_length=9).batch(0, 1)
        assert batch.chosen.tokens.shape == batch.rejected.tokens.shape == (1, 9)

    def test_a_pass_holds_every_pair_once_in_an_order_of_the_seed(self):
        records = [pair("a" * n, "b", margin=n) for n in range(1, 8)]

        def margins(seed):
            batches = [comparison_set(*records, seed=seed).batch(step, 3) for step in range(3)]
            return [value for batch in batches for value in batch.margins[batch.valid].tolist()]

        assert sorted(margins(0)) == sorted(margins(1)) == list(range(1, 8))
        assert margins(0) != margins(1)

    def test_the_fingerprint_tells_pairs_apart(self):
        records = [pair("a", "b"), pair("b", "a"), pair("a", "b", margin=1), pair("ab", "b")]
        assert len({comparison_set(record).sha256() for record in records}) == 4


@pytest.mark.parametrize(
    "other",
    [
        pair("b", "b"),
        {"input_ids_chosen": [5, 6], "input_ids_rejected": [5, 6]},
        {"input_ids_chosen": [5, 6], "input_ids_rejected": []},
    ],
)
def test_equal_halves_and_rows_without_tokens_are_left_out_with_one_warning(other):
    ids = {"input_ids_chosen": [5, 6], "input_ids_rejected": [5]}
    good = pair("a", "b") if "chosen" in other else ids
    with pytest.warns(UserWarning, match="1 of 2 pairs .* dropped; 1 are left") as told:
        found = comparison_set(good, other)
    assert len(told) == 1 and (found.kept, found.num_dropped) == ([0], 1)


def test_an_empty_text_is_its_end_alone():
    assert comparison_set(pair("b", "")).rows[0].rejected == [EOS_ID]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "b"}, r"row 1 needs the column 'rejected', it has \['chosen'\]"),
        (pair("b", None), "`rejected` of row 1 must be a text"),
        (pair([USER, GOOD], [USER, BAD]), "row 1: .*need a chat template"),
        (pair("b", "c", margin=float("nan")), "`margin` of row 1 must be a finite number, got nan"),
    ],
)
def test_bad_rows_are_named(record, message):
    with pytest.raises(ValueError, match=message) as caught:
        comparison_set(pair("a", "b"), record)
    assert "\n" not in str(caught.value)
