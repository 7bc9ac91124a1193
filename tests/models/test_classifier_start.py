# SPDX-License-Identifier: Apache-2.0
"""What a reward model starts from: its own head, or a fresh one, the same for the same key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import T5Config

from jrl.mesh import make_mesh
from jrl.models.checkpoint import save_checkpoint
from jrl.models.classifier import save_classifier
from jrl.models.classifier_start import describe_start, load_start
from jrl.models.heads import init_value_head
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier
from tests.tiny import tiny_hf_config, tiny_lm

KEY = jax.random.key(7)


def start(path: Any, key: Any = KEY, **options: Any) -> Any:
    return load_start(path, key, mesh=make_mesh(1, 1, 1, devices=jax.devices()[:1]), **options)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_language_model_gets_a_fresh_head_that_the_key_decides(family: str, tmp_path: Path) -> None:
    lm, params = tiny_lm(family)
    # The head of its logits and a value head are passed over.
    save_checkpoint(tmp_path, lm, {**params, "v_head": init_value_head("mlp", 32, KEY)})
    found = start(tmp_path)
    assert found.fresh == ("score",) and found.model.labels == ("LABEL_0",)
    body = {name: value for name, value in found.params.items() if name != "score"}
    jax.tree.map(np.testing.assert_array_equal, body, {name: params[name] for name in body})
    kernel = np.asarray(found.params["score"]["kernel"])
    assert kernel.shape == (32, 1) and kernel.dtype == np.float32 and 0.05 < kernel.std() < 0.2
    np.testing.assert_array_equal(start(tmp_path).params["score"]["kernel"], kernel)
    assert np.abs(start(tmp_path, jax.random.key(8)).params["score"]["kernel"] - kernel).max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "roberta"])
def test_a_classifier_with_one_label_keeps_its_head(name: str, tmp_path: Path) -> None:
    model, params = random_classifier(labelled((ENCODERS | DECODERS)[name], 1))
    save_classifier(tmp_path, model, params)
    found = start(tmp_path)
    assert found.fresh == ()
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_several_labels_are_refused_with_the_cure_and_the_cure_works(name: str, tmp_path: Path) -> None:
    model, params = random_classifier(labelled((ENCODERS | DECODERS)[name]))
    save_classifier(tmp_path, model, params)
    cure = r"scores 3 labels, and a reward model has 1: .*model_extra_configs: \{num_labels: 1\}`"
    with pytest.raises(ValueError, match=cure):
        start(tmp_path)
    found = start(tmp_path, changes={"num_labels": 1})
    head = "score" if name == "llama" else "classifier"
    assert found.fresh == (head,) and found.params[head]["kernel"].shape == (32, 1)
    same = {key: value for key, value in found.params.items() if key != head}
    jax.tree.map(np.testing.assert_array_equal, same, {key: params[key] for key in same})
    with pytest.raises(ValueError, match=r"`model.model_extra_configs.num_labels` must be 1, got 2"):
        start(tmp_path, changes={"num_labels": 2})


def test_an_encoder_without_its_classifier_gets_a_fresh_one(tmp_path: Path) -> None:
    """As the checkpoint of masked language modelling that BERT is published as."""
    model, params = random_classifier(labelled(ENCODERS["bert"]))
    save_classifier(tmp_path, model, params)
    tensors = {
        name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if not name.startswith("classifier")
    }
    tensors["cls.predictions.bias"] = np.zeros(97, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = start(tmp_path)
    assert found.fresh == ("classifier",)
    np.testing.assert_array_equal(found.params["pooler"]["kernel"], params["pooler"]["kernel"])
    tensors["bert.extra"] = np.zeros(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no place in a bert classifier: bert.extra"):
        start(tmp_path)


def test_a_config_object_is_random_weights_with_one_label() -> None:
    config = tiny_hf_config("gpt2")
    found = start(config)
    assert config.num_labels == 2 and found.model.hf_config.num_labels == 1 and found.fresh == ("score",)
    jax.tree.map(np.testing.assert_array_equal, found.params, start(config).params)
    with pytest.raises(ValueError, match=r"is a config object: set \['n_embd'\] on that object"):
        describe_start(config, {"n_embd": 64})


def test_the_body_takes_the_dtype_and_the_head_stays_float32(tmp_path: Path) -> None:
    lm, params = tiny_lm("gpt2")
    save_checkpoint(tmp_path, lm, params)
    found = start(tmp_path, dtype=jnp.bfloat16).params
    assert found["layers_0"]["attn"]["q"]["kernel"].dtype == jnp.bfloat16
    assert found["score"]["kernel"].dtype == jnp.float32


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="t5: a classifier must be an encoder or a decoder"):
        describe_start(T5Config())
