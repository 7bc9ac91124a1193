# SPDX-License-Identifier: Apache-2.0
"""Reward models by scripts of TRL's shape: one tiny run, watched from all sides, and what is refused before it."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from transformers import AutoTokenizer, EarlyStoppingCallback, TrainerCallback, TrainingArguments

import jrl
from jrl.trainers.cards.card import model_card
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.trl import AutoModelForSequenceClassification, RewardConfig, RewardTrainer

ROWS = [{"chosen": f"good {i}", "rejected": f"bad {i} x"} for i in range(10)]
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "modules_to_save": ["score"]}


def config(folder, **fields):
    defaults = {"per_device_train_batch_size": 4, "max_length": 32, "learning_rate": 1e-3, "logging_steps": 2}
    return RewardConfig(output_dir=str(folder), **{**defaults, "gradient_checkpointing": False, **fields})


class Seen(TrainerCallback):
    """Every event with the step at which it came."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args, state, control, **more):
            assert more["model"] is not None and more["processing_class"] is not None
            self.events.append((name, state.global_step))

        return event


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp("reward"), Seen()
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1),
        args=config(folder, num_train_epochs=1, eval_strategy="epoch", save_strategy="no"),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        compute_metrics=lambda found: {"pairs": len(found.predictions)},
        callbacks=[seen],
    )
    return trainer, trainer.train(), seen


def test_a_run_returns_what_transformers_does(trained):
    trainer, output, _ = trained
    assert output.global_step == trainer.state.global_step == 3 and np.isfinite(output.training_loss)
    losses = [record["reward_model/loss"] for record in trainer.native.history if "iteration" in record]
    assert output.training_loss == pytest.approx(np.mean(losses))


def test_the_log_holds_means_of_windows(trained):
    trainer, _, _ = trained
    records = [record for record in trainer.native.history if "iteration" in record]
    first = trainer.state.log_history[0]
    assert first["step"] == 2 and first["epoch"] == pytest.approx(2 / 3)
    for name, native in (("loss", "loss"), ("accuracy", "accuracy"), ("mean_reward", "score_mean")):
        assert first[name] == pytest.approx(np.mean([r[f"reward_model/{native}"] for r in records[:2]]))
    assert first["num_tokens"] == sum(record["reward_model/tokens"] for record in records[:2])
    assert {"margin", "min_reward", "max_reward", "grad_norm", "learning_rate"} <= first.keys()


def test_evaluations_are_in_the_log_and_can_be_repeated(trained):
    trainer, _, _ = trained
    logged = next(line for line in trainer.state.log_history if "eval_loss" in line)
    again = trainer.evaluate()
    assert logged["step"] == 3 and logged["eval_pairs"] == again["eval_pairs"] == 5
    for name in ("eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"):
        assert logged[name] == pytest.approx(again[name])
    assert trainer.evaluate(ROWS[:2], metric_key_prefix="held")["held_pairs"] == 2


def test_callbacks_see_the_run_in_order(trained):
    _, _, seen = trained
    names = [name for name, _ in seen.events]
    assert names[:5] == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_optimizer_step",
    ]
    steps = [(name, step) for name, step in seen.events if name == "on_step_end"]
    assert steps == [("on_step_end", step) for step in (1, 2, 3)]
    assert ("on_evaluate", 3) in seen.events and ("on_save", 3) in seen.events and "on_train_end" in names
    assert names.count("on_epoch_end") == 1


def test_the_metric_of_the_best_model_must_be_there(trained):
    trainer, _, _ = trained
    name, trainer.config.metric_for_best_model = trainer.config.metric_for_best_model, "f1"
    try:
        with pytest.raises(
            ValueError, match=r"`metric_for_best_model` must be one of \['accuracy', .*got 'f1'"
        ):
            trainer.run_evaluation(
                3, lambda step: Evaluation({"eval/reward_model/accuracy": 1.0}, None, [], [])
            )
    finally:
        trainer.config.metric_for_best_model = name


def test_predictions_are_scores_of_the_pairs(trained):
    trainer, _, _ = trained
    found = trainer.predict(ROWS[:3])
    assert found.predictions.shape == (3, 2) and not found.label_ids.any()
    margins = found.predictions[:, 0] - found.predictions[:, 1]
    assert found.metrics["test_margin"] == pytest.approx(margins.mean(), rel=1e-5)
    assert found.metrics["test_accuracy"] == (margins > 0).mean()


def test_what_is_saved_is_a_reward_function(trained, tmp_path):
    trainer, _, _ = trained
    trainer.save_model(tmp_path / "model")
    trainer.model.save_pretrained(tmp_path / "handle")  # a script's own handle knows who trains it
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "handle")]
    assert weights[0] == weights[1]
    trainer.save_state()
    trainer.create_model_card(model_name="A scorer", dataset_name="pairs")
    scorer = jrl.load_reward_model(tmp_path / "model")
    found = trainer.predict(ROWS[:2]).predictions[:, 0]
    np.testing.assert_allclose(
        scorer([f"{row['chosen']}<eos>" for row in ROWS[:2]]), found, rtol=1e-4, atol=1e-5
    )
    folder = trainer.native.run_dir
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
    assert "# A scorer" in (folder / "README.md").read_text()


def test_loaders_show_the_classic_columns(trained):
    trainer, _, _ = trained
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids_chosen"].shape[0] == 4 and batch["return_loss"] is True
    assert len(trainer.get_eval_dataloader()) == 1 and len(trainer.get_test_dataloader(ROWS)) == 2


def test_the_top_level_has_the_flat_names():
    assert jrl.RewardTrainer is RewardTrainer and jrl.RewardConfig is RewardConfig


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"chosen": "a"}], "rejected"),
        ([{"chosen": "same", "rejected": "same"}], "nothing to learn from is left of 1 pairs"),
        ([{"chosen": "a" * 40, "rejected": "b" * 40}], "more than 32 tokens"),
        ([{"chosen": [{"role": "user", "content": "hi"}], "rejected": "no"}], "row 0"),
        ([], "`train_dataset`: the list holds no records"),
        (
            [{"input_ids_chosen": [5, 97], "input_ids_rejected": [5]}],
            "`train_dataset`: `input_ids_chosen` of row 0",
        ),
    ],
)
def test_bad_rows_are_said_in_one_line_before_a_model_is_loaded(
    checkpoint, tmp_path, monkeypatch, rows, message
):
    monkeypatch.setattr(RewardTrainer, "_make_native", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message) as raised:
        RewardTrainer(checkpoint, config(tmp_path), train_dataset=rows)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "`model` must be given"),
        ({"train_dataset": None}, "`train_dataset` or `eval_dataset`"),
        ({"optimizers": ("adam", None)}, "`optimizers` must be"),
        ({"callbacks": [print]}, "`callbacks` must hold"),
        ({"args": {"output_dir": "out"}}, "`args` must be"),
        ({"args": RewardConfig("out", neftune_noise_alpha=5)}, "`neftune_noise_alpha` must be left"),
        (
            {
                "args": RewardConfig(
                    "out", load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"
                )
            },
            "`eval_dataset` must be given",
        ),
        ({"args": RewardConfig(__file__)}, "`output_dir` must be a folder"),
        ({"args": RewardConfig("out", metric_for_best_model="f1")}, "`metric_for_best_model` must be one of"),
        ({"eval_dataset": (row for row in ROWS)}, "`eval_dataset`: evaluations go over all rows"),
        ({"eval_dataset": {"some": ROWS, "none": []}}, r"`eval_dataset\['none'\]`: the list holds no"),
        ({"eval_dataset": [{"chosen": "a"}]}, "`eval_dataset`: row 0 needs the column 'rejected'"),
    ],
)
def test_bad_arguments(checkpoint, tmp_path, options, message):
    given = {"model": checkpoint, "args": config(tmp_path), "train_dataset": ROWS} | options
    with pytest.raises((ValueError, TypeError), match=message):
        RewardTrainer(**given)


def test_without_an_evaluation_set_a_run_goes_on_and_says_so(checkpoint, tmp_path):
    args = config(tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.warns(UserWarning, match="`eval_dataset` is None: the run does not evaluate"):
        trainer = RewardTrainer(checkpoint, args, train_dataset=ROWS)
    assert trainer.native.config.train.eval_interval == 0 and trainer.args.eval_strategy == "steps"


def test_a_card_has_the_tags_that_a_script_adds(trained, tmp_path):
    trainer, _, _ = trained
    assert {"trl", "reward-trainer"} <= set(trainer.model.model_tags)
    trainer.model.add_model_tags(["of-mine"])
    assert (
        "- of-mine\n" in model_card(trainer.native).text()
        and "- trl\n" not in model_card(trainer.native).text()
    )


def test_a_path_without_a_checkpoint_is_no_fresh_run(trained, tmp_path):
    trainer, _, _ = trained
    with pytest.raises(FileNotFoundError, match="`resume_from_checkpoint` must be a run"):
        trainer.train(resume_from_checkpoint=tmp_path / "nothing")
    with pytest.raises(
        CheckpointError,
        match=r"set `resume_from_checkpoint: .*set `overwrite_output_dir=True` of `jrl\.trl\.RewardConfig`",
    ):
        trainer.train()


def test_tokens_of_the_configuration_must_be_in_the_vocabulary(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="`pad_token` must be in the tokenizer's vocabulary"):
        RewardTrainer(checkpoint, config(tmp_path, pad_token="<nope>"), train_dataset=ROWS)


@pytest.mark.slow
def test_an_early_stop_ends_the_run_and_the_best_model_comes_back(checkpoint, tmp_path):
    trainer = RewardTrainer(
        checkpoint,
        config(
            tmp_path,
            learning_rate=1e-2,
            max_steps=12,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
        ),
        train_dataset=ROWS,
        # What is learned makes it worse: the other one of every pair is called the better.
        eval_dataset=[{"chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    best = min(losses)
    assert losses[-1] > best and trainer.state.global_step < 12
    assert trainer.state.best_metric == best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_the_run(checkpoint, tmp_path):
    def trainer(folder, steps):
        return RewardTrainer(
            checkpoint,
            config(folder, max_steps=steps, lr_scheduler_type="constant", save_steps=2, logging_steps=1),
            train_dataset=ROWS,
        )

    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    trainer(tmp_path / "parts", 2).train()
    resumed = trainer(tmp_path / "parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    scores = [one.predict(ROWS[:3]).predictions for one in (whole, resumed)]
    np.testing.assert_array_equal(*scores)
    logs = [[line for line in one.state.log_history if "loss" in line] for one in (whole, resumed)]
    assert logs[0] == logs[1] and len(logs[0]) == 4


@pytest.mark.slow
def test_an_adapter_and_transformers_own_arguments(checkpoint, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = RewardTrainer(
            model=checkpoint,
            args=TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, use_cpu=True),
            train_dataset=[
                {
                    "input_ids_chosen": [5, 6, 7],
                    "attention_mask_chosen": [1, 1, 1],
                    "input_ids_rejected": [8, 9],
                    "attention_mask_rejected": [1, 1],
                },
                {
                    "input_ids_chosen": [5, 6],
                    "attention_mask_chosen": [1, 1],
                    "input_ids_rejected": [9, 9, 9],
                    "attention_mask_rejected": [1, 1, 1],
                },
            ],
            peft_config=LORA,
            max_length=16,
        )
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
