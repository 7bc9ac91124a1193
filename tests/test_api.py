# SPDX-License-Identifier: Apache-2.0
"""The public face: `jrl.train`, and a model in a notebook."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.cli import main
from jrl.models.checkpoint import load_checkpoint
from jrl.notebook import _generator
from tests.trainers.runs import save_tiny_checkpoint, sft_config


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return jrl.load_model(save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def prompts(width=4):
    return jnp.ones((2, width), jnp.int32), jnp.ones((2, width), bool)


def test_train_takes_the_seeds_arguments_in_the_seeds_order():
    assert list(inspect.signature(jrl.train).parameters) == [
        "model_path",
        "reward_fn",
        "dataset",
        "samples",
        "rewards",
        "prompts",
        "eval_prompts",
        "metric_fn",
        "config",
        "stop_sequences",
    ]


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(ValueError, match=r"give `reward_fn`.*or `samples`"):
        jrl.train("somewhere")


def test_generate_is_the_same_inside_jit_and_compiles_once(loaded, key):
    model, params = loaded
    settings = dict(max_new_tokens=3, eos_token_id=1, pad_token_id=0)
    eager = [model.generate(params, *prompts(), key, **settings, temperature=t) for t in (1.0, 1.0, 0.5)]
    jitted = jax.jit(lambda params, tokens, mask: model.generate(params, tokens, mask, key, **settings))
    np.testing.assert_array_equal(eager[0], eager[1])
    np.testing.assert_array_equal(eager[0], jitted(params, *prompts()))
    assert _generator(model.lm, 3, (1,), 0, 0)._cache_size() == 1


def test_generate_refuses_more_positions_than_the_model_has(loaded, key):
    model, params = loaded
    positions = model.lm.config.max_positions
    with pytest.raises(ValueError, match=rf"`max_new_tokens` is {positions}.*has {positions} positions"):
        model.generate(params, *prompts(), key, max_new_tokens=positions)


def test_logits_have_the_real_vocabulary_and_do_not_see_padding(loaded):
    model, params = loaded
    tokens, mask = prompts()
    padded = jnp.pad(tokens, ((0, 0), (3, 0))), jnp.pad(mask, ((0, 0), (3, 0)))
    logits = jax.jit(model.logits)(params, tokens)
    assert logits.shape == (2, 4, model.lm.config.vocab_size) and logits.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(model.logits)(params, *padded)[:, 3:], logits, atol=1e-5)


def test_random_weights_need_a_key(loaded):
    with pytest.raises(ValueError, match="`key` is required"):
        jrl.load_model(loaded[0].lm.hf_config)


def test_importing_jrl_imports_neither_torch_nor_transformers():
    code = "import sys, jrl; print(sorted({'torch', 'transformers', 'diffusers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_adapter_folder_is_its_base_with_the_adapter_merged(tmp_path):
    base = save_tiny_checkpoint(tmp_path / "base")
    # B is random too, or the adapter would change nothing.
    peft_config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": False}
    config = sft_config(base, tmp_path / "run", model={"peft_config": peft_config})
    trainer = prepare(samples=["the cat sat"], eval_prompts=["the"], config=config)
    folder = trainer.save_pretrained(tmp_path / "adapter")
    _, params = jrl.load_model(folder, quiet=True)
    expected = load_checkpoint(trainer.save_pretrained(tmp_path / "merged", merge_adapter=True)).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)
    kernels = [tree["layers_0"]["attn"]["q"]["kernel"] for tree in (params, load_checkpoint(base).params)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01
    assert jrl.estimate_cost(folder).parameters == jrl.estimate_cost(base).parameters
    assert main(["generate", "--model", str(folder), "--prompt", "the", "--max-new-tokens", "2"]) == 0


def test_virtual_tokens_are_no_model_of_their_own(tmp_path):
    base = save_tiny_checkpoint(tmp_path / "base")
    peft_config = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}
    config = sft_config(base, tmp_path / "run", model={"peft_config": peft_config})
    trainer = prepare(samples=["the cat sat"], eval_prompts=["the"], config=config)
    with pytest.raises(ValueError, match="holds virtual tokens, which are no part of any weight"):
        jrl.load_model(trainer.save_pretrained(tmp_path / "adapter"), quiet=True)
