# SPDX-License-Identifier: Apache-2.0
"""TRL's collators and its packed data set, as NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jrl.trl.collators import (
    DataCollatorForCompletionOnlyLM,
    DPODataCollatorWithPadding,
    RewardDataCollatorWithPadding,
)
from jrl.trl.constant_length import ConstantLengthDataset
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer


def ids(text):
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def learned_text(batch, row=0):
    kept = batch["labels"][row] != -100
    return tiny_tokenizer().decode(batch["labels"][row][kept])


def completions(*templates, **options):
    return DataCollatorForCompletionOnlyLM(*templates, tokenizer=tiny_tokenizer(), **options)


def test_the_last_response_is_learned_without_an_instruction_template():
    batch = completions("A:")([{"input_ids": ids("Q:a A:b Q:c A:d")}, {"input_ids": ids("A:e")}])
    assert [learned_text(batch, row) for row in range(2)] == ["d", "e"]
    assert batch["attention_mask"].sum(axis=1).tolist() == [15, 3]
    assert (batch["input_ids"][1, 3:] == PAD_ID).all() and (batch["labels"][1, 3:] == -100).all()


def test_every_answer_is_learned_with_one():
    batch = completions("A:", "Q:", ignore_index=-100)([ids("x Q:a A:b Q:c A:d Q:e")])
    assert (
        learned_text(batch) == "b d "
    )  # what stands before the first question is masked, and the last question


def test_templates_may_be_ids():
    text = completions(ids("A:"), ids("Q:"))([ids("Q:a A:b")])
    assert learned_text(text) == "b"


@pytest.mark.parametrize(("templates", "which"), [(("Z:",), "response"), (("A:", "Z:"), "instruction")])
def test_a_row_without_a_template_is_not_learned(templates, which):
    with pytest.warns(UserWarning, match=f"no {which} template 'Z:'"):
        batch = completions(*templates)([ids("Q:a A:b")])
    assert (batch["labels"] == -100).all()


def test_a_collator_needs_its_tokenizer():
    with pytest.raises(ValueError, match="`tokenizer` must be given by name"):
        DataCollatorForCompletionOnlyLM("A:")
    with pytest.raises(ValueError, match="`mlm` must be False"):
        completions("A:", mlm=True)


def test_widths_are_multiples():
    assert completions("A:", pad_to_multiple_of=8)([ids("A:b")])["input_ids"].shape == (1, 8)


def test_both_sides_of_a_comparison_have_widths_of_their_own():
    rows = [
        {"input_ids_chosen": [5, 6, 7], "attention_mask_chosen": [1, 1, 1],
         "input_ids_rejected": [8], "attention_mask_rejected": [1], "margin": 0.5},
        {"input_ids_chosen": [5], "attention_mask_chosen": [1],
         "input_ids_rejected": [9, 9], "attention_mask_rejected": [1, 1], "margin": 0.0},
    ]  # fmt: skip
    batch = RewardDataCollatorWithPadding(tiny_tokenizer())(rows)
    np.testing.assert_array_equal(batch["input_ids_chosen"], [[5, 6, 7], [5, PAD_ID, PAD_ID]])
    np.testing.assert_array_equal(batch["attention_mask_rejected"], [[1, 0], [1, 1]])
    assert batch["margin"].tolist() == [0.5, 0.0] and batch["margin"].shape == (2,) and batch["return_loss"]


def test_texts_are_taken_too():
    batch = RewardDataCollatorWithPadding(tiny_tokenizer(), pad_to_multiple_of=4)(
        [{"chosen": "ab", "rejected": "c"}]
    )
    assert batch["input_ids_chosen"][0].tolist() == [*ids("ab"), EOS_ID, PAD_ID] and "margin" not in batch


PAIRS = [
    {"prompt": "p", "chosen": "ab", "rejected": "c"},
    {"prompt": "long prompt", "chosen": "d", "rejected": "ef"},
]


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch = DPODataCollatorWithPadding(tiny_tokenizer(), padding_value=7, label_pad_token_id=-1)(PAIRS)
    prompt = ids("p")
    width = len(ids("long prompt"))
    assert batch["prompt_input_ids"][0].tolist() == [7] * (width - len(prompt)) + prompt
    assert batch["chosen_input_ids"][0].tolist()[: len(prompt) + 3] == [*prompt, *ids("ab"), EOS_ID]
    assert (batch["chosen_input_ids"][0][len(prompt) + 3 :] == 7).all()
    np.testing.assert_array_equal(
        batch["chosen_labels"] == -1, ~np.isin(batch["chosen_labels"], [*ids("abd"), EOS_ID])
    )
    assert batch["prompt"] == ["p", "long prompt"] and batch["rejected"] == ["c", "ef"]


def test_both_completions_are_cut_to_the_limits():
    limited = DPODataCollatorWithPadding(tiny_tokenizer(), max_length=5, max_prompt_length=3)
    assert all(len(limited.tokenize(row)["rejected_input_ids"]) <= 5 for row in PAIRS)
    with pytest.raises(ValueError, match="nothing of its completions is left"):
        DPODataCollatorWithPadding(tiny_tokenizer(), max_length=4, truncation_mode="keep_start").tokenize(
            PAIRS[1]
        )


TEXTS = [{"text": f"text {i}"} for i in range(9)]


def constant(**options):
    options = {"seq_length": 5, "num_of_sequences": 2, "chars_per_token": 1.0} | options
    return ConstantLengthDataset(tiny_tokenizer(), TEXTS, "text", **options)


def test_rows_of_one_length_hold_all_documents_but_the_end():
    whole = [id_ for row in TEXTS for id_ in [*ids(row["text"]), EOS_ID]]
    rows = list(constant(shuffle=False))
    assert all(len(row["input_ids"]) == 5 for row in rows) and len(rows) == len(constant()) == len(whole) // 5
    np.testing.assert_array_equal(np.concatenate([row["input_ids"] for row in rows]), whole[: len(rows) * 5])
    np.testing.assert_array_equal(rows[0]["labels"], rows[0]["input_ids"])


def test_shuffling_moves_rows_inside_a_buffer_alone():
    plain, mixed = ([row["input_ids"].tolist() for row in constant(shuffle=s)] for s in (False, True))
    assert plain != mixed and sorted(plain) == sorted(mixed)


def test_without_the_concat_token_documents_touch():
    rows = list(constant(append_concat_token=False, shuffle=False))
    assert EOS_ID not in np.concatenate([row["input_ids"] for row in rows])


def test_infinite_data_begin_anew():
    assert len(list(itertools.islice(constant(infinite=True), 40))) == 40
    assert (
        list(constant(infinite=True, seq_length=10_000)) == []
    )  # nothing fills a row, and it ends all the same


def test_a_text_must_come_from_somewhere():
    with pytest.raises(ValueError, match="`dataset_text_field` or `formatting_func`"):
        ConstantLengthDataset(tiny_tokenizer(), TEXTS)
    made = ConstantLengthDataset(
        tiny_tokenizer(), TEXTS, formatting_func=lambda row: row["text"] * 2, seq_length=5
    )
    assert len(made) > len(constant())
