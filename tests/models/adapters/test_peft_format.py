# SPDX-License-Identifier: Apache-2.0
"""Adapter folders: written and read again, and what is wrong with a damaged one."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrl.models.adapters import LoraConfig, PrefixConfig, PromptConfig
from jrl.models.adapters.peft_format import (
    is_adapter_folder,
    load_adapter,
    load_heads,
    read_adapter_folder,
    save_adapter,
)
from jrl.models.checkpoint import save_checkpoint
from jrl.models.heads import init_q_heads, init_value_head
from tests.tiny import tiny_lm

SIZES = {"width": 32, "vocab_size": 97, "padded_vocab_size": 128}
CONFIGS = {
    "lora": LoraConfig(r=2, target_modules=("c_attn",)),
    "dora": LoraConfig(r=2, target_modules=("c_attn",), use_dora=True),
    "prefix": PrefixConfig(3),
    "prompt": PromptConfig(3),
}


def saved(folder, config, **options):
    """(adapter, trainable parameters) of the tiny GPT-2, written."""
    lm, whole = tiny_lm("gpt2")
    params, _ = lm.split_params(whole, adapter=config, key=jax.random.key(0))
    adapter = lm.bind(config)
    save_adapter(folder, adapter, params | options.pop("heads", {}), base_model="some/base", **options)
    return adapter, params


@pytest.mark.parametrize("name", CONFIGS)
def test_written_and_read_again(name, tmp_path):
    adapter, params = saved(tmp_path / "a", CONFIGS[name])
    assert is_adapter_folder(tmp_path / "a") and not is_adapter_folder(tmp_path)
    found = read_adapter_folder(tmp_path / "a")
    assert (found.config, found.base_model) == (CONFIGS[name], "some/base")
    jax.tree.map(np.testing.assert_array_equal, load_adapter(found.folder, adapter), params)


@pytest.mark.parametrize(("kind", "names"), [("mlp", {"0", "2"}), ("linear", {"summary"})])
def test_a_value_head_lies_beside_it_under_the_names_of_trlx_and_trl(kind, names, tmp_path):
    head = {"v_head": init_value_head(kind, 32, jax.random.key(0))}
    saved(tmp_path / "a", CONFIGS["lora"], heads=head)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert set(stored) == {f"v_head.{name}.{leaf}" for name in names for leaf in ("weight", "bias")}
    jax.tree.map(np.testing.assert_array_equal, load_heads(tmp_path / "a", **SIZES), head)


def test_q_heads_lie_beside_it_under_the_names_of_trlx_without_padding(tmp_path):
    heads = {"v_head": init_value_head("mlp", 32, jax.random.key(0))}
    heads |= init_q_heads(2, *SIZES.values(), jax.random.key(1))
    # Targets of their own, and a last layer that says something.
    heads["target_q_heads"] = jax.tree.map(lambda leaf: leaf + 1, heads["target_q_heads"])
    saved(tmp_path / "a", CONFIGS["lora"], heads=heads, vocab_size=97)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored["ilql_heads.q_heads.1.2.weight"].shape == (97, 64)
    assert {name.split(".")[1] for name in stored} == {"v_head", "q_heads", "target_q_heads"}
    found = load_heads(tmp_path / "a", **SIZES)
    assert jax.tree.structure(found) == jax.tree.structure(heads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        expected = jax.tree_util.tree_leaves_with_path(heads)
        np.testing.assert_array_equal(leaf[..., :97], dict(expected)[path][..., :97])
    with pytest.raises(ValueError, match="`vocab_size` must be given to write Q heads"):
        saved(tmp_path / "b", CONFIGS["lora"], heads=heads)


def test_a_folder_is_an_adapter_or_a_model_and_never_both(tmp_path):
    lm, whole = tiny_lm("gpt2")
    save_checkpoint(tmp_path / "a", lm, whole)
    saved(tmp_path / "a", CONFIGS["lora"])
    assert load_heads(tmp_path / "a", **SIZES) == {} and is_adapter_folder(tmp_path / "a")
    save_checkpoint(tmp_path / "a", lm, whole)
    assert not is_adapter_folder(tmp_path / "a")
    assert not (tmp_path / "a" / "adapter_model.safetensors").exists()


NAME = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NAME), f"1 tensor is missing: {NAME}"),
        (
            lambda tensors: tensors.update(other=np.zeros(2, np.float32)),
            "1 tensor has no place in a lora adapter: other",
        ),
        (lambda tensors: tensors.update({NAME: np.zeros((3, 32), np.float32)}), "must have shape (2, 32)"),
        (
            lambda tensors: tensors.update({NAME: np.full((2, 32), np.nan, np.float32)}),
            "holds NaN or infinity",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    adapter, _ = saved(tmp_path, CONFIGS["lora"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_adapter(tmp_path, adapter)
    assert str(tmp_path) in str(error.value)


def test_a_pickled_adapter_is_refused(tmp_path):
    adapter, _ = saved(tmp_path, CONFIGS["lora"])
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin"):
        load_adapter(tmp_path, adapter)


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    saved(tmp_path, CONFIGS["lora"])
    file = tmp_path / "adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"use_qalora": True}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: peft_config: `use_qalora` must be off"):
        read_adapter_folder(tmp_path)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: Expecting"):
        read_adapter_folder(tmp_path)


def test_a_pickled_value_head_is_not_passed_over(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin, a pickle"):
        load_heads(tmp_path, **SIZES)
