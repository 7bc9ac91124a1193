# SPDX-License-Identifier: Apache-2.0
"""Multimodal checkpoints: the text model is read from every layout, and the rest comes back bit for bit."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrl.models.checkpoint import load_checkpoint, read_model, save_checkpoint
from jrl.models.classifier import Classifier
from jrl.models.model import make_model
from jrl.models.multimodal import LAYOUTS, find_layout
from tests.models.multimodal_cases import CASES, PROCESSOR, write_checkpoint


def vision(prefix):
    """Tensors of another part, of kinds that a text model does not have."""
    rng = np.random.default_rng(0)
    return {
        f"{prefix}layers.0.self_attn.q_proj.weight": rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16),
        f"{prefix}steps": np.arange(3, dtype=np.int64),
        f"{prefix}scale": np.asarray(0.3, np.float32),
        f"{prefix}input_max": np.asarray(np.inf, np.float32),
    }


@pytest.mark.parametrize(
    ("layout", "prefix"),
    [(LAYOUTS[0], "vision_tower."), (LAYOUTS[1], "model.visual."), (LAYOUTS[2], "visual.")],
)
def test_what_is_not_text_comes_back_bit_for_bit_in_the_layout_that_it_had(layout, prefix, tmp_path):
    eyes = vision(prefix)
    text = write_checkpoint(tmp_path / "hub", "qwen3_vl", layout, eyes)
    loaded = load_checkpoint(tmp_path / "hub")
    moved = jax.tree.map(lambda x: x + 1.0, loaded.params)
    save_checkpoint(tmp_path / "saved", loaded.model, moved)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == (text | eyes).keys()
    for name, tensor in eyes.items():
        assert found[name].dtype == tensor.dtype and found[name].tobytes() == tensor.tobytes(), name
    for name, tensor in text.items():
        np.testing.assert_array_equal(found[name], tensor + 1.0)
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text() == PROCESSOR
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"] and config["vision_config"]
    # Into the folder that it was read from, too.
    save_checkpoint(tmp_path / "hub", loaded.model, loaded.params)
    assert load_file(tmp_path / "hub" / "model.safetensors")[f"{prefix}steps"].tolist() == [0, 1, 2]


def test_layouts_are_told_apart_by_their_names():
    names = ["vision_tower.layers.0.weight", "language_model.model.norm.weight", "model.visual.norm.weight"]
    assert find_layout(names) == LAYOUTS[0]
    assert find_layout(["model.visual.norm.weight", "model.language_model.norm.weight"]) == LAYOUTS[1]
    assert find_layout(["visual.norm.weight", "model.norm.weight", "lm_head.weight"]) == LAYOUTS[2]


def test_the_model_is_that_of_the_text_config_and_ends_at_its_tokens(tmp_path):
    write_checkpoint(tmp_path / "m", "gemma3", LAYOUTS[0], vision("vision_tower."))
    model = read_model(tmp_path / "m")
    assert (model.config.num_layers, model.vocab_size) == (3, 97)
    assert model.text_config.eos_token_id == 1 and model.eos_token_ids == ()


def test_a_model_without_a_checkpoint_is_not_saved(tmp_path):
    model = make_model(CASES["gemma3"])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    with pytest.raises(ValueError, match="can be saved only if it was read from a checkpoint"):
        save_checkpoint(tmp_path / "new", model, params)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def folder(tmp_path):
    CASES["gemma3"].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 0.25}, {"text_config": {"rms_norm_eps": 0.25}}],
    ids=["as-it-is", "mapping"],
)
def test_a_change_reaches_the_text_model(folder, changes):
    plain, changed = read_model(folder), read_model(folder, changes)
    assert changed.config.norm_epsilon == 0.25 != plain.config.norm_epsilon
    assert changed.config.layers == plain.config.layers
    assert changed.hf_config.vision_config.to_dict() == plain.hf_config.vision_config.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_epz": 1.0}, "no entry `rms_norm_epz` to change. Did you mean `rms_norm_eps`"),
        ({"text_config": {"rms_norm_epz": 1.0}}, "no entry `rms_norm_epz`"),
        ({"text_config": 3}, "a change of `text_config` must be a mapping of its entries, got 3"),
    ],
)
def test_a_change_of_nothing_is_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        read_model(folder, changes)


def test_a_classifier_is_a_text_model_alone():
    with pytest.raises(ValueError, match="gemma3: a classifier must be a text model alone"):
        Classifier.from_config(CASES["gemma3"])


def test_another_text_model_is_refused():
    config = CASES["mistral3"].__class__(text_config=dict(model_type="llama"))
    with pytest.raises(
        ValueError, match="mistral3: the text model must be one of mistral, ministral3, got 'llama'"
    ):
        make_model(config)


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_torch_opens_the_same_class_with_the_same_vision(case, tmp_path):
    from tests.models.parity import auto_class, perturbed, reopened

    oracle = perturbed(CASES[case], seed=0)
    oracle.save_pretrained(tmp_path / "torch")
    loaded = load_checkpoint(tmp_path / "torch")
    save_checkpoint(tmp_path / "jrl", loaded.model, loaded.params)
    returned = reopened(tmp_path / "jrl", auto_class(CASES[case]))
    assert type(returned) is type(oracle)
    theirs, back = oracle.state_dict(), returned.state_dict()
    assert theirs.keys() == back.keys() and any("vis" in name for name in theirs)
    for name, tensor in theirs.items():
        assert tensor.dtype == back[name].dtype and tensor.equal(back[name]), name
