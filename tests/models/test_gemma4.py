# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's facts: which layer reads whose keys, rotary positions, experts in two tensors, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import Gemma4TextConfig

from jrl.models.cache import StateCache
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.config import ProportionalRopeScaling, Rope
from jrl.models.families import base
from jrl.models.model import CausalLM, make_model
from jrl.typing import ModelInputs
from tests.models.family_cases_gemma4 import CASES, GEMMA4


def test_the_last_layers_read_the_last_layer_of_their_type_that_has_keys():
    layers = make_model(CASES["gemma4_text"]).config.layers
    assert [layer.keys_of for layer in layers] == [None, None, None, 2, 1]
    assert [layer.lends_keys for layer in layers] == [False, True, True, False, False]
    assert [layer.keys_as_values for layer in layers] == [False, True, False, False, False]
    assert [layer.head_dim for layer in layers] == [None, 12, None, None, 12]
    assert [layer.mlp_width for layer in layers] == [None, None, None, 128, 128]


def test_proportional_positions_turn_the_first_pairs_by_the_wavelengths_of_the_whole_head():
    rope = Rope(100.0, ProportionalRopeScaling(pairs=2, factor=2.0), dim=8)
    np.testing.assert_allclose(rope.frequencies(4), [0.5, 0.5 * 100 ** (-2 / 8), 0.0, 0.0], rtol=1e-6)


def test_stacked_linear_golden():
    # Two experts, one input, gate and up of one output each: (E, out, in).
    tensor = np.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    gate, up = base.stacked_linear().load(tensor, [(2, 1, 1), (2, 1, 1)])
    assert (gate.ravel().tolist(), up.ravel().tolist()) == ([1.0, 3.0], [2.0, 4.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_kv_shared_layers=4), "`num_kv_shared_layers` must be .* got 4 of 5 layers"),
        (dict(num_kv_shared_layers=5), "`num_kv_shared_layers` must be .* got 5 of 5 layers"),
        (dict(use_bidirectional_attention="all"), "a language model reads backwards only"),
        (
            dict(vocab_size_per_layer_input=96),
            "`vocab_size_per_layer_input` must be at least `vocab_size`, 97",
        ),
        (dict(enable_moe_block=True, num_experts=4), "`top_k_experts` must be between 1 and `num_experts`"),
        (
            dict(per_layer_config={0: dict(intermediate_size=48)}),
            "`per_layer_config` must set none but head_dim, num_key_value_heads, got intermediate_size of layer 0",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(Gemma4TextConfig(**GEMMA4 | changes))


def test_attention_in_both_directions_is_refused_with_the_value_of_the_config():
    config = Gemma4TextConfig(**GEMMA4 | dict(use_bidirectional_attention="all"))
    config.is_causal = True  # which the class sets with it, and which is refused first
    with pytest.raises(ValueError, match="`use_bidirectional_attention` must be None, got 'all'"):
        make_model(config)


def test_keys_that_published_checkpoints_hold_and_nobody_reads_are_passed_over(tmp_path):
    model = CausalLM.from_config(CASES["gemma4_text"])
    save_checkpoint(tmp_path, model, model.init(jax.random.key(0)))
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    unread = {"model.layers.3.self_attn.k_proj.weight", "model.layers.4.self_attn.k_norm.weight"}
    assert not unread & held.keys()
    save_file(held | {name: np.ones((8, 8), np.float32) for name in unread}, file)
    assert jax.tree.structure(load_checkpoint(tmp_path).params)
    save_file(held | {"model.layers.2.self_attn.q_bias": np.ones(8, np.float32)}, file)
    with pytest.raises(ValueError, match="q_bias"):
        load_checkpoint(tmp_path)


def test_a_layer_that_reads_lent_keys_has_no_cache_and_others_have_that_of_their_heads():
    model = make_model(CASES["gemma4_text"])
    inputs = ModelInputs(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool))
    cache = jax.eval_shape(lambda: model.policy().init_cache({}, {}, inputs, 10))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(entry)] for entry in cache.layers]
    assert shapes == [[(2, 2, 10, 8)] * 2, [(2, 1, 10, 12)] * 2, [(2, 2, 10, 8)] * 2, [], []]
    assert isinstance(cache.layers[3], StateCache)


@pytest.mark.parametrize(("unfrozen", "kept"), [(1, [1]), (2, [1, 2]), (3, [1]), (4, [])])
def test_a_trunk_keeps_the_lent_keys_that_a_later_layer_reads(unfrozen, kept):
    model = make_model(CASES["gemma4_text"])
    split = dict(num_layers_unfrozen=unfrozen)
    inputs = ModelInputs(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool))

    def trunk(key):
        return model.policy(**split).trunk(model.split_params(model.init(key), **split)[1], inputs)

    assert list(jax.eval_shape(trunk, jax.random.key(0)).lent) == kept


@pytest.mark.parametrize("unfrozen", [1, 3, 4])
def test_a_fresh_value_branch_says_what_the_policy_says(unfrozen):
    """Cut above both lenders, between the two, and below them; whole rows and decoding."""
    model = make_model(CASES["gemma4_text"], value_head="linear")
    split = dict(num_layers_unfrozen=unfrozen, num_value_layers_unfrozen=unfrozen)
    params, frozen = model.split_params(model.init(jax.random.key(0)), **split)
    policy = model.policy(**split)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 2, 97)
    inputs = ModelInputs(tokens, jnp.ones((2, 9), bool).at[0, :2].set(False))

    @jax.jit
    def run(params, frozen):
        whole = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        cache = policy.init_cache(params, frozen, inputs, 9)
        first = ModelInputs(tokens[:, :6], inputs.attention_mask[:, :6])
        _, cache = policy.decode(params, frozen, first, cache)
        rest, _ = policy.decode(params, frozen, ModelInputs(tokens[:, 6:], jnp.ones((2, 3), bool)), cache)
        return whole, rest

    whole, rest = run(params, frozen)
    np.testing.assert_allclose(whole.value, whole.policy, atol=1e-6)
    np.testing.assert_allclose(rest.policy, whole.policy[:, 6:], atol=1e-5)
    np.testing.assert_allclose(rest.value, rest.policy, atol=1e-6)
