# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning by rows that a script brings, step by step."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jrl.trl import IterativeSFTTrainer, SFTConfig, SFTTrainer
from tests.tiny import tiny_hf_config, tiny_t5_tokenizer

TEXTS = ["one thin thing", "two thin things", "a cat", "the other cat"]


def config(folder, **fields):
    defaults = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    return SFTConfig(str(folder), **{**defaults, "gradient_checkpointing": False, **fields})


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    return IterativeSFTTrainer(checkpoint, config(tmp_path_factory.mktemp("steps"), max_length=8))


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """Of an encoder-decoder."""
    args = config(tmp_path_factory.mktemp("writer"))
    return IterativeSFTTrainer(tiny_hf_config("t5"), args, tokenizer=tiny_t5_tokenizer())


@pytest.mark.slow
def test_a_step_learns_what_a_run_learns(checkpoint, tmp_path):
    mine = IterativeSFTTrainer(checkpoint, config(tmp_path / "mine", optim="sgd"))
    rows = [{"text": one} for one in TEXTS]
    whole = SFTTrainer(checkpoint, config(tmp_path / "run", optim="sgd"), train_dataset=rows)
    whole.train()
    losses = [mine.step(texts=TEXTS)["loss"] for _ in range(2)]
    expected = [line["loss"] for line in whole.state.log_history if "loss" in line]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert [line["loss"] for line in mine.state.log_history] == losses and mine.state.global_step == 2
    for one, other in zip(
        jax.tree.leaves(mine.native.params), jax.tree.leaves(whole.native.params), strict=True
    ):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-6)
    mine.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


@pytest.mark.slow
def test_five_rows_are_two_batches_and_evaluations_come_where_they_are_due(checkpoint, tmp_path):
    args = config(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2)
    rows = [{"text": one} for one in TEXTS]
    mine = IterativeSFTTrainer(checkpoint, args, eval_dataset=rows)
    mine.step(texts=[*TEXTS, "a fifth"])
    assert mine.state.global_step == int(mine.native.state.step) == 2
    assert [line["step"] for line in mine.state.log_history if "eval_loss" in line] == [2]


def test_ids_masks_and_labels_decide_what_is_learned(trainer):
    ids, mask = [[5, 6, 7, 0], [8, 9, 10, 11]], [[1, 1, 1, 0], [1, 1, 1, 1]]
    rows = trainer._rows_of(ids, mask, [[-100, 6, 7, -100], [8, -100, -100, 11]], None, None).rows
    assert [row.tokens for row in rows] == [[5, 6, 7], [8, 9, 10, 11]]
    assert [row.learned for row in rows] == [[False, True, True], [True, False, False, True]]
    with pytest.warns(UserWarning, match="cut on the left"):
        long = trainer._rows_of([list(range(5, 17))], None, None, None, None).rows[0]
    assert long.tokens == list(range(9, 17)), "the end is kept"


@pytest.mark.slow
def test_label_texts_are_what_an_encoder_decoder_writes(writer):
    found = writer._rows_of(None, None, None, ["ab"], ["cd e"])
    own = tiny_t5_tokenizer()
    written = [
        token for token, learned in zip(found.rows[0].tokens, found.rows[0].learned, strict=True) if learned
    ]
    assert written == own("cd e")["input_ids"] and found.contexts[0] == own("ab")["input_ids"]
    same = writer._rows_of([own("ab")["input_ids"]], None, [[*own("cd e")["input_ids"], -100]], None, None)
    assert same.rows == found.rows and same.contexts == found.contexts


@pytest.mark.parametrize(("given", "message"), [
    ({}, "must be given `input_ids` or `texts`"),
    ({"texts": "one text"}, "`texts` must be a list of rows, got str"),
    ({"texts": ["a", 3]}, r"`texts\[1\]` must be a text, got int"),
    ({"input_ids": [[5, 6]], "labels": [[5, 6], [7]]}, "`labels` must have one entry a row"),
    ({"input_ids": [[5, 6]], "labels": [[5, 7]]}, "`labels` of row 0 must be the ids"),
    ({"input_ids": [[5, 6]], "labels": [[5]]}, "`labels` of row 0 must have one entry for each"),
    ({"input_ids": [[[5, 6]]]}, "`input_ids` must be a 1-D array of ids"),
    ({"input_ids": [[5, 99999]]}, "`input_ids` of row 0"),
    ({"texts": ["a"], "texts_labels": ["b"]}, r"`texts_labels\[0\]` must be its text"),
])  # fmt: skip
def test_what_cannot_be_learned_is_refused(trainer, given, message):
    with pytest.raises(ValueError, match=message) as raised:
        trainer.step(**given)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_an_encoder_decoder_needs_labels(writer):
    with pytest.raises(ValueError, match="`texts_labels` must be given"):
        writer.step(texts=["a"])


def test_a_loss_put_on_the_trainer_is_refused(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "compute_loss", lambda model, inputs: 0.0)
    with pytest.raises(TypeError, match="`compute_loss` must be a method of a subclass"):
        trainer.step(texts=["a"])


def test_a_schedule_needs_its_length_and_there_is_no_run(trainer, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="`max_steps` must be the number of optimizer steps"):
        IterativeSFTTrainer(checkpoint, config(tmp_path, max_steps=-1))
    with pytest.raises(ValueError, match="learns in `step`"):
        trainer.train()
    with pytest.warns(UserWarning, match="the ids are not used"):
        trainer._columns({"input_ids": [[5]], "texts": ["a"]})
