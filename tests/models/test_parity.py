# SPDX-License-Identifier: Apache-2.0
"""Against torch transformers: the same checkpoint gives the same logits, in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.heads import ValueHead, init_value_head
from jrl.models.model import CausalLM
from tests.tiny import VOCAB_SIZE, tiny_hf_config

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra")

# Every variant of every family is in test_family_parity.py; here are sharded files and longer padding.
VARIANTS = {"gpt2": ("gpt2", {}), "llama": ("llama", {})}
PADS = (0, 1, 7, 63)
LENGTH = 40


def random_params(model):
    """Every parameter is random, norms and biases included: a transform that swaps two of them is seen."""
    params = model.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    params = structure.unflatten(noisy)
    # The padding of the vocabulary is 0, and stays so.
    params["embed"]["embedding"] = params["embed"]["embedding"].at[VOCAB_SIZE:].set(0.0)
    if "lm_head" in params:
        params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[:, VOCAB_SIZE:].set(0.0)
    return params


def left_padded():
    """One row for each number of left pads, all of them cut to the same width on the right."""
    rng = np.random.default_rng(0)
    mask = np.arange(max(PADS) + LENGTH)[None, :] >= np.array(PADS)[:, None]
    return np.where(mask, rng.integers(2, VOCAB_SIZE, mask.shape), 0).astype(np.int32), mask


def torch_logits(folder, tokens, mask):
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    attention_mask = torch.tensor(mask).long()
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = oracle(torch.tensor(tokens).long(), attention_mask=attention_mask, position_ids=positions)
    return oracle, out.logits.numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_opens_what_jrl_saves_and_jrl_what_torch_saves(variant, tmp_path):
    family, overrides = VARIANTS[variant]
    model = CausalLM.from_config(tiny_hf_config(family, **overrides))
    params = random_params(model)
    save_checkpoint(tmp_path / "jrl", model, params, max_shard_bytes=30_000)
    tokens, mask = left_padded()
    logits = np.asarray(jax.jit(model.logits)(params, tokens, mask))
    oracle, expected = torch_logits(tmp_path / "jrl", tokens, mask)
    np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-4)

    oracle.save_pretrained(tmp_path / "torch")
    loaded = load_checkpoint(tmp_path / "torch")
    assert loaded.model.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_value_head_equals_torch_layers_on_the_saved_tensors(kind, tmp_path):
    model = CausalLM.from_config(tiny_hf_config("gpt2"))
    head = jax.tree.map(lambda x: x + 0.1, init_value_head(kind, 32, jax.random.key(2)))
    save_checkpoint(tmp_path / "m", model, {**random_params(model), "v_head": head})
    saved = load_file(tmp_path / "m" / "model.safetensors")
    hidden = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    if kind == "linear":
        layers = torch.nn.ModuleDict({"summary": torch.nn.Linear(32, 1)})
        run = layers["summary"]
    else:
        layers = run = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    layers.load_state_dict(
        {
            name.removeprefix("v_head."): torch.tensor(t)
            for name, t in saved.items()
            if name.startswith("v_head.")
        }
    )
    with torch.no_grad():
        expected = run(torch.tensor(hidden))[:, 0].numpy()
    values = ValueHead(kind).apply({"params": head}, jnp.asarray(hidden))
    np.testing.assert_allclose(values, expected, atol=1e-5)


def test_fresh_torch_models_have_the_same_spread(tmp_path):
    config = tiny_hf_config("gpt2", n_embd=128, n_inner=512, initializer_range=0.05)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "torch")
    theirs = load_checkpoint(tmp_path / "torch").params
    ours = CausalLM.from_config(config).init(jax.random.key(0))

    def spread(tree):
        return {
            jax.tree_util.keystr(path): leaf.std() for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    for path, expected in spread(theirs).items():
        np.testing.assert_allclose(spread(ours)[path], expected, rtol=0.05, err_msg=path)
