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
from jrl.notebook import _generator
from tests.trainers.runs import save_tiny_checkpoint


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
    logits = model.logits(params, tokens)
    assert logits.shape == (2, 4, model.lm.config.vocab_size) and logits.dtype == jnp.float32
    np.testing.assert_allclose(model.logits(params, *padded)[:, 3:], logits, atol=1e-5)


def test_random_weights_need_a_key(loaded):
    with pytest.raises(ValueError, match="`key` is required"):
        jrl.load_model(loaded[0].lm.hf_config)


def test_importing_jrl_imports_neither_torch_nor_transformers():
    code = "import sys, jrl; print(sorted({'torch', 'transformers', 'diffusers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
