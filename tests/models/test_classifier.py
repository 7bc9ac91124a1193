# SPDX-License-Identifier: Apache-2.0
"""Classifiers on disk and in memory: what is written is read back, scores ignore padding, and mistakes are named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import T5Config

from jrl.models.checkpoint import save_checkpoint
from jrl.models.classifier import Classifier, load_classifier, save_classifier
from tests.models.classifier_cases import DECODERS, ENCODERS, LABELS, labelled, random_classifier
from tests.tiny import tiny_lm, tiny_tokenizer


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_what_is_saved_is_loaded_back(name, tmp_path):
    config = labelled((ENCODERS | DECODERS)[name])
    config.problem_type = "multi_label_classification"
    model, params = random_classifier(config)
    save_classifier(tmp_path / "c", model, params, tokenizer=tiny_tokenizer(), max_shard_bytes=20_000)
    assert (tmp_path / "c" / "model.safetensors.index.json").exists()
    assert (tmp_path / "c" / "tokenizer.json").exists()
    again, loaded = load_classifier(tmp_path / "c")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert again.config == model.config and again.labels == LABELS
    assert again.hf_config.problem_type == "multi_label_classification"
    assert again.hf_config.architectures == [model.architecture]


def test_a_decoder_is_read_at_the_last_real_token():
    model, params = random_classifier(labelled(DECODERS["llama"]))
    scores = jax.jit(model.scores)
    text = np.random.default_rng(0).integers(2, 97, (1, 6))
    mask = np.ones((1, 6), bool)
    expected = scores(params, text, mask)
    for left, right in ((0, 3), (3, 0), (2, 1)):
        widths = ((0, 0), (left, right))
        padded = np.pad(text, widths, constant_values=1000)
        found = scores(params, padded, np.pad(mask, widths))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(scores(params, text[:, :5], mask[:, :5]) - expected).max() > 1e-3
    np.testing.assert_array_equal(scores(params, text, ~mask), np.zeros((1, 3)))


@pytest.mark.parametrize("name", ["distilbert", "gpt2"])
def test_parameters_take_the_dtype_and_heads_stay_float32(name, tmp_path):
    model, params = random_classifier(labelled((ENCODERS | DECODERS)[name]))
    save_classifier(tmp_path, model, params)
    _, half = load_classifier(tmp_path, dtype=jnp.bfloat16)
    assert half["layers_0"]["attn"]["q"]["kernel"].dtype == jnp.bfloat16
    head = half["classifier" if name == "distilbert" else "score"]
    assert head["kernel"].dtype == jnp.float32
    tokens, mask = np.full((1, 4), 5), np.ones((1, 4), bool)
    scores = jax.eval_shape(lambda *args: model.scores(*args, compute_dtype=jnp.bfloat16), half, tokens, mask)
    assert (scores.shape, scores.dtype) == ((1, 3), jnp.float32)


def test_names_of_old_files_are_understood(tmp_path):
    model, params = random_classifier(labelled(ENCODERS["bert"]))
    save_classifier(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(48)[None]
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, load_classifier(tmp_path)[1], params)


def test_an_old_roberta_has_a_pooler_that_nobody_reads(tmp_path):
    model, params = random_classifier(labelled(ENCODERS["roberta"]))
    save_classifier(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["roberta.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, load_classifier(tmp_path)[1], params)


def test_a_language_model_is_no_classifier(tmp_path):
    lm, params = tiny_lm("gpt2")
    save_checkpoint(tmp_path, lm, params)
    message = (
        "there is no classification head: score.weight is missing. config.json names GPT2LMHeadModel; "
        "a classifier needs GPT2ForSequenceClassification"
    )
    with pytest.raises(ValueError, match=message):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("classifier.bias"),
            "no classification head: classifier.bias is missing",
        ),
        (lambda tensors: tensors.pop("bert.pooler.dense.weight"), "missing: bert.pooler.dense.weight"),
        (
            lambda tensors: tensors.update(extra=np.zeros(3, np.float32)),
            "no place in a bert classifier: extra",
        ),
        (
            lambda tensors: tensors.update({"classifier.bias": np.zeros(2, np.float32)}),
            r"classifier.bias must have shape \(3,\) by its config, got \(2,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    model, params = random_classifier(labelled(ENCODERS["bert"]))
    save_classifier(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "spiral"}, r"{folder}: bert: .*spiral"),
        ({"num_attention_heads": 0}, r"{folder}/config.json .*ZeroDivisionError"),
    ],
)
def test_errors_of_the_config_name_the_folder(changes, message, tmp_path):
    config = labelled(ENCODERS["bert"]).to_dict() | {"model_type": "bert"} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message.format(folder=tmp_path)) as error:
        load_classifier(tmp_path)
    assert "\n" not in str(error.value)


def test_a_reward_model_is_called_one(tmp_path):
    for path in ("", str(tmp_path / "nowhere")):
        with pytest.raises(
            (ValueError, FileNotFoundError), match=r"^the reward model must be a folder or a name"
        ):
            load_classifier(path)


def test_other_architectures_are_refused(tmp_path):
    with pytest.raises(ValueError, match="t5: a classifier must be an encoder or a decoder"):
        Classifier.from_config(T5Config())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}))
    with pytest.raises(ValueError, match="'albert' is not supported; supported are: arcee, bamba, bert, "):
        load_classifier(tmp_path)


def test_a_fresh_decoder_has_a_small_random_score_head():
    model = Classifier.from_config(labelled(DECODERS["gpt2"]))
    params = model.init(jax.random.key(0))
    assert params["score"]["kernel"].shape == (32, 3) and "lm_head" not in params
    assert 0.05 < float(params["score"]["kernel"].std()) < 0.2  # `initializer_range` is 0.1


def test_saving_refuses_a_tree_of_something_else(tmp_path):
    model, params = random_classifier(labelled(DECODERS["gpt2"]))
    del params["score"]
    with pytest.raises(ValueError, match="missing or unknown: score/kernel"):
        save_classifier(tmp_path / "c", model, params)
    assert not (tmp_path / "c").exists()
