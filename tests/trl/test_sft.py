# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning by scripts of TRL's shape: one tiny run, forms of data, and what is refused."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from transformers import AutoTokenizer

from jrl.trl import ConstantLengthDataset, DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
from jrl.trl.row_texts import one_text
from tests.tiny import tiny_hf_config

ROWS = [{"text": f"hello {i}"} for i in range(10)]
QUESTIONS = [{"q": f"{i}", "a": f"{i + 1}"} for i in range(6)]


def config(folder, **fields):
    defaults = {"per_device_train_batch_size": 4, "max_length": 32, "learning_rate": 1e-3, "logging_steps": 1}
    return SFTConfig(output_dir=str(folder), **{**defaults, "gradient_checkpointing": False, **fields})


@pytest.fixture
def samples_of(monkeypatch, checkpoint, tmp_path):
    """The samples that a trainer would learn from; no model is loaded."""
    monkeypatch.setattr(SFTTrainer, "_make_native", lambda *_: None)
    monkeypatch.setattr("jrl.trl.models.ModelHandle.attach", lambda *_: None)

    def make(rows, *, fields=(), **options):
        return SFTTrainer(
            checkpoint, config(tmp_path, **dict(fields)), train_dataset=rows, **options
        )._samples

    return make


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    trainer = SFTTrainer(
        model=checkpoint,
        args=config(
            tmp_path_factory.mktemp("sft"), max_steps=2, eval_strategy="steps", eval_steps=1, eval_delay=2
        ),
        train_dataset=ROWS,
        eval_dataset=ROWS[:3],
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda found: {
            "right": float(
                (found.predictions[:, :-1] == found.label_ids[:, 1:])[found.label_ids[:, 1:] >= 0].mean()
            )
        },
        optimizers=(None, optax.constant_schedule(1e-2)),
    )
    return trainer, trainer.train()


def test_a_run(trained):
    trainer, output = trained
    assert output.global_step == 2
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2, 1e-2])
    assert {"entropy", "mean_token_accuracy", "num_tokens", "grad_norm"} <= lines[0].keys()
    assert (
        lines[1]["num_tokens"] == 2 * lines[0]["num_tokens"] == 2 * 4 * 7
    )  # without the first token of each row


def test_predictions_and_the_metric_that_is_computed_of_them(trained):
    trainer, _ = trained
    evaluated = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated == [2]  # not before `eval_delay`
    found = trainer.predict(ROWS[:3])
    assert found.predictions.shape == found.label_ids.shape == (3, 8)
    # jrl's own measure of the same.
    assert found.metrics["test_right"] == pytest.approx(found.metrics["test_mean_token_accuracy"])


def test_packed_rows_are_predicted_one_by_one(trained, monkeypatch):
    """In one row they would read each other (lore 1.11)."""
    trainer, _ = trained
    rows = [{"text": "ab"}, {"text": "cdefgh"}, {"text": "ij"}]
    alone = trainer.predict(rows)
    monkeypatch.setattr(trainer.config, "packing", True)
    packed = trainer.predict(rows)
    assert packed.metrics["test_right"] == pytest.approx(alone.metrics["test_right"])
    # The first token of a row is nobody's target; only packing says so.
    ours, theirs = (
        {tuple(x[1:]): y for x, y in zip(z.label_ids, z.predictions, strict=True)} for z in (packed, alone)
    )
    assert ours.keys() == theirs.keys() and len(ours) == 3
    for labels, row in ours.items():
        np.testing.assert_array_equal(row, theirs[labels])


def test_loaders_show_what_is_learned(trained):
    trainer, _ = trained
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["labels"].shape == (4, 8) and batch["attention_mask"].all()


def test_loaders_give_a_collator_the_ids_that_it_labels(trained, monkeypatch):
    trainer, _ = trained
    collator = DataCollatorForCompletionOnlyLM("lo", tokenizer=trainer.tokenizer)
    monkeypatch.setattr(trainer, "data_collator", collator)
    monkeypatch.setattr(trainer, "_by_collator", True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (4, 8) and ((batch["labels"] >= 0).sum(axis=1) == 3).all()


def test_both_forms_of_a_formatting_function():
    single = one_text(lambda row: f"{row['q']}-{row['a']}")
    batched = one_text(lambda rows: [f"{q}-{a}" for q, a in zip(rows["q"], rows["a"], strict=True)])
    row = {"q": "12", "a": "34"}
    assert single(row) == batched(row) == "12-34"
    with pytest.raises(ValueError, match="`formatting_func` must return a text"):
        one_text(lambda row: 3)(row)
    # By index, as the classic page has it: of a row's own texts that runs over the shorter one's end.
    by_index = one_text(lambda rows: [f"{rows['q'][i]}-{rows['a'][i]}" for i in range(len(rows["q"]))])
    assert by_index({"q": "longer", "a": "b"}) == "longer-b" and by_index({"q": 3, "a": 4}) == "3-4"
    with pytest.raises(KeyError, match="nope"):
        one_text(lambda row: row["nope"])(row)


def test_the_field_wins_over_the_function(samples_of, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = [{"body": "abc"}, {"body": "de"}]
    found = samples_of(rows, dataset_text_field="body", formatting_func=lambda row: "zzz")
    assert [tokenizer.decode(row.tokens) for row in found.rows] == ["abc<eos>", "de<eos>"]
    without = samples_of(
        rows, fields={"dataset_text_field": "body", "dataset_kwargs": {"append_concat_token": False}}
    )
    assert [tokenizer.decode(row.tokens) for row in without.rows] == ["abc", "de"]


def test_a_collator_decides_what_is_learned(samples_of, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    collator = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer)
    found = samples_of(
        QUESTIONS, data_collator=collator, formatting_func=lambda row: f"Q: {row['q']} A: {row['a']}"
    )
    learned = [[t for t, flag in zip(*row, strict=True) if flag] for row in found.rows]
    assert [tokenizer.decode(ids) for ids in learned] == [f" {row['a']}<eos>" for row in QUESTIONS]
    with pytest.raises(ValueError, match="`packing` must be False with a `data_collator`"):
        samples_of(ROWS, data_collator=collator, fields={"packing": True})


def test_packing_is_of_whole_samples(samples_of):
    found = samples_of(ROWS, fields={"packing": True, "max_length": 16})
    assert len(found) == 5 and found.num_samples == 10
    assert len(samples_of(ROWS, packing=True, max_seq_length=16)) == 5  # the older names


def test_prompts_are_not_learned_where_completions_are(samples_of, checkpoint):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "e"}]
    found = samples_of(rows)
    assert [sum(row.learned) for row in found.rows] == [3, 2]
    whole = samples_of(rows, fields={"completion_only_loss": False})
    assert [sum(row.learned) for row in whole.rows] == [5, 3]


def test_a_constant_length_data_set_is_rows_of_ids(samples_of, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = ConstantLengthDataset(tokenizer, ROWS, "text", seq_length=10, num_of_sequences=2)
    found = samples_of(rows)
    assert {len(row.tokens) for row in found.rows} == {10} and len(found) == len(rows) == 8


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([{"body": "x"}], {}, "row 0 needs the column 'text'"),
        ([{"text": "x"}, {"text": 3}], {}, "row 1"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], {}, "chat template"),
        (ROWS, {"loss_type": "nope"}, "`loss_type` must be one of"),
        (ROWS, {"dataset_kwargs": {"nope": 1}}, "`dataset_kwargs` must be"),
        (ROWS, {"packing": True, "packing_strategy": "nope"}, "packing_strategy` must be"),
    ],
)
def test_bad_input_is_said_in_one_line_before_a_model_is_loaded(samples_of, rows, fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        samples_of(rows, fields=fields)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_run_of_everything_at_once(checkpoint, tmp_path):
    """Packing, NEFTune, an optax optimizer, and the model by a function."""
    trainer = SFTTrainer(
        model_init=lambda: checkpoint,
        args=config(
            tmp_path, max_steps=3, packing=True, max_length=16, neftune_noise_alpha=5.0, loss_type="dft"
        ),
        train_dataset=ROWS,
        optimizers=(optax.adam(1e-3), None),
    )
    assert np.isfinite(trainer.train().training_loss)
    assert trainer.model.generate(np.array([[5, 6]]), max_new_tokens=2).shape == (1, 4)


@pytest.mark.slow
def test_a_seq2seq_model_predicts_what_its_decoder_writes(checkpoint, tmp_path):
    rows = [{"prompt": "ab" * i, "completion": "cd" + "e" * i} for i in range(1, 6)]
    trainer = SFTTrainer(
        tiny_hf_config("t5"),
        config(tmp_path),
        train_dataset=rows,
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
    )
    found = trainer.predict(rows)
    logits, labels = found.predictions[:, :-1].astype(np.float64), found.label_ids[:, 1:]
    chosen = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
    assert found.metrics["test_loss"] == pytest.approx(losses[labels >= 0].mean(), rel=1e-5)
