# SPDX-License-Identifier: Apache-2.0
"""The layouts of trlX and TRL, from files written by hand and into files with exactly their names and shapes."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.heads import init_q_heads, init_value_head
from tests.tiny import VOCAB_SIZE, tiny_lm, tiny_tokenizer

WIDTH, PADDED = 32, 128
RNG = np.random.default_rng(0)
MLP_HEAD = {"0.weight": (64, 32), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,)}
Q_HEAD = {"0.weight": (64, 32), "0.bias": (64,), "2.weight": (VOCAB_SIZE, 64), "2.bias": (VOCAB_SIZE,)}
TRLX_VALUE = {f"v_head.{name}": shape for name, shape in MLP_HEAD.items()}
TRL_VALUE = {"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)}
ILQL = {f"ilql_heads.v_head.{name}": shape for name, shape in MLP_HEAD.items()} | {
    f"ilql_heads.{kind}.{index}.{name}": shape
    for kind in ("q_heads", "target_q_heads")
    for index in (0, 1)
    for name, shape in Q_HEAD.items()
}


def written_by_hand(tensors):
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}


@pytest.fixture
def plain(tmp_path):
    """A folder without heads, its tensors, and a function that replaces them."""
    model, params = tiny_lm("gpt2")
    save_checkpoint(tmp_path / "m", model, params)
    file = tmp_path / "m" / "model.safetensors"
    return tmp_path / "m", load_file(file), lambda tensors: save_file(tensors, file)


def check_mlp(params, tensors, prefix):
    np.testing.assert_array_equal(params["hidden"]["kernel"], tensors[f"{prefix}.0.weight"].T)
    np.testing.assert_array_equal(params["hidden"]["bias"], tensors[f"{prefix}.0.bias"])
    out = tensors[f"{prefix}.2.weight"].T
    np.testing.assert_array_equal(params["out"]["kernel"][:, : out.shape[1]], out)
    np.testing.assert_array_equal(params["out"]["bias"][: out.shape[1]], tensors[f"{prefix}.2.bias"])


def base_of(params):
    return {name: value for name, value in params.items() if "head" not in name}


def test_trlx_until_0_7_value_head_beside_the_model(plain):
    folder, tensors, replace = plain
    head = written_by_hand(TRLX_VALUE)
    replace(tensors | head)
    loaded = load_checkpoint(folder)
    assert (loaded.model.value_head, loaded.model.num_q_heads) == ("mlp", 0)
    check_mlp(loaded.params["v_head"], head, "v_head")


def test_trlx_head_wrapped_model_with_a_copy_of_the_references_layers(plain):
    folder, tensors, replace = plain
    expected = load_checkpoint(folder).params
    head = written_by_hand(TRLX_VALUE)
    frozen = {f"frozen_head.decoder_blocks.0.{name}": np.ones(3, np.float32) for name in ("ln_1.weight", "x")}
    replace({f"base_model.{name}": tensor for name, tensor in tensors.items()} | head | frozen)
    loaded = load_checkpoint(folder)
    check_mlp(loaded.params["v_head"], head, "v_head")
    jax.tree.map(np.testing.assert_array_equal, base_of(loaded.params), base_of(expected))


@pytest.mark.parametrize("wrapped", [False, True])
def test_trlx_ilql_heads(plain, wrapped, tmp_path):
    folder, tensors, replace = plain
    heads = written_by_hand(ILQL)
    prefix = "base_model." if wrapped else ""
    replace({prefix + name: tensor for name, tensor in tensors.items()} | heads)
    loaded = load_checkpoint(folder, dtype=jnp.bfloat16)
    assert (loaded.model.value_head, loaded.model.num_q_heads) == ("mlp", 2)
    check_mlp(loaded.params["v_head"], heads, "ilql_heads.v_head")
    for kind in ("q_heads", "target_q_heads"):
        for index in (0, 1):
            params = loaded.params[kind][str(index)]
            check_mlp(params, heads, f"ilql_heads.{kind}.{index}")
            assert (
                params["out"]["kernel"].shape == (64, PADDED) and params["out"]["kernel"].dtype == jnp.float32
            )
            assert not params["out"]["kernel"][:, VOCAB_SIZE:].any()
    # Back in trlX's own names and shapes, and unwrapped, so that plain transformers reads it as well.
    save_checkpoint(tmp_path / "back", loaded.model, loaded.params)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: found[name].shape for name in found if name.startswith("ilql")} == ILQL
    for name in heads:
        np.testing.assert_array_equal(found[name], heads[name])
    assert found.keys() == tensors.keys() | heads.keys()


def test_one_q_head(tmp_path):
    model, params = tiny_lm("llama")
    params = params | init_q_heads(1, WIDTH, VOCAB_SIZE, PADDED, jax.random.key(0))
    save_checkpoint(tmp_path / "m", model, params)
    loaded = load_checkpoint(tmp_path / "m")
    assert (loaded.model.value_head, loaded.model.num_q_heads) == (None, 1)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, dict(params))
    fresh = jax.eval_shape(loaded.model.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, loaded.params)


def test_trl_linear_value_head(plain):
    folder, tensors, replace = plain
    head = written_by_hand(TRL_VALUE)
    replace(tensors | head)
    loaded = load_checkpoint(folder)
    assert loaded.model.value_head == "linear"
    np.testing.assert_array_equal(loaded.params["v_head"]["out"]["kernel"], head["v_head.summary.weight"].T)


@pytest.mark.parametrize(("kind", "layout"), [("mlp", TRLX_VALUE), ("linear", TRL_VALUE)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_value_heads_are_written_in_the_layout_of_their_library(tmp_path, family, kind, layout):
    model, params = tiny_lm(family)
    save_checkpoint(
        tmp_path / "m", model, params | {"v_head": init_value_head(kind, WIDTH, jax.random.key(0))}
    )
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert {name: found[name].shape for name in found if "head." in name and "lm_head" not in name} == layout


def test_the_same_tensor_under_two_names_is_refused(plain):
    folder, tensors, replace = plain
    replace(tensors | {"wte.weight": tensors["transformer.wte.weight"].copy()})
    with pytest.raises(ValueError, match=r"model\.safetensors: .*wte\.weight are the same tensor"):
        load_checkpoint(folder)


def test_half_a_head_is_named(plain):
    folder, tensors, replace = plain
    heads = written_by_hand(ILQL)
    heads.pop("ilql_heads.target_q_heads.1.2.bias")
    replace(tensors | heads)
    with pytest.raises(ValueError, match=r"1 tensor is missing: ilql_heads\.target_q_heads\.1\.2\.bias"):
        load_checkpoint(folder)


def test_nothing_half_loaded_comes_back(plain):
    folder, tensors, replace = plain
    bad = tensors["transformer.h.1.mlp.c_fc.weight"].copy()
    bad[3, 5] = np.nan
    replace(tensors | {"transformer.h.1.mlp.c_fc.weight": bad})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: transformer\.h\.1\.mlp\.c_fc\.weight holds NaN"
    ):
        load_checkpoint(folder)


def test_the_generation_config_comes_along(plain, tmp_path):
    folder, _, _ = plain
    # transformers would refuse to write this one; it is kept as it is.
    content = {"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text(json.dumps(content))
    loaded = load_checkpoint(folder)
    assert loaded.model.generation_config == content
    save_checkpoint(tmp_path / "back", loaded.model, loaded.params)
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == content


@pytest.mark.parity
def test_the_line_that_converts_a_pickle_keeps_the_heads(plain):
    torch = pytest.importorskip("torch")
    folder, tensors, _ = plain
    tensors = tensors | written_by_hand(TRLX_VALUE)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, some in enumerate((names[::2], names[1::2])):
        # Transposed views, which safetensors does not take as they are.
        copies = {name: torch.from_numpy(tensors[name].T.copy()) for name in some}
        pickled = {name: copy.permute(*range(copy.ndim)[::-1]) for name, copy in copies.items()}
        torch.save(pickled, folder / f"pytorch_model-{part}.bin")
    (folder / "training_args.bin").write_bytes(b"no tensors")
    with pytest.raises(FileNotFoundError, match="a pickle") as error:
        load_checkpoint(folder)
    line = str(error.value).partition("where torch is: ")[2]
    assert line.startswith("python -c") and "\n" not in line
    subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)
    loaded = load_checkpoint(folder)
    check_mlp(loaded.params["v_head"], tensors, "v_head")


def test_tokenizer_and_chat_template_are_kept(tmp_path):
    model, params = tiny_lm("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "t"))
    save_checkpoint(tmp_path / "m", model, params, tokenizer=tokenizer)
    found = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert found.chat_template == "{{ messages[0].content }}" and len(found) == VOCAB_SIZE


def save_tokenizer(folder):
    tiny_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder
