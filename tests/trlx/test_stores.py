# SPDX-License-Identifier: Apache-2.0
"""Stores and dialogues: what trlX's own code gives for the same samples, and where jrl is stricter."""

import json

import numpy as np
import pytest

import jrl.trlx as trlx
from jrl.trlx.dialogue import messages_of, row_of, split_samples
from tests.data.test_offline import letters

PAD = 22


def tokens_of(messages):
    return [(message.is_output, message.tokens) for message in messages]


class TestTokenizeDialogue:
    """Vectors of trlX's own function."""

    def test_pairs_and_texts(self):
        assert tokens_of(trlx.tokenize_dialogue(["b", "dna"], letters(), 11)) == [
            (False, (1,)),
            (True, (3, 13, 0, 21)),
        ]
        assert tokens_of(trlx.tokenize_dialogue("bdna", letters(), 11)) == [
            (False, (21,)),
            (True, (1, 3, 13, 0, 21)),
        ]

    @pytest.mark.parametrize(
        ("side", "max_length", "expected"),
        [
            ("right", 4, [(False, (1,)), (True, (3, 13, 0))]),
            ("left", 4, [(False, (2,)), (True, (4, 10, 21))]),
            ("left", 3, [(False, (21,)), (True, (10, 21))]),
        ],
    )
    def test_truncation(self, side, max_length, expected):
        found = trlx.tokenize_dialogue(["b", "dna", "c", "ek"], letters(side), max_length)
        assert tokens_of(found) == expected

    def test_turns_stay_apart_and_empty_ones_disappear(self):
        found = trlx.tokenize_dialogue(["a", "", "c", "d"], letters(), 16)
        assert tokens_of(found) == [(False, (0,)), (False, (2,)), (True, (3, 21))]
        assert tokens_of(trlx.tokenize_dialogue(["", "b"], letters(), 16)) == [
            (False, (21,)),
            (True, (1, 21)),
        ]

    def test_eos_is_not_doubled(self):
        assert tokens_of(trlx.tokenize_dialogue(["a", "b|"], letters()))[1] == (True, (1, 21))

    @pytest.mark.parametrize("dialogue", [["a"], ["a", "b", "c"], []])
    def test_an_odd_number_of_texts_is_an_error(self, dialogue):
        with pytest.raises(ValueError, match=f"even number of texts, got {len(dialogue)}"):
            trlx.tokenize_dialogue(dialogue, letters())

    def test_messages_and_rows_are_the_same(self):
        messages = trlx.tokenize_dialogue(["b", "dna", "c", "ek"], letters())
        assert messages_of(row_of(messages)) == messages


class TestILQL:
    def test_a_store_holds_what_trlx_computes(self):
        store = trlx.make_experience([["b", "dna"], ["c", "ek", "j", "na"]], [1, 3], letters(), 11)
        assert isinstance(store, trlx.ILQLRolloutStorage) and len(store) == 2
        first, second = store[0], store[1]
        assert first.input_ids.tolist() == [1, 3, 13, 0, 21] and first.attention_mask.tolist() == [1] * 5
        np.testing.assert_allclose(first.rewards, [0, 0, 0, -0.7071068], atol=1e-6)
        assert first.states_ixs.tolist() == [0, 1, 2, 3, 4] and first.actions_ixs.tolist() == [0, 1, 2, 3]
        assert first.dones.tolist() == [1, 1, 1, 1, 0]
        assert second.input_ids.tolist() == [2, 4, 10, 9, 13, 0, 21]
        assert second.states_ixs.tolist() == [0, 1, 3, 4, 5, 6]
        assert second.actions_ixs.tolist() == [0, 1, 3, 4, 5]
        assert second.dones.tolist() == [1, 1, 1, 1, 1, 0]

    def test_returns_are_standardised_over_the_samples(self):
        store = trlx.make_experience(["ab", "c", "d"], [0, 1, 5], letters(), 11)
        assert [row.tolist() for row in store.input_ids] == [[21, 0, 1, 21], [21, 2, 21], [21, 3, 21]]
        last = [store[index].rewards[-1] for index in range(3)]
        np.testing.assert_allclose(last, [-0.7559289, -0.3779645, 1.1338934], atol=1e-6)

    def test_messages_may_be_given_where_there_is_no_tokenizer(self):
        samples = [["b", "dna"], ["c", "ek", "j", "na"]]
        messages = [trlx.tokenize_dialogue(sample, letters(), 11) for sample in samples]
        given, made = (
            trlx.make_experience(messages, [1, 3]),
            trlx.make_experience(samples, [1, 3], letters(), 11),
        )
        for index in range(2):
            for name, array in vars(made[index]).items():
                np.testing.assert_array_equal(vars(given[index])[name], array)
        with pytest.raises(ValueError, match="sample 0 has no output tokens"):
            trlx.make_experience([[trlx.DialogMessage(False, (1, 2))]], [1.0])

    def test_batches_are_padded_with_zeros_on_the_right(self):
        store = trlx.make_experience([["b", "dna"], ["c", "ek", "j", "na"]], [1, 3], letters(), 11)
        (batch,) = store.create_loader(2)
        assert isinstance(batch, trlx.ILQLBatch)
        shapes = {name: array.shape for name, array in vars(batch).items()}
        assert shapes["input_ids"] == (2, 7) and shapes["dones"] == shapes["states_ixs"] == (2, 6)
        short = batch.attention_mask.sum(axis=1).argmin()
        assert batch.input_ids[short].tolist() == [1, 3, 13, 0, 21, 0, 0]

    def test_elements_may_be_pushed(self):
        store = trlx.make_experience(["ab", "c"], [0, 1], letters())
        store.push([store[0]])
        assert len(store) == 3 and store[2].input_ids.tolist() == store[0].input_ids.tolist()

    def test_columns_of_other_lengths_are_an_error(self):
        with pytest.raises(ValueError, match="one entry a sample"):
            trlx.ILQLRolloutStorage([[1]], [[1]], [], [[0]], [[0]], [[0]])

    def test_texts_are_split_at_a_token(self):
        assert split_samples(["ab:cd:e", ["x", "y"]], ":") == [["ab:", "cd:e"], ["x", "y"]]
        with pytest.raises(ValueError, match=r"sample 1 \('no'\) does not hold ':'"):
            split_samples(["a:b", "no"], ":")


class TestDialogStore:
    def test_labels_are_the_outputs(self):
        dialogs = [trlx.tokenize_dialogue(sample, letters()) for sample in (["b", "da"], ["c", "ekja"])]
        tokenizer = letters()
        (batch,) = trlx.DialogStore(dialogs, tokenizer).create_loader(2)
        assert tokenizer.padding_side == "left"
        assert batch["input_ids"].tolist() == [[PAD, PAD, 1, 3, 0, 21], [2, 4, 10, 9, 0, 21]]
        assert batch["labels"].tolist() == [[-100] * 3 + [3, 0, 21], [-100, 4, 10, 9, 0, 21]]
        assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]


def element(length, start=1):
    figures = np.arange(start, start + length, dtype=np.float32)
    return trlx.PPORLElement(np.array([7, 8][:length]), np.full(length, 5), figures, figures, figures)


class TestPPORolloutStorage:
    def test_queries_end_together_and_all_else_begins_together(self):
        store = trlx.PPORolloutStorage(PAD)
        store.push([element(1), element(3)])
        (batch,) = store.create_loader(2, shuffle=False)
        assert batch.query_tensors.tolist() == [[PAD, 7], [7, 8]]
        assert batch.response_tensors.tolist() == [[5, PAD, PAD], [5, 5, 5]]
        assert (
            batch.logprobs.tolist()
            == batch.values.tolist()
            == batch.rewards.tolist()
            == [[1, 0, 0], [1, 2, 3]]
        )
        assert batch.query_lengths.tolist() == [1, 2] and batch.response_lengths.tolist() == [1, 3]

    def test_queries_may_begin_together(self):
        store = trlx.PPORolloutStorage(PAD, padding_side="right")
        store.push([element(1), element(3)])
        assert next(iter(store.create_loader(2, shuffle=False))).query_tensors.tolist() == [[7, PAD], [7, 8]]

    def test_another_side_is_an_error(self):
        with pytest.raises(ValueError, match='`padding_side` must be "left" or "right", got \'both\''):
            trlx.PPORolloutStorage(0, "both")

    def test_loaders_are_shuffled_each_its_own_way(self):
        store = trlx.PPORolloutStorage(PAD)
        store.push([element(2, start) for start in range(16)])
        orders = [next(iter(store.create_loader(16, shuffle=True))).values[:, 0].tolist() for _ in range(2)]
        assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == list(range(16))

    @pytest.mark.parametrize("only_text", [True, False])
    def test_the_history_is_exported_as_json(self, tmp_path, only_text):
        store = trlx.PPORolloutStorage(PAD)
        store.push([element(2)])
        path = store.export_history(tmp_path, only_text=only_text)
        (row,) = json.loads(path.read_text())
        assert path.parent == tmp_path and row["query_tensor"] == [7, 8] and row["response_tensor"] == [5, 5]
        assert row == {"query_tensor": [7, 8], "response_tensor": [5, 5]} or not only_text
        assert only_text or row["rewards"] == [1.0, 2.0]
        store.clear_history()
        assert len(store) == 0

    def test_a_folder_that_does_not_exist_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="`location` must be a folder that exists"):
            trlx.PPORolloutStorage(PAD).export_history(tmp_path / "none")

    def test_a_capacity_keeps_the_newest(self):
        class Small(trlx.BaseRolloutStore):
            def create_loader(self, batch_size, shuffle, prep_fn=None, num_workers=0):
                raise NotImplementedError

        store = Small(capacity=2)
        store.push([1, 2])
        store.push([3])
        assert store.history == [2, 3] and store[0] == 2 and len(store) == 2
