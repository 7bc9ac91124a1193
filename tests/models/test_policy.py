# SPDX-License-Identifier: Apache-2.0
"""`PolicyFns` of a decoder: the cut, the reference, decoding and what the gradient reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.model import CausalLM
from jrl.models.policy import init_reference, make_policy, merge_params, split_params
from jrl.typing import ModelInputs
from tests.tiny import VOCAB_SIZE, tiny_hf_config, tiny_lm, tiny_policy, tiny_prompts

# (num_layers_unfrozen, num_value_layers_unfrozen) of the two-layer model: each side of every cut.
CUTS = [(-1, 1), (0, 0), (1, 0), (2, 0), (1, 2)]


def scorer(policy):
    @jax.jit
    def score(params, frozen, inputs):
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        values = policy.heads(params, features.value) if "v_head" in params else {}
        return policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE], values, features

    return score


@pytest.mark.parametrize(
    ("unfrozen", "trained", "kept"),
    [
        (-1, {"embed", "layers_0", "layers_1", "final_norm", "lm_head", "v_head"}, set()),
        (0, {"v_head"}, {"embed", "layers_0", "layers_1", "final_norm", "lm_head"}),
        (1, {"layers_1", "final_norm", "lm_head", "v_head"}, {"embed", "layers_0"}),
        (2, {"layers_0", "layers_1", "final_norm", "lm_head", "v_head"}, {"embed"}),
    ],
)
def test_split_of_an_untied_model(unfrozen, trained, kept):
    _, params, frozen, ref_params = tiny_policy("llama", unfrozen)
    assert (set(params), set(frozen), set(ref_params)) == (trained, kept, trained - {"v_head"})


def test_split_freezes_a_tied_head_and_learned_positions():
    _, params, frozen, _ = tiny_policy("gpt2", 1)
    assert set(params) == {"layers_1", "final_norm", "v_head"}
    assert set(frozen) == {"embed", "position", "layers_0"}


@pytest.mark.parametrize(("unfrozen", "own_layers"), CUTS)
def test_cut_changes_nothing_and_merge_undoes_the_split(unfrozen, own_layers):
    lm, whole = tiny_lm("llama")
    policy, params, frozen, _ = tiny_policy("llama", unfrozen, num_value_layers_unfrozen=own_layers)
    prompts = tiny_prompts()
    logits, _, features = scorer(policy)(params, frozen, prompts)
    real = prompts.attention_mask
    np.testing.assert_allclose(logits[real], jax.jit(lm.logits)(whole, *prompts[:2])[real], atol=1e-5)
    # A fresh value branch is a copy, so it starts where the policy is.
    np.testing.assert_allclose(features.policy[real], features.value[real], atol=1e-6)
    merged = merge_params(params, frozen)
    assert set(merged) == set(whole) | {"v_head"}
    jax.tree.map(np.testing.assert_array_equal, {k: merged[k] for k in whole}, whole)


@pytest.mark.parametrize(("family", "unfrozen"), [("gpt2", -1), ("gpt2", 1), ("llama", 0), ("llama", 2)])
def test_lore_3_6_a_copied_reference_has_exactly_zero_kl(family, unfrozen):
    policy, params, frozen, ref_params = tiny_policy(family, unfrozen)

    @jax.jit
    def kl(params, ref_params, frozen, inputs):
        trunk = policy.trunk(frozen, inputs)
        new, ref = (
            jax.nn.log_softmax(policy.logits(p, frozen, policy.branch(p, frozen, trunk, inputs, None).policy))
            for p in (params, ref_params)
        )
        return jnp.where(jnp.isneginf(new), 0.0, new - ref)

    np.testing.assert_array_equal(kl(params, ref_params, frozen, tiny_prompts()), 0.0)


@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_reference_and_frozen_share_no_buffer_with_what_is_donated(unfrozen):
    lm, whole = tiny_lm("llama")
    mine = jax.tree.map(jnp.copy, whole)
    params, frozen = split_params(mine, lm.config, num_layers_unfrozen=unfrozen, num_value_layers_unfrozen=1)
    ref_params = init_reference(params)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((frozen, ref_params)))


def test_lore_2_6_no_dropout_unless_a_key_asks_for_it():
    rates = dict(embd_pdrop=0.5, attn_pdrop=0.5, resid_pdrop=0.5)
    lm = CausalLM.from_config(tiny_hf_config("gpt2", **rates))
    whole = tiny_lm("gpt2")[1]
    policy = lm.policy()
    prompts = tiny_prompts()
    hidden = jax.jit(lambda key: policy.branch(whole, {}, None, prompts, key).policy)
    calm = hidden(None)
    np.testing.assert_array_equal(calm, hidden(None))
    plain = scorer(tiny_policy("gpt2", -1, None)[0])(whole, {}, prompts)[2].policy
    # The same arithmetic, but the weights are constants here and arguments there: compiled apart.
    np.testing.assert_allclose(calm, plain, atol=1e-5)
    dropped, again, other = (hidden(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(dropped, again)
    assert float(jnp.abs(dropped - other).max()) > 0.1 < float(jnp.abs(dropped - calm).max())


def decode_all(policy, params, frozen, inputs, prefill):
    """Features of every column: `prefill` of them in one call, then one a call."""
    length = inputs.tokens.shape[1]
    cache = policy.init_cache(params, frozen, inputs, length)

    def columns(start, stop):
        return ModelInputs(inputs.tokens[:, start:stop], inputs.attention_mask[:, start:stop])

    features, cache = policy.decode(params, frozen, columns(0, prefill), cache)

    def step(cache, column):
        one = jax.tree.map(lambda x: x[:, None], column)
        features, cache = policy.decode(params, frozen, ModelInputs(*one), cache)
        return cache, features

    rest = (inputs.tokens[:, prefill:].T, inputs.attention_mask[:, prefill:].T)
    _, later = jax.lax.scan(step, cache, rest)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :, 0].swapaxes(0, 1)], axis=1), features, later)


@pytest.mark.parametrize(
    ("family", "unfrozen", "own_layers", "dtype"),
    [
        ("gpt2", -1, 0, "float32"),
        ("llama", 1, 0, "float32"),
        ("llama", 1, 2, "float32"),
        ("llama", 0, 0, "bfloat16"),
    ],
)
def test_lore_2_7_cached_decode_equals_scoring(family, unfrozen, own_layers, dtype):
    _, params, frozen, _ = tiny_policy(family, unfrozen, num_value_layers_unfrozen=own_layers)
    if own_layers:
        # The branch must be told from the policy: move it away from its start.
        params = {**params, "value_branch": jax.tree.map(lambda x: 1.3 * x, params["value_branch"])}
    policy = tiny_lm(family)[0].policy(
        num_layers_unfrozen=unfrozen, num_value_layers_unfrozen=own_layers, compute_dtype=jnp.dtype(dtype)
    )
    inputs = tiny_prompts(4, 72)
    inputs = inputs._replace(attention_mask=inputs.attention_mask.at[:, 8:].set(True))
    real = inputs.attention_mask

    # One program for all of it: op by op the comparison takes longer to compile than the model.
    @jax.jit
    def gaps(params, frozen):
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        decoded = decode_all(policy, params, frozen, inputs, prefill=8)
        logprobs = [
            jax.nn.log_softmax(policy.logits(params, frozen, features.policy[:, :-1])[..., :VOCAB_SIZE])
            for features in (scored, decoded)
        ]
        picked = jnp.take_along_axis(logprobs[0] - logprobs[1], inputs.tokens[:, 1:, None], axis=-1)[..., 0]
        values = (scored.value - decoded.value).astype(jnp.float32)
        return jnp.where(real[:, :-1], picked, 0.0), jnp.where(real[:, :, None], values, 0.0)

    logprob_gap, value_gap = (np.abs(gap).max() for gap in gaps(params, frozen))
    assert logprob_gap < (1e-4 if dtype == "float32" else 2e-2)
    assert value_gap < (1e-4 if dtype == "float32" else 0.2)


def test_lore_2_9_the_sampler_reads_every_parameter():
    policy, params, frozen, _ = tiny_policy("gpt2", 1, None)
    inputs = tiny_prompts(2, 6)
    inputs = inputs._replace(attention_mask=jnp.ones((2, 6), bool))

    @jax.jit
    def sampler_and_learner(params, frozen):
        trunk = policy.trunk(frozen, inputs)
        decoded = decode_all(policy, params, frozen, inputs, prefill=4).policy
        scored = policy.branch(params, frozen, trunk, inputs, None).policy
        return [policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE] for hidden in (decoded, scored)]

    before, _ = sampler_and_learner(params, frozen)
    leaves, structure = jax.tree.flatten((params, frozen))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, frozen))]
    for index, path in enumerate(paths):
        noise = np.random.default_rng(index).normal(size=leaves[index].shape).astype(np.float32)
        moved = [leaf + noise if i == index else leaf for i, leaf in enumerate(leaves)]
        decoded, scored = sampler_and_learner(*structure.unflatten(moved))
        np.testing.assert_allclose(decoded, scored, atol=1e-4, err_msg=path)
        # A bias of the keys adds the same to all scores of a query: the softmax cannot see it.
        if "['k']['bias']" not in path:
            assert float(jnp.abs(decoded - before).max()) > 1e-2, path


@pytest.mark.parametrize(("unfrozen", "own_layers"), [(-1, 0), (2, 1), (0, 1)])
def test_gradient_reaches_all_that_trains_and_nothing_frozen(unfrozen, own_layers):
    policy, params, frozen, _ = tiny_policy("llama", unfrozen, num_value_layers_unfrozen=own_layers)
    # A head at 0 passes no gradient on: give it weights.
    params = {**params, "v_head": jax.tree.map(lambda x: x + 0.3, params["v_head"])}
    prompts = tiny_prompts()

    @jax.jit
    def gradients(params, frozen):
        def loss(params, frozen):
            features = policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None)
            logits = policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE]
            return jnp.square(logits).sum() + jnp.square(policy.heads(params, features.value)["values"]).sum()

        return jax.grad(loss)(params, frozen)

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients(params, frozen)):
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)

    def through_frozen(frozen):
        features = policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None)
        return policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE].sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(through_frozen))(frozen)):
        np.testing.assert_array_equal(leaf, 0.0)


def test_trunk_is_absent_when_the_embedding_trains_and_one_array_otherwise():
    prompts = tiny_prompts()
    policy, _, frozen, _ = tiny_policy("llama", -1)
    assert policy.trunk(frozen, prompts) is None
    policy, _, frozen, _ = tiny_policy("llama", 1)
    found = jax.eval_shape(policy.trunk, frozen, prompts)
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [(4, 8, 32)]


def test_remat_changes_neither_value_nor_gradient():
    lm = CausalLM.from_config(tiny_hf_config("llama", num_layers=1))
    params = {name: value for name, value in tiny_lm("llama")[1].items() if name != "layers_1"}
    prompts = tiny_prompts()

    def loss(params, remat):
        return jnp.square(lm.policy(remat=remat).branch(params, {}, None, prompts, None).policy).sum()

    plain, again = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, remat) for remat in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)
    assert "remat" in str(jax.make_jaxpr(lambda p: loss(p, True))(params))


def test_cache_is_updated_in_place_and_per_layer():
    policy, params, frozen, _ = tiny_policy("llama")
    cache = jax.eval_shape(lambda: policy.init_cache(params, frozen, tiny_prompts(B=4), 16))
    assert [[keys.shape for keys in layer.k] for layer in cache.layers] == [[(4, 2, 16, 8)]] * 2
    assert cache.value_layers == ()
    one = ModelInputs(jnp.full((4, 1), 5), jnp.ones((4, 1), bool))
    compiled = jax.jit(policy.decode, donate_argnums=3).lower(params, frozen, one, cache).compile()
    # Donated keys and values are aliased to the results: no step copies the cache.
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * (2 * 2 * 4 * 2 * 16 * 8)


def test_counts_out_of_range_are_refused():
    config = tiny_lm("llama")[0].config
    with pytest.raises(ValueError, match=r"`num_layers_unfrozen` must be -1 .* 2 layers of the model, got 3"):
        make_policy(config, num_layers_unfrozen=3)
    with pytest.raises(ValueError, match="`num_value_layers_unfrozen` must be between 0 and the 2 layers"):
        split_params({}, config, num_layers_unfrozen=1, num_value_layers_unfrozen=3)
