# SPDX-License-Identifier: Apache-2.0
"""Experts of a layer in two tensors: read as separate ones, each stacked tensor once, and no other tensor changed."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.model import make_model
from jrl.models.safetensors_io import TensorFiles
from jrl.models.stacked_experts import StackedExperts
from tests.models.family_cases import CASES


def stack(path, count):
    """Rewrites a file so that the experts of every layer lie in two tensors; returns what it held."""
    separate = load_file(path)
    stems = sorted({name.partition(".experts.")[0] for name in separate if ".experts." in name})
    held = {name: tensor for name, tensor in separate.items() if ".experts." not in name}
    for stem in stems:
        own = [f"{stem}.experts.{index}" for index in range(count)]
        held[f"{stem}.experts.gate_up_proj"] = np.stack(
            [
                np.concatenate([separate[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
                for name in own
            ]
        )
        held[f"{stem}.experts.down_proj"] = np.stack([separate[f"{name}.down_proj.weight"] for name in own])
    save_file(held, path)
    return separate


@pytest.fixture
def folder(tmp_path):
    model = make_model(CASES["qwen3_5_moe_text"])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    save_checkpoint(tmp_path, model, params)
    return tmp_path


def test_stacked_experts_are_read_as_the_separate_ones(folder):
    expected = load_checkpoint(folder).params
    separate = stack(folder / "model.safetensors", 5)
    assert "model.layers.0.mlp.experts.gate_up_proj" in TensorFiles(folder)
    loaded = load_checkpoint(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
    save_checkpoint(folder, loaded.model, loaded.params)
    assert load_file(folder / "model.safetensors").keys() == separate.keys()


def test_a_stacked_tensor_is_read_once_for_all_experts(folder, monkeypatch):
    stack(folder / "model.safetensors", 5)
    read, plain = [], TensorFiles.read
    monkeypatch.setattr(
        TensorFiles,
        "read",
        lambda self, name, dtype=None, **options: read.append(name) or plain(self, name, dtype, **options),
    )
    load_checkpoint(folder)
    counts = [read.count(name) for name in {*read} if ".experts." in name]
    assert counts == [1] * 6  # of three layers


def test_a_table_that_has_the_stacked_tensors_gets_them_as_they_are(tmp_path):
    model = make_model(CASES["gpt_oss"])
    save_checkpoint(tmp_path, model, model.init(jax.random.key(0)))
    files = TensorFiles(tmp_path)
    assert StackedExperts(files, {entry.name for entry in model.entries()}).info == files.info
