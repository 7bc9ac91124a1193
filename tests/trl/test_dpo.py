# SPDX-License-Identifier: Apache-2.0
"""DPO by scripts of TRL's shape: one tiny run, TRL's methods on a collator's batch, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer, TrainingArguments

from jrl.models.checkpoint import save_checkpoint
from jrl.trl import AutoModelForCausalLM, DPOConfig, DPOTrainer, create_reference_model
from tests.tiny import tiny_hf_config, tiny_lm, tiny_tokenizer

ROWS = [{"prompt": f"p{i} ", "chosen": f"good {i}", "rejected": f"bad {i} x"} for i in range(10)]
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "init_lora_weights": False}
# Two pairs; the figures are those of the method's own formulas.
PI_CHOSEN, PI_REJECTED = [-10.0, -20.0], [-12.0, -18.0]
REF_CHOSEN, REF_REJECTED = [-11.0, -19.0], [-11.5, -18.5]


def config(folder, **fields):
    defaults = {"per_device_train_batch_size": 4, "max_length": 32, "learning_rate": 1e-3, "logging_steps": 1}
    return DPOConfig(output_dir=str(folder), **{**defaults, "gradient_checkpointing": False, **fields})


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return DPOTrainer(
        model,
        create_reference_model(model),
        args=config(tmp_path_factory.mktemp("dpo"), max_steps=2, eval_strategy="epoch", save_strategy="no"),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        train_dataset=ROWS[:6],
        eval_dataset={"a": ROWS[:3], "b": ROWS[3:5]},
    )


@pytest.fixture(scope="module")
def batch(trainer):
    return next(iter(trainer.get_train_dataloader()))


def test_a_batch_of_the_collator(trainer, batch):
    chosen = batch["chosen_labels"] != trainer.label_pad_token_id
    assert (batch["chosen_input_ids"][chosen] == batch["chosen_labels"][chosen]).all()
    text = [
        trainer.tokenizer.decode(row[mask]) for row, mask in zip(batch["chosen_labels"], chosen, strict=True)
    ]
    assert text == [f"{row['chosen']}<eos>" for row in ROWS[:4]]
    assert batch["prompt_attention_mask"][:, -1].all()  # prompts are padded on the left
    row = trainer.tokenize_row(ROWS[0])
    assert row["chosen_input_ids"] == batch["chosen_input_ids"][0][: len(row["chosen_input_ids"])].tolist()


def test_both_sides_in_one_array(trainer, batch):
    found = trainer.concatenated_inputs(batch)
    widths = {array.shape for array in found.values()}
    assert widths == {(8, max(batch[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected")))}
    half = batch["chosen_input_ids"].shape[1]
    np.testing.assert_array_equal(found["concatenated_input_ids"][:4, :half], batch["chosen_input_ids"])


def test_before_the_first_step_policy_and_reference_agree(trainer, batch):
    chosen, rejected, logits, _ = trainer.concatenated_forward(trainer.model, batch)
    reference = trainer.compute_reference_log_probs(batch)
    np.testing.assert_allclose(chosen, reference[0], rtol=1e-6)
    np.testing.assert_allclose(rejected, reference[1], rtol=1e-6)
    # The sum over the completion's tokens, by hand.
    ids, labels = batch["chosen_input_ids"][0], batch["chosen_labels"][0]
    rows = np.asarray(logits[0], np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    expected = sum(logprobs[t - 1, ids[t]] for t in range(1, len(ids)) if labels[t] != -100)
    assert float(chosen[0]) == pytest.approx(expected, rel=1e-5)
    loss, metrics = trainer.get_batch_metrics(trainer.model, batch, train_eval="eval")
    assert float(loss) == pytest.approx(np.log(2)) and metrics["eval_rewards/margins"] == 0.0


def test_metrics_of_a_batch_are_those_of_a_run(trainer, batch):
    _, metrics = trainer.get_batch_metrics(trainer.model, batch)
    own = trainer.native.measure_samples(trainer._read(ROWS[:4], trainer.model))
    for name in ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"):
        assert metrics[name] == pytest.approx(own[name], rel=1e-4, abs=1e-6)


def test_the_loss_of_a_batch_knows_its_lengths(trainer, batch, monkeypatch):
    fields = {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5], "reference_free": True}
    for name, value in fields.items():
        monkeypatch.setattr(trainer.config, name, value)
        monkeypatch.setattr(trainer.native.config.method, name, value)
    sums = [np.asarray(x) for x in trainer.concatenated_forward(trainer.model, batch)[:2]]
    lengths = [
        (batch[f"{side}_labels"] != trainer.label_pad_token_id).sum(axis=1) for side in ("chosen", "rejected")
    ]
    assert len(set(map(tuple, lengths))) == 2
    means = [total / length for total, length in zip(sums, lengths, strict=True)]
    ipo = np.square(means[0] - means[1] - 1 / (2 * trainer.beta)).mean()
    loss, _ = trainer.get_batch_metrics(trainer.model, batch)
    assert float(loss) == pytest.approx(ipo - 0.5 * sums[0].sum() / lengths[0].sum(), rel=1e-5)


def test_forward_passes_of_one_shape_share_one_program(trainer, batch, monkeypatch):
    trainer.get_batch_metrics(trainer.model, batch)
    monkeypatch.setattr(jax, "jit", lambda *args, **kwargs: pytest.fail("compiled again"))
    trainer.get_batch_metrics(trainer.model, batch)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.620957, 0.770957]),
        ({"label_smoothing": 0.1}, [0.635957, 0.755957]),
        ({"loss_type": ["hinge"]}, [0.85, 1.15]),
        ({"loss_type": ["ipo"]}, [12.25, 42.25]),
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0, 2.0]}, [2.320957, 3.070957]),
    ],
)
def test_losses_of_sums(trainer, monkeypatch, fields, expected):
    for name, value in fields.items():
        monkeypatch.setattr(trainer.config, name, value)
        monkeypatch.setattr(trainer.native.config.method, name, value)
    losses, *rewards = trainer.dpo_loss(PI_CHOSEN, PI_REJECTED, REF_CHOSEN, REF_REJECTED)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(rewards, [[0.1, -0.1], [-0.05, 0.05]], rtol=1e-5)


def test_without_a_reference_rewards_keep_it(trainer):
    losses, *rewards = trainer.dpo_loss(PI_CHOSEN, PI_REJECTED, REF_CHOSEN, REF_REJECTED, reference_free=True)
    np.testing.assert_allclose(losses, [0.598139, 0.798139], rtol=1e-5)
    np.testing.assert_allclose(rewards, [[0.1, -0.1], [-0.05, 0.05]], rtol=1e-5)


def test_what_is_stored_is_logged_as_means(trainer):
    before = len(trainer.state.log_history)
    trainer.store_metrics({"mine": 1.0})
    trainer.store_metrics({"mine": 3.0})
    trainer.log({"loss": 0.5})
    assert trainer.state.log_history[before]["mine"] == 2.0
    trainer.log({"loss": 0.5})
    assert "mine" not in trainer.state.log_history[-1]


@pytest.fixture(scope="module")
def trained(trainer):
    return trainer.train()


def test_a_run(trainer, trained):
    line = next(line for line in trainer.state.log_history if line.get("rewards/accuracies") is not None)
    assert trained.global_step == 2
    names = ("chosen", "rejected", "accuracies", "margins")
    assert {f"rewards/{name}" for name in names} | {"logps/chosen", "logits/rejected", "loss"} <= line.keys()
    found = next(line for line in trainer.state.log_history if "eval_a_loss" in line)
    assert {"eval_b_loss", "eval_b_rewards/margins", "eval_a_logps/chosen"} <= found.keys()
    np.testing.assert_allclose(trainer.evaluate()["eval_b_loss"], found["eval_b_loss"], rtol=1e-6)


def test_the_reference_that_has_scored_is_gone_and_this_is_said(trainer, trained, batch):
    with pytest.raises(ValueError, match="let go of"):
        trainer.compute_reference_log_probs(batch)


def test_classic_arguments_count_beside_transformers_own(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(DPOTrainer, "_make_native", lambda *_: None)
    monkeypatch.setattr("jrl.trl.models.ModelHandle.attach", lambda *_: None)
    plain = TrainingArguments(str(tmp_path), report_to="none")
    options = {"train_dataset": ROWS, "tokenizer": AutoTokenizer.from_pretrained(checkpoint)}
    found = DPOTrainer(checkpoint, None, 0.3, plain, max_length=24, max_prompt_length=8, **options)
    assert (found.beta, found.truncation_mode, found.max_length, found.max_prompt_length) == (
        0.3,
        "keep_end",
        24,
        8,
    )
    # The newer place of the configuration, whose fields count unless an argument says otherwise.
    found = DPOTrainer(checkpoint, None, config(tmp_path, beta=0.4, truncation_mode="keep_start"), **options)
    assert (found.beta, found.truncation_mode) == (0.4, "keep_start")
    found = DPOTrainer(checkpoint, args=config(tmp_path, beta=0.4), beta=0.2, loss_type="hinge", **options)
    assert (found.beta, found.loss_type) == (0.2, ["hinge"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "chosen": "a"}], "rejected"),
        ([{"prompt": "p", "chosen": "a", "rejected": "a"}], "nothing to learn from is left of 1 pairs"),
        ([{"prompt": [{"role": "user", "content": "q"}], "chosen": [{"role": "assistant", "content": "a"}],
           "rejected": [{"role": "assistant", "content": "b"}]}], "chat template"),
    ],
)  # fmt: skip
def test_bad_rows_are_said_in_one_line_before_a_model_is_loaded(
    checkpoint, tmp_path, monkeypatch, rows, message
):
    monkeypatch.setattr(DPOTrainer, "_make_native", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message) as raised:
        DPOTrainer(checkpoint, args=config(tmp_path), train_dataset=rows)
    assert "\n" not in str(raised.value)


def test_a_model_that_a_trainer_has_is_taken_as_it_is_now(trainer, checkpoint, tmp_path):
    mine = trainer.model
    second = DPOTrainer(mine, mine, args=config(tmp_path), train_dataset=ROWS)
    for one, other in zip(
        jax.tree.leaves(second.native.params), jax.tree.leaves(trainer.native.params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert mine.trainer is second.native, "the script's handle answers with the newest trainer's parameters"
    mine.attach(trainer.native)


def test_a_reference_of_another_vocabulary_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="the policy's vocabulary of 97") as raised:
        DPOTrainer(checkpoint, tiny_hf_config(vocab_size=99), args=config(tmp_path), train_dataset=ROWS)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_reference_beside_an_adapter_is_used(checkpoint, tmp_path):
    lm, params = tiny_lm("gpt2")
    save_checkpoint(
        tmp_path / "other", lm, jax.tree.map(lambda x: 1.1 * x, params), tokenizer=tiny_tokenizer()
    )
    other, options = str(tmp_path / "other"), {"train_dataset": ROWS, "peft_config": LORA}
    trainer = DPOTrainer(checkpoint, other, args=config(tmp_path / "one"), **options)
    batch = next(iter(trainer.get_train_dataloader()))
    policy = DPOTrainer(other, args=config(tmp_path / "plain"), train_dataset=ROWS)
    expected = policy.concatenated_forward(policy.model, batch)[0]
    with pytest.raises(ValueError, match="`model` must be the trainer's `model`"):
        trainer.concatenated_forward(policy.model, batch)
    np.testing.assert_allclose(trainer.compute_reference_log_probs(batch)[0], expected, rtol=1e-5)
    same = DPOTrainer(checkpoint, checkpoint, args=config(tmp_path / "two"), **options)
    assert same.native.method.ref_model_path is None, "the base is there already"


def test_options_of_other_methods_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="`rpo_alpha` must be left at its default"):
        DPOTrainer(checkpoint, args=config(tmp_path, rpo_alpha=1.0), train_dataset=ROWS)
    with pytest.raises(ValueError, match="loss_type` must be"):
        DPOTrainer(checkpoint, args=config(tmp_path, loss_type="nope"), train_dataset=ROWS)


@pytest.mark.slow
def test_an_adapter_has_its_base_as_reference(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = DPOTrainer(model, args=config(tmp_path, max_steps=2), train_dataset=ROWS, peft_config=LORA)
    assert model.trainer is trainer.model.trainer is trainer.native and model is not trainer.model
    batch = next(iter(trainer.get_train_dataloader()))
    policy = trainer.concatenated_forward(trainer.model, batch)[0]
    base = DPOTrainer(checkpoint, args=config(tmp_path / "base", max_steps=1), train_dataset=ROWS)
    expected = base.concatenated_forward(base.model, batch)[0]
    np.testing.assert_allclose(trainer.compute_reference_log_probs(batch)[0], expected, rtol=1e-5)
    assert not np.allclose(policy, expected)
    ours, theirs = trainer.get_batch_samples(trainer.model, batch)
    assert all(text.startswith(prompt) for text, prompt in zip(ours, batch["prompt"], strict=True))
    assert len(theirs) == len(ours)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow
def test_a_stream_is_learned_from_without_precomputing(checkpoint, tmp_path):
    class Rows:
        def __iter__(self):
            return iter(ROWS)

    trainer = DPOTrainer(checkpoint, args=config(tmp_path, max_steps=4), train_dataset=Rows())
    assert trainer.train().global_step == 4
    with pytest.raises(ValueError, match="a stream has no end"):
        DPOTrainer(
            checkpoint,
            args=config(tmp_path / "b", max_steps=2, precompute_ref_log_probs=True),
            train_dataset=Rows(),
        )
