# SPDX-License-Identifier: Apache-2.0
"""The cost said beforehand is what the arrays then take."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from transformers import T5Config

import jrl
from jrl.mesh import AXES, make_mesh, rows_of_device
from jrl.models.adapters.config import read_adapter_config
from jrl.models.cost import device_bytes, different_results, estimate_cost, format_bytes, results_of_rows
from jrl.models.model import make_model
from jrl.typing import ModelInputs
from tests.tiny import tiny_hf_config, tiny_lm

OPTIMIZER = optax.adamw(1e-3)
TINY_T5 = T5Config(
    vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
)


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_5_text"])
@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_cost_is_what_the_arrays_take(family, num_layers_unfrozen):
    lm, params = tiny_lm(family)
    trainable, frozen = lm.split_params(params, num_layers_unfrozen=num_layers_unfrozen)
    policy = lm.policy(num_layers_unfrozen=num_layers_unfrozen)
    inputs = ModelInputs(jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), bool))
    cost = estimate_cost(lm, OPTIMIZER.init, rows=3, length=20, num_layers_unfrozen=num_layers_unfrozen)
    assert cost.parameter_bytes == num_bytes(params) == device_bytes(params)
    assert cost.optimizer_bytes == num_bytes(OPTIMIZER.init(trainable))
    assert cost.cache_bytes == num_bytes(policy.init_cache(trainable, frozen, inputs, 20))
    # 97 rows of the vocabulary count, not the 128 that are held.
    padding = 31 * 32 * (1 if lm.config.tie_embeddings else 2)
    assert cost.parameters == sum(leaf.size for leaf in jax.tree.leaves(params)) - padding
    assert cost.trainable + cost.frozen == cost.parameters and bool(cost.frozen) is (num_layers_unfrozen == 1)


def test_a_state_takes_as_much_for_a_long_row_as_for_a_short_one():
    lm, _ = tiny_lm("qwen3_5_text")
    short, long = (
        estimate_cost(lm, OPTIMIZER.init, rows=3, length=length).cache_bytes for length in (20, 40)
    )
    # One layer of two: keys and values of 2 heads of 8, the mask, and a position, of every row and column.
    assert long - short == 20 * 3 * (2 * 2 * 8 * 4 + 1 + 4)


def test_heads_and_dtypes():
    lm, _ = tiny_lm("gpt2")
    full = estimate_cost(lm, OPTIMIZER.init)
    half = estimate_cost(lm, OPTIMIZER.init, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    assert half.parameter_bytes == full.parameter_bytes / 2
    assert full.length == 128 == lm.max_positions  # cut to what the model has
    masks = 128 * (4 + 1) + 4 + 4
    assert (half.cache_bytes - masks) * 2 == full.cache_bytes - masks
    headed = estimate_cost(replace(lm, value_head="mlp", num_q_heads=1), OPTIMIZER.init, dtype=jnp.bfloat16)
    value, q_head = 32 * 64 + 64 + 64 + 1, 32 * 64 + 64
    # float32 whatever the rest is, the targets included; their vocabulary is padded to 128.
    assert headed.parameter_bytes - half.parameter_bytes == 4 * (value + 2 * (q_head + 65 * 128))
    # Two moments in the type of their parameters, and none for the targets.
    assert headed.optimizer_bytes - half.optimizer_bytes == 2 * 4 * (value + q_head + 65 * 128)


def test_an_adapter_trains_alone():
    lm, _ = tiny_lm("llama")
    adapter = read_adapter_config({"peft_type": "LORA", "r": 4})
    cost = estimate_cost(lm, OPTIMIZER.init, adapter=adapter)
    assert cost.trainable < 0.2 * cost.frozen
    assert cost.optimizer_bytes == 2 * 4 * cost.trainable + 4  # two moments and a counter


def test_seq2seq():
    lm = make_model(TINY_T5)
    cost = estimate_cost(lm, OPTIMIZER.init, rows=2, length=16)
    # Keys and values of two layers: the decoder's own 16 columns, and 16 of the encoder.
    arrays = 2 * 2 * (2 * 16 * 4 * 8) * 2 * 4
    assert arrays <= cost.cache_bytes < 1.1 * arrays
    assert str(cost).startswith("t5: ")


def test_several_devices_share_it():
    # Nothing is placed: the devices need not exist.
    mesh = AbstractMesh((1, 2, 2), AXES, (AxisType.Auto,) * 3)
    lm, _ = tiny_lm("gpt2")
    alone, shared = (estimate_cost(lm, OPTIMIZER.init, rows=4, mesh=m) for m in (None, mesh))
    assert shared.num_devices == 4
    assert alone.parameter_bytes / 4 < shared.parameter_bytes < alone.parameter_bytes / 3
    assert alone.cache_bytes / 4 <= shared.cache_bytes < alone.cache_bytes / 3.8
    real = estimate_cost(lm, OPTIMIZER.init, rows=4, mesh=make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    assert real == alone


@pytest.mark.parametrize(("rows", "own"), [(8, 2), (4, 1), (3, 3), (6, 6)])
def test_rows_of_a_device(rows, own):
    assert rows_of_device(rows, AbstractMesh((2, 2, 2), AXES, (AxisType.Auto,) * 3)) == own


def test_real_sizes_cost_nothing_to_ask():
    config = tiny_hf_config("llama", 32, hidden_size=4096, intermediate_size=11008, vocab_size=32000)
    config.num_attention_heads = config.num_key_value_heads = 32
    config.head_dim = 128
    cost = jrl.estimate_cost(config, rows=8)
    assert cost.parameters == 6_738_415_616
    assert "6,738,415,616 parameters (float32)" in str(
        cost
    ) and "parameters 25.1 GiB, optimizer 50.2 GiB" in str(cost)


def test_load_model_says_it_first(capsys, tmp_path):
    model, params = jrl.load_model(tiny_hf_config("gpt2"), key=jax.random.key(0))
    expected = str(jrl.estimate_cost(tiny_hf_config("gpt2")))
    assert capsys.readouterr().err == expected + "\n"
    jrl.save_model(tmp_path / "m", model, params, max_shard_bytes=20_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    # Before a tensor is read: here it cannot be.
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        jrl.load_model(tmp_path / "m")
    assert capsys.readouterr().err == expected + "\n"
    jrl.load_model(tiny_hf_config("gpt2"), key=jax.random.key(0), quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**50, "3072.0 TiB"),
        (-88 << 20, "-88.0 MiB"),
    ],
)
def test_sizes_read_well(count, text):
    assert format_bytes(count) == text


def test_arrays_of_one_device_are_added_up():
    assert device_bytes({"a": jnp.zeros((2, 3)), "b": jnp.asarray(np.zeros(5, np.int8))}) == 29


def test_views_of_one_array_are_counted_once():
    @jax.jit
    def twice(y):
        return y.reshape(-1), jnp.cos(y)

    def program(x):
        y = jnp.sin(x)
        return y, y.T, y[None], *twice(y), jnp.broadcast_to(y, (4, 2, 3)), x.reshape(3, 2), jnp.zeros(())

    found = different_results(jax.make_jaxpr(program)(jnp.ones((2, 3))).jaxpr)
    assert [leaf.shape for leaf in found] == [(2, 3), (2, 3), (4, 2, 3)]


@pytest.mark.parametrize("times", [2, 3, 8])
def test_rows_that_a_program_repeats_are_counted_beside_those_that_it_does_not(times):
    """Guidance doubles rows, experts take each token several times.

    An array of twice the rows is what as many of the others are of twice as many rows.
    """

    def trace(count):
        def kept(x):
            repeated = jnp.concatenate([x] * times)
            return jnp.sin(x), jnp.cos(x), jnp.sin(repeated), jnp.arange(3) * 2

        return jax.make_jaxpr(kept)(jnp.zeros((count, 4))).jaxpr

    once, repeated = ((6, 4), jnp.dtype("float32")), ((6 * times, 4), jnp.dtype("float32"))
    assert results_of_rows(trace, 6) == {once: 2, repeated: 1}


def test_two_calls_of_one_function_give_results_of_their_own():
    @jax.jit
    def pair(y):
        z = jnp.cos(y)
        return z, z.reshape(-1), y.T

    found = different_results(jax.make_jaxpr(lambda x: (*pair(x), *pair(jnp.sin(x))))(jnp.ones((2, 3))).jaxpr)
    assert [leaf.shape for leaf in found] == [(2, 3), (2, 3), (3, 2)]
