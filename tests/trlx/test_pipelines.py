# SPDX-License-Identifier: Apache-2.0
"""Pipelines: prompts with metadata, their padding and truncation, and microbatches of any batch."""

import copy

import numpy as np
import pytest
from transformers import BatchEncoding

import jrl.trlx as trlx
from jrl.interop import arguments
from jrl.trlx.pipeline.offline_pipeline import prompt_set_of
from tests.tiny import EOS_ID, PAD_ID, tiny_t5_tokenizer, tiny_tokenizer

PROMPTS = [{"prompt": "abc", "label": 1}, {"prompt": "z", "label": 2}, {"prompt": "lmnop", "label": 3}]


def tokenizer_with(**sides):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for name, side in sides.items():
        setattr(tokenizer, name, side)
    return tokenizer


class TestPromptPipeline:
    def test_the_callers_dicts_are_left_alone(self):
        given = copy.deepcopy(PROMPTS)
        for _ in range(2):
            trlx.PromptPipeline(given, 8, tiny_tokenizer())
        assert given == PROMPTS

    @pytest.mark.parametrize(("side", "kept"), [("right", "lmn"), ("left", "nop")])
    def test_long_prompts_are_cut_on_the_truncation_side(self, side, kept):
        tokenizer = tokenizer_with(truncation_side=side)
        with pytest.warns(
            UserWarning, match=f"1 of 3 prompts have more than 3 tokens and were cut on the {side}"
        ):
            pipeline = trlx.PromptPipeline(PROMPTS, 3, tokenizer)
        assert tokenizer.decode(pipeline[2]["input_ids"]) == kept and pipeline[2]["label"] == 3

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_batches_are_padded_on_the_tokenizers_side_by_length(self, side):
        pipeline = trlx.PromptPipeline(PROMPTS, 8, tokenizer_with(padding_side=side))
        first, second = pipeline.create_loader(2)
        assert isinstance(first, BatchEncoding) and len(pipeline.create_loader(2)) == 2
        mask = [[1, 1, 1], [0, 0, 1] if side == "left" else [1, 0, 0]]
        assert first["attention_mask"].tolist() == mask
        assert first["input_ids"][1][mask[1].index(1)] == tiny_tokenizer()("z")["input_ids"][0]
        assert (first["input_ids"][first["attention_mask"] == 0] == PAD_ID).all()
        assert first["label"] == [1, 2] and second["label"] == [3]

    def test_an_encoder_reads_special_tokens(self):
        pipeline = trlx.PromptPipeline(["ab"], 8, tiny_t5_tokenizer(), True)
        assert pipeline[0]["input_ids"][-1] == EOS_ID
        assert trlx.PromptPipeline(["ab"], 8, tiny_t5_tokenizer())[0]["input_ids"][-1] != EOS_ID

    def test_the_first_releases_gave_no_length(self):
        assert len(trlx.PromptPipeline(["a" * 300], tiny_tokenizer())[0]["input_ids"]) == 300

    def test_no_tokenizer_is_an_error(self):
        with pytest.raises(ValueError, match="`tokenizer` is required"):
            trlx.PromptPipeline(["a"], 8)

    def test_a_tokenizer_without_pad_token_pads_with_eos(self):
        tokenizer = tokenizer_with(padding_side="left")
        tokenizer.pad_token = None
        (batch,) = trlx.PromptPipeline(["ab", "c"], 8, tokenizer).create_loader(2)
        assert batch["input_ids"][1][0] == EOS_ID and batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
        assert tokenizer.pad_token is None

    def test_trainers_read_the_same_prompts(self):
        pipeline = trlx.PromptPipeline(PROMPTS, 8, tiny_tokenizer())
        found = prompt_set_of(
            pipeline, tiny_tokenizer(), max_length=8, seed=0, decoder_start_token_id=None
        ).rows(np.arange(3), width=8)
        assert found.token_lists == [row["input_ids"] for row in pipeline.prompts]
        assert found.metadata == {"label": [1, 2, 3]}

    def test_a_pipeline_of_ones_own_with_padded_rows(self, monkeypatch):
        monkeypatch.setattr(arguments, "_told", set())

        class Own(trlx.BasePipeline):
            def __getitem__(self, index):
                return {
                    "input_ids": np.array([PAD_ID, 5, 6]),
                    "attention_mask": np.array([0, 1, 1]),
                    "name": index,
                }

            def __len__(self):
                return 2

            def create_loader(self, batch_size, shuffle, prep_fn=None, num_workers=0):
                raise NotImplementedError

        with (
            pytest.warns(UserWarning, match="2 of 2 prompts have more than 1 tokens"),
            pytest.warns(UserWarning, match="`Own.create_loader` has no effect in jrl: prompts are read by"),
        ):
            found = prompt_set_of(Own(), tiny_tokenizer(), max_length=1, seed=0, decoder_start_token_id=None)
        assert found.rows(np.arange(2), width=1).token_lists == [[5], [5]]
        assert found.metadata(np.arange(2)) == {"name": [0, 1]}

    def test_elements_with_other_keys_are_named(self):
        rows = [{"input_ids": [1], "a": 0}, {"input_ids": [1]}]
        with pytest.raises(ValueError, match=r"element 1 has the keys \['input_ids'\]"):
            prompt_set_of(rows, tiny_tokenizer(), max_length=4, seed=0, decoder_start_token_id=None)


class TestLoader:
    def test_every_pass_has_an_order_of_its_own_and_repeats_itself(self):
        pipeline = trlx.PromptPipeline([chr(97 + i) for i in range(16)], 8, tiny_tokenizer())
        loader, again = (pipeline.create_loader(16, shuffle=True) for _ in range(2))
        passes = [next(iter(loader))["input_ids"].ravel().tolist() for _ in range(2)]
        assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1])
        assert next(iter(again))["input_ids"].ravel().tolist() == passes[0]

    def test_a_sampler_decides_and_a_short_batch_may_be_dropped(self):
        pipeline = trlx.PromptPipeline(["a", "b", "c"], 8, tiny_tokenizer())
        loader = pipeline.create_loader(2, sampler=[2, 0, 1], drop_last=True)
        (batch,) = loader
        assert batch["input_ids"].ravel().tolist() == [
            pipeline[2]["input_ids"][0],
            pipeline[0]["input_ids"][0],
        ]
        assert len(loader) == 1
        with pytest.raises(ValueError, match="`shuffle` must be False beside a `sampler`"):
            pipeline.create_loader(2, shuffle=True, sampler=[0])
        with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
            pipeline.create_loader(0)


def rows_of(microbatches):
    return [batch["input_ids"].ravel().tolist() for batch in microbatches]


class TestMiniBatchIterator:
    def pipeline(self, size):
        return trlx.PromptPipeline([chr(33 + i) for i in range(size)], 8, tiny_tokenizer())

    def test_whole_batches(self):
        pipeline = self.pipeline(32)
        found = list(trlx.MiniBatchIterator(pipeline.create_loader(8), mb_size=4, num_mb=2))
        assert [len(microbatches) for microbatches in found] == [2] * 4
        everything = [row["input_ids"][0] for row in pipeline.prompts]
        assert [row for batches in found for rows in rows_of(batches) for row in rows] == everything
        assert all(isinstance(batch, BatchEncoding) for microbatches in found for batch in microbatches)

    def test_a_batch_that_does_not_divide_has_a_short_end(self):
        with pytest.warns(UserWarning, match="8 rows is cut into 3 microbatches, the last of 2; 3 of 3"):
            (found,) = trlx.MiniBatchIterator(self.pipeline(8).create_loader(8), mb_size=3, num_mb=3)
        assert [len(rows) for rows in rows_of(found)] == [3, 3, 2]

    def test_a_short_last_batch_has_fewer(self):
        with pytest.warns(UserWarning, match="4 rows is cut into 2 microbatches"):
            found = list(trlx.MiniBatchIterator(self.pipeline(12).create_loader(8), mb_size=2, num_mb=4))
        assert [len(microbatches) for microbatches in found] == [4, 2]

    def test_data_classes_are_cut_too(self):
        columns = {name: [np.arange(2)] * 4 for name in ("input_ids", "attention_mask", "rewards")}
        store = trlx.ILQLRolloutStorage(
            **columns, states_ixs=[[0, 1]] * 4, actions_ixs=[[0]] * 4, dones=[[1, 0]] * 4
        )
        ((first, second),) = trlx.MiniBatchIterator(store.create_loader(4), mb_size=2, num_mb=2)
        assert isinstance(first, trlx.ILQLBatch) and first.input_ids.shape == second.input_ids.shape == (2, 2)
