# SPDX-License-Identifier: Apache-2.0
"""Reward models from pairs of texts: they learn, and what they write is a reward function at once."""

import json
import warnings

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.data.sources.records import RecordStream
from jrl.models.classifier import save_classifier
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier
from tests.tiny import tiny_tokenizer
from tests.trainers.loading.reward_models import save_reward_model
from tests.trainers.runs import (
    COMPARISONS,
    PROMPTS,
    ppo_config,
    repeatable,
    reward_config,
    sft_config,
)

LORA = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "modules_to_save": ["score"]}


def train(config, samples=COMPARISONS, eval_samples=None):
    trainer = prepare(samples=samples, config=config)
    if eval_samples is not None:
        trainer.add_eval_samples(eval_samples)
    trainer.learn()
    return trainer


def texts(kind, samples=COMPARISONS):
    return [sample["prompt"] + sample[kind] for sample in samples]


def held_out(trainer):
    return {name: value for name, value in trainer.evaluate().items() if name.startswith("eval/")}


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    return train(reward_config(checkpoint, tmp_path_factory.mktemp("whole")), eval_samples=COMPARISONS[:3])


def test_it_learns_and_measures_held_out_pairs(whole):
    evaluations = [record for record in whole.history if "evaluation" in record]
    assert [record["step"] for record in evaluations] == [0, 24]
    before, after = (record["eval/reward_model/loss"] for record in evaluations)
    assert 0.4 < before < 1.0 and after < 0.5 * before
    assert evaluations[1]["eval/reward_model/accuracy"] == 1.0
    assert evaluations[1]["eval/reward_model/margin"] > evaluations[0]["eval/reward_model/margin"]
    names = {name for name in whole.history[1] if name.startswith("reward_model/")}
    parts = ("tokens", "loss", "accuracy", "margin", "score_min", "score_mean", "score_max")
    assert names == {f"reward_model/{part}" for part in parts}
    record = next(record for record in whole.history if "iteration" in record)
    assert (
        record["reward_model/score_min"]
        <= record["reward_model/score_mean"]
        <= record["reward_model/score_max"]
    )


def test_tokens_are_those_of_both_texts_with_their_eos(whole):
    """A pass of six pairs in batches of four is two steps, the second with two pairs that only fill it up."""
    steps = [record["reward_model/tokens"] for record in whole.history if "iteration" in record]
    tokenizer = tiny_tokenizer()
    total = sum(
        len(tokenizer(text)["input_ids"]) + 1 for kind in ("chosen", "rejected") for text in texts(kind)
    )
    assert sum(steps[:2]) == total == sum(steps[2:4])


def test_the_program_is_compiled_once_for_a_width(whole):
    assert whole.update._cache_size() == 1


def test_what_is_written_is_a_reward_function_at_once(whole, tmp_path):
    folder = whole.save_pretrained(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2ForSequenceClassification"]
    assert config["pad_token_id"] == 0 and len(config["id2label"]) == 1
    reward = jrl.load_reward_model(folder, batch_size=4)
    chosen, rejected = reward(samples=texts("chosen")), reward(samples=texts("rejected"))
    assert all(good > bad for good, bad in zip(chosen, rejected, strict=True))
    # The score of training: the texts ended in EOS there, and do here.
    margin = whole.measure_samples(whole.samples)["reward_model/margin"]
    assert np.mean(np.subtract(chosen, rejected)) == pytest.approx(margin, abs=1e-4)
    without = jrl.load_reward_model(folder, batch_size=4, append_eos=False)
    assert np.abs(np.subtract(without(samples=texts("chosen")), chosen)).max() > 1e-3
    assert reward(samples=["the cat sat<eos>"]) == pytest.approx(reward(samples=["the cat sat"]), abs=1e-6)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning:transformers", "ignore::Warning:torch")
def test_transformers_opens_what_is_written_with_equal_scores(whole, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = whole.save_pretrained(tmp_path / "model")
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ended = [text + "<eos>" for text in texts("chosen")]
    rows = AutoTokenizer.from_pretrained(folder)(
        ended, padding=True, padding_side="right", return_tensors="pt"
    )
    with torch.no_grad():
        theirs = model.eval()(rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, 0]
    ours = jrl.load_reward_model(folder, batch_size=6)(samples=texts("chosen"))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


def test_a_stream_of_pairs_is_learned_from(checkpoint, tmp_path):
    config = reward_config(checkpoint, tmp_path / "run", train={"total_steps": 2})
    trainer = prepare(samples=COMPARISONS, config=config)
    trainer.add_samples(RecordStream(COMPARISONS))
    trainer.learn()
    assert [record["iteration"] for record in trainer.history] == [1, 2]
    assert jrl.load_reward_model(trainer.save_pretrained(tmp_path / "model"), batch_size=1).append_eos


def test_ids_that_do_not_end_in_eos_are_scored_as_they_are(checkpoint, tmp_path):
    rows = [{"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}]
    trainer = prepare(samples=rows, config=reward_config(checkpoint, tmp_path / "run"))
    reward = jrl.load_reward_model(trainer.save_pretrained(tmp_path / "model"), batch_size=1)
    assert not reward.append_eos


def test_the_seed_decides_the_fresh_head(checkpoint, tmp_path):
    kernels = []
    for seed in (3, 3, 4):
        config = reward_config(checkpoint, tmp_path / "run", train={"seed": seed})
        trainer = prepare(samples=COMPARISONS, config=config)
        kernels.append(np.asarray(trainer.params["score"]["kernel"]))
        assert trainer.description()["score head"] == f"fresh (score), from seed {seed}"
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 0.01


def test_a_reward_model_trains_on_from_its_own_head(whole, tmp_path):
    folder = whole.save_pretrained(tmp_path / "model")
    trainer = prepare(samples=COMPARISONS, config=reward_config(str(folder), tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, trainer.params, whole.params)
    assert trainer.description()["score head"] == "loaded"


@pytest.mark.parametrize("unfrozen", [0, 1])
def test_lore_7_5_the_layers_below_stay_as_they_are(unfrozen, checkpoint, tmp_path):
    config = reward_config(
        checkpoint, tmp_path, model={"num_layers_unfrozen": unfrozen}, train={"total_steps": 2}
    )
    trainer = prepare(samples=COMPARISONS, config=config)
    frozen, params = jax.device_get((trainer.frozen, trainer.params))
    trainer.learn()
    assert set(params) == ({"score", "final_norm", "layers_1"} if unfrozen else {"score"})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.frozen), frozen)
    assert np.abs(trainer.params["score"]["kernel"] - params["score"]["kernel"]).max() > 1e-4


@pytest.mark.slow
def test_lora_trains_saves_its_head_and_is_a_reward_function(checkpoint, tmp_path):
    config = reward_config(
        checkpoint,
        tmp_path / "run",
        model={"peft_config": LORA, "frozen_dtype": "bfloat16"},
        optimizer={"kwargs": {"lr": 1e-2}},
        train={"total_steps": 8},
    )
    trainer = train(config)
    assert set(trainer.params) == {"lora", "score"}
    losses = [record["reward_model/loss"] for record in trainer.history if "iteration" in record]
    assert losses[-1] < 0.7 * losses[0]
    folder = trainer.save_pretrained(tmp_path / "adapter")
    margin = trainer.measure_samples(trainer.samples)["reward_model/margin"]
    merged = trainer.save_pretrained(tmp_path / "merged", merge_adapter=True)
    for path, tolerance in ((folder, 0.05), (merged, 0.05)):
        reward = jrl.load_reward_model(path, batch_size=6)
        found = np.subtract(reward(samples=texts("chosen")), reward(samples=texts("rejected")))
        assert np.mean(found) == pytest.approx(margin, abs=tolerance)  # the base was rounded to bfloat16
    resumed = prepare(samples=COMPARISONS, config=reward_config(str(folder), tmp_path / "on"))
    jax.tree.map(np.testing.assert_array_equal, resumed.params, trainer.params)
    assert resumed.description()["score head"] == "loaded"


def test_a_rounded_base_scores_nearly_as_before_and_is_never_written(checkpoint, tmp_path):
    losses = {}
    for kind in ("float32", "nf4"):
        config = reward_config(checkpoint, tmp_path, model={"peft_config": LORA, "frozen_dtype": kind})
        trainer = prepare(samples=COMPARISONS, config=config)
        losses[kind] = trainer.measure_samples(trainer.samples)["reward_model/loss"]
    assert trainer.frozen["layers_0"]["attn"]["q"]["kernel"].kind == "nf4"
    assert trainer.params["score"]["kernel"].dtype == np.float32
    assert losses["nf4"] == pytest.approx(losses["float32"], abs=0.2) and losses["nf4"] != losses["float32"]
    with pytest.raises(
        ValueError, match=r"`merge_adapter` must be False where `model.frozen_dtype` is int8 or nf4"
    ):
        trainer.save_pretrained(tmp_path / "merged", merge_adapter=True)
    reward = jrl.load_reward_model(trainer.save_pretrained(tmp_path / "adapter"), batch_size=6)
    assert len(reward(samples=texts("chosen"))) == 6


def test_an_adapter_of_a_language_model_is_refused(checkpoint, tmp_path):
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}
    config = sft_config(checkpoint, tmp_path / "sft", model={"peft_config": lora})
    folder = prepare(samples=["a text"], config=config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"got 'CAUSAL_LM'. Is it an adapter of a language model"):
        prepare(samples=COMPARISONS, config=reward_config(str(folder), tmp_path / "run"))


@pytest.mark.slow
def test_an_encoder_learns_too(tmp_path):
    folder = save_reward_model(tmp_path / "start", labelled(ENCODERS["distilbert"], 1))
    config = reward_config(
        folder,
        tmp_path / "run",
        tokenizer={"tokenizer_extra_configs": {"eos_token": "[SEP]"}},
        optimizer={"kwargs": {"lr": 1e-2}},
        train={"total_steps": 8},
    )
    trainer = prepare(samples=COMPARISONS, config=config)
    before = trainer.measure_samples(trainer.samples)["reward_model/loss"]
    trainer.learn()
    assert trainer.measure_samples(trainer.samples)["reward_model/loss"] < 0.7 * before
    reward = jrl.load_reward_model(trainer.save_pretrained(tmp_path / "model"), batch_size=6)
    margin = trainer.measure_samples(trainer.samples)["reward_model/margin"]
    found = np.subtract(reward(samples=texts("chosen")), reward(samples=texts("rejected")))
    assert np.mean(found) == pytest.approx(margin, abs=1e-4)


@pytest.mark.slow
def test_resumed_equals_never_stopped_bit_for_bit(whole, checkpoint, tmp_path):
    train(reward_config(checkpoint, tmp_path, train={"total_steps": 3}), eval_samples=COMPARISONS[:3])
    config = reward_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)})
    resumed = train(config, eval_samples=COMPARISONS[:3])
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    training = [record for record in repeatable(whole.history) if "iteration" in record]
    assert [record for record in repeatable(resumed.history) if "iteration" in record] == training


@pytest.mark.slow
def test_a_policy_trains_against_a_trained_reward_model(whole, checkpoint, tmp_path):
    """From pairs to a policy: its rewards are the reward model's scores of what it wrote."""
    reward = jrl.load_reward_model(whole.save_pretrained(tmp_path / "reward"), batch_size=4)
    config = ppo_config(checkpoint, tmp_path / "policy", train={"total_steps": 4, "reward_timeout": 300.0})
    trainer = jrl.train(reward_fn=reward, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)
    lines = (trainer.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    again = reward(samples=[row["prompt"] + row["output"] for row in rows])
    np.testing.assert_allclose([row["reward"] for row in rows], again, atol=1e-5)
    assert np.std(again) > 1e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": None, "rewards": [1.0]}, "`rewards` are those of `samples`"),
        ({"rewards": [1.0] * 6}, "RewardTrainer learns from `samples` with `chosen` and `rejected`"),
        ({"prompts": ["a"]}, "RewardTrainer learns from `samples` with `chosen` and `rejected`"),
        ({"reward_fn": len}, "`reward_fn` must not be given for RewardTrainer: its model writes no text"),
        ({"samples": [{"chosen": "a"}]}, "row 0 .*'rejected'"),
        ({"samples": ["text"]}, "row 0"),
    ],
)
def test_what_it_does_not_learn_from_is_refused(given, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        jrl.train(config=reward_config(checkpoint, tmp_path), **{"samples": COMPARISONS} | given)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"seq_length": 129}}, "`train.seq_length` is 129, but the model has 128 positions"),
        ({"model": {"num_layers_unfrozen": 3}}, "at most the 2 layers of the model, got 3"),
        ({"model": {"frozen_dtype": "int8"}}, "`model.frozen_dtype` must be float32 or bfloat16 without"),
        (
            {"model": {"model_extra_configs": {"num_labels": 2}}},
            "`model.model_extra_configs.num_labels` must be 1",
        ),
        (
            {"model": {"peft_config": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}}},
            "`peft_type` must be LORA for a gpt2 classifier",
        ),
        ({"model": {"peft_config": LORA | {"task_type": "CAUSAL_LM"}}}, "`task_type` must be SEQ_CLS"),
        ({"model": {"peft_config": LORA | {"modules_to_save": ["classifier", "pooler"]}}}, "got pooler"),
    ],
)
def test_what_does_not_fit_the_model_is_named(sections, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare(samples=COMPARISONS, config=reward_config(checkpoint, tmp_path, **sections))


def test_several_labels_are_refused_with_the_cure(tmp_path):
    model, params = random_classifier(labelled(DECODERS["gpt2"]))
    save_classifier(tmp_path / "m", model, params, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="which puts a fresh head in its place"):
        prepare(samples=COMPARISONS, config=reward_config(str(tmp_path / "m"), tmp_path / "run"))


def test_a_pad_token_that_is_the_eos_is_spoken_of(checkpoint, tmp_path):
    config = reward_config(
        checkpoint, tmp_path / "run", tokenizer={"tokenizer_extra_configs": {"pad_token": "<eos>"}}
    )
    with pytest.warns(UserWarning, match="The tokenizer's pad token is its EOS"):
        trainer = prepare(samples=COMPARISONS, config=config)
    assert trainer.model.hf_config.pad_token_id == 1


def test_dropout_of_an_adapter_is_spoken_of_only_where_it_has_no_effect(checkpoint, tmp_path):
    model = {"peft_config": LORA | {"lora_dropout": 0.1}}
    with pytest.warns(UserWarning, match="`lora_dropout` is 0.1, but jrl trains without dropout"):
        prepare(samples=COMPARISONS, config=reward_config(checkpoint, tmp_path / "run", model=model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = reward_config(checkpoint, tmp_path / "run", model=model, method={"disable_dropout": False})
        prepare(samples=COMPARISONS, config=config)
