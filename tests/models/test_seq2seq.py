# SPDX-License-Identifier: Apache-2.0
"""`PolicyFns` of an encoder-decoder: the cut, the reference, decoding, and what the gradient reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig, PrefixConfig
from jrl.models.config import VOCAB_MULTIPLE
from jrl.models.model import make_model
from jrl.models.policy import init_reference, merge_params
from jrl.models.seq2seq_attention import distance_buckets
from jrl.typing import ModelInputs
from tests.tiny import VOCAB_SIZE, tiny_contexts, tiny_hf_config, tiny_lm, tiny_policy, tiny_prompts

OUTER = {"embed", "encoder_relative_bias", "decoder_relative_bias", "encoder_final_norm"}
LOWER = OUTER | {"encoder_layers_0", "encoder_layers_1"}


@pytest.fixture(scope="module", autouse=True)
def models():
    """Makes the parameters that all tests share."""
    return [tiny_lm("t5", num_layers) for num_layers in (1, 2)]


def scored(policy, params, frozen, inputs):
    """Features and logits over the real vocabulary."""
    features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
    return features, policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE]


@pytest.mark.parametrize(
    ("unfrozen", "trained", "kept"),
    [
        (-1, LOWER | {"layers_0", "layers_1", "final_norm", "lm_head", "v_head"}, set()),
        (0, {"v_head"}, LOWER | {"layers_0", "layers_1", "final_norm", "lm_head"}),
        (1, {"layers_1", "final_norm", "lm_head", "v_head"}, LOWER | {"layers_0"}),
        (2, {"layers_0", "layers_1", "final_norm", "lm_head", "v_head"}, LOWER),
    ],
)
def test_split(unfrozen, trained, kept):
    _, params, frozen, ref_params = tiny_policy("t5", unfrozen)
    assert (set(params), set(frozen), set(ref_params)) == (trained, kept, trained - {"v_head"})


@pytest.mark.parametrize("unfrozen", [-1, 0, 1, 2])
def test_cut_changes_nothing_and_merge_undoes_the_split(unfrozen):
    lm, whole = tiny_lm("t5")
    policy, params, frozen, ref_params = tiny_policy("t5", unfrozen)
    inputs = tiny_contexts(L=6)

    @jax.jit
    def logits(params, frozen, ref_params):
        trunk = policy.trunk(frozen, inputs)
        features = (policy.branch(p, frozen, trunk, inputs, None) for p in (params, ref_params))
        return [
            policy.logits(p, frozen, f.policy)[..., :VOCAB_SIZE]
            for p, f in zip((params, ref_params), features, strict=True)
        ]

    mine, reference = logits(params, frozen, ref_params)
    expected = jax.jit(lm.logits)(whole, *inputs[:2], context_tokens=inputs[3], context_mask=inputs[4])
    np.testing.assert_allclose(mine, expected, atol=1e-5)
    # The branch has the relative positions too, so a copied reference has exactly zero KL.
    np.testing.assert_array_equal(mine, reference)
    merged = merge_params(params, frozen)
    assert set(merged) == set(whole) | {"v_head"}
    jax.tree.map(np.testing.assert_array_equal, {name: merged[name] for name in whole}, whole)


def test_the_trunk_has_rows_and_is_absent_when_everything_trains():
    inputs = tiny_contexts(B=3, C=8, L=6)
    policy, _, frozen, _ = tiny_policy("t5", -1)
    assert policy.trunk(frozen, inputs) is None
    policy, _, frozen, _ = tiny_policy("t5", 1)
    trunk = jax.eval_shape(policy.trunk, frozen, inputs)
    assert (trunk.encoded.shape, trunk.hidden.shape) == ((3, 8, 32), (3, 6, 32))


@pytest.mark.parametrize(("unfrozen", "dtype"), [(-1, "float32"), (1, "float32"), (0, "bfloat16")])
def test_cached_decode_equals_scoring(unfrozen, dtype):
    _, params, frozen, _ = tiny_policy("t5", unfrozen)
    policy = tiny_lm("t5")[0].policy(num_layers_unfrozen=unfrozen, compute_dtype=jnp.dtype(dtype))
    inputs = tiny_contexts(B=3, C=24, L=30)

    @jax.jit
    def both(params, frozen):
        features, logits = scored(policy, params, frozen, inputs)
        cache = policy.init_cache(params, frozen, inputs, inputs.tokens.shape[1])
        prefill = ModelInputs(inputs.tokens[:, :4], inputs.attention_mask[:, :4])
        first, cache = policy.decode(params, frozen, prefill, cache)

        def step(cache, tokens):
            one = ModelInputs(tokens[:, None], jnp.ones((3, 1), bool))
            features, cache = policy.decode(params, frozen, one, cache)
            return cache, features.policy[:, 0]

        _, later = jax.lax.scan(step, cache, inputs.tokens[:, 4:].T)
        decoded = jnp.concatenate([first.policy, later.swapaxes(0, 1)], axis=1)
        return features.policy, decoded, logits, policy.logits(params, frozen, decoded)[..., :VOCAB_SIZE]

    features, decoded, logits, decoded_logits = both(params, frozen)
    close = dict(atol=1e-5, rtol=1e-5) if dtype == "float32" else dict(atol=0.1)
    np.testing.assert_allclose(decoded.astype(jnp.float32), features.astype(jnp.float32), **close)
    if dtype == "float32":
        np.testing.assert_allclose(decoded_logits, logits, atol=1e-4)
    assert float(logits.std()) > 0.1


def padded(inputs, left, right):
    """The same rows with more padding, full of ids that are none."""
    fill = VOCAB_SIZE * 100

    def pad(ids, mask, sides):
        widths = ((0, 0), sides)
        return jnp.pad(ids, widths, constant_values=fill), jnp.pad(mask, widths)

    tokens, mask = pad(inputs.tokens, inputs.attention_mask, (left, right))
    return ModelInputs(tokens, mask, None, *pad(inputs.context_tokens, inputs.context_mask, (right, left)))


def test_rows_know_neither_padding_nor_neighbours():
    policy, params, frozen, _ = tiny_policy("t5", 1)
    run = jax.jit(lambda inputs: scored(policy, params, frozen, inputs)[1])
    inputs = tiny_contexts(B=3, C=16, L=10)
    expected = run(padded(inputs, 0, 5))[:, :10]
    np.testing.assert_allclose(run(padded(inputs, 5, 0))[:, 5:], expected, atol=1e-5)
    neighbour = jax.tree.map(lambda x: x[jnp.array([2, 1, 1])], inputs)
    np.testing.assert_allclose(run(padded(neighbour, 0, 5))[1, :10], expected[1], atol=1e-5)
    # And it does read the context.
    other = tiny_prompts(3, 16, seed=7)
    moved = inputs._replace(context_tokens=other.tokens, context_mask=other.attention_mask)
    assert float(jnp.abs(run(padded(moved, 0, 5))[:, :10] - expected).max()) > 0.1


@pytest.mark.parametrize(("unfrozen", "num_layers"), [(-1, 1), (1, 2), (0, 1)])
def test_gradient_reaches_all_that_trains_and_nothing_frozen(unfrozen, num_layers):
    policy, params, frozen, _ = tiny_policy("t5", unfrozen, num_layers=num_layers)
    # A head at 0 passes no gradient on: give it weights.
    params = {**params, "v_head": jax.tree.map(lambda x: x + 0.3, params["v_head"])}
    inputs = tiny_contexts(B=3, C=24, L=24)

    @jax.jit
    def gradients(params, frozen):
        def loss(params, frozen):
            features, logits = scored(policy, params, frozen, inputs)
            values = policy.heads(params, features.value)["values"]
            return jnp.square(logits).sum() + jnp.square(values).sum()

        return jax.grad(loss, argnums=(0, 1))(params, frozen)

    trained, kept = gradients(params, frozen)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)
    for leaf in jax.tree.leaves(kept):
        np.testing.assert_array_equal(leaf, 0.0)


def test_the_sampler_reads_every_parameter():
    policy, params, frozen, _ = tiny_policy("t5", 1, None)
    inputs = tiny_contexts(B=2, C=24, L=24)

    @jax.jit
    def sampler_and_learner(params, frozen):
        cache = policy.init_cache(params, frozen, inputs, inputs.tokens.shape[1])
        decoded, _ = policy.decode(params, frozen, ModelInputs(*inputs[:2]), cache)
        logits = policy.logits(params, frozen, decoded.policy)[..., :VOCAB_SIZE]
        return logits, scored(policy, params, frozen, inputs)[1]

    before, _ = sampler_and_learner(params, frozen)
    leaves, structure = jax.tree.flatten((params, frozen))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, frozen))]
    for index, path in enumerate(paths):
        noise = np.random.default_rng(index).normal(size=leaves[index].shape).astype(np.float32)
        moved = [leaf + noise if i == index else leaf for i, leaf in enumerate(leaves)]
        decoded, learner = sampler_and_learner(*structure.unflatten(moved))
        np.testing.assert_allclose(decoded, learner, atol=1e-3, err_msg=path)
        assert float(jnp.abs(decoded - before).max()) > 1e-2, path


def test_no_dropout_unless_a_key_asks_for_it():
    lm, whole = tiny_lm("t5", 1)
    policy, calm_policy = make_model(tiny_hf_config("t5", 1, dropout_rate=0.3)).policy(), lm.policy()
    inputs = tiny_contexts(L=6)
    hidden = jax.jit(lambda key: policy.branch(whole, {}, None, inputs, key).policy)
    calm = hidden(None)
    plain = jax.jit(lambda: calm_policy.branch(whole, {}, None, inputs, None).policy)()
    np.testing.assert_allclose(calm, plain, atol=1e-5)
    dropped, again, other = (hidden(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(dropped, again)
    assert float(jnp.abs(dropped - other).max()) > 0.1 < float(jnp.abs(dropped - calm).max())


@pytest.mark.slow
def test_remat_changes_neither_value_nor_gradient():
    lm, whole = tiny_lm("t5", 1)
    inputs = tiny_contexts(B=2, L=6)

    def loss(params, remat):
        return jnp.square(lm.policy(remat=remat).branch(params, {}, None, inputs, None).policy).sum()

    plain, again = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(whole, remat) for remat in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)
    assert "remat" in str(jax.make_jaxpr(lambda p: loss(p, True))(whole))


def test_the_padding_of_the_vocabulary_is_never_written():
    policy, params, frozen, _ = tiny_policy("t5", 0, None)
    logits = jax.jit(policy.logits)(params, frozen, jnp.ones((2, 32)))
    assert logits.shape == (2, 2 * VOCAB_MULTIPLE)
    assert bool(jnp.isneginf(logits[:, VOCAB_SIZE:]).all() & jnp.isfinite(logits[:, :VOCAB_SIZE]).all())
    np.testing.assert_array_equal(frozen["embed"]["embedding"][VOCAB_SIZE:], 0.0)
    np.testing.assert_array_equal(frozen["lm_head"]["kernel"][:, VOCAB_SIZE:], 0.0)


def test_distances_of_four_exact_and_four_widening_buckets():
    # log(d / 4) / log(20 / 4) · 4, rounded down: 4 → 0, 6 → 1.007, 9 → 2.02, 14 → 3.11.
    expected = [0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7]
    np.testing.assert_array_equal(distance_buckets(8, 20), expected)


def test_versions_differ_in_mlp_and_head():
    first = make_model(tiny_hf_config("t5", feed_forward_proj="relu", tie_word_embeddings=True)).config
    second = tiny_lm("t5")[0].config
    assert (first.activation, first.gated_mlp, first.tie_embeddings) == ("relu", False, True)
    assert first.logit_scale == pytest.approx(32**-0.5)
    assert (second.activation, second.gated_mlp, second.tie_embeddings) == ("gelu_tanh", True, False)
    assert second.logit_scale is None


def test_what_it_cannot_do_is_refused():
    lm, _ = tiny_lm("t5")
    with pytest.raises(ValueError, match="`num_value_layers_unfrozen` must be 0 for a seq2seq model"):
        lm.policy(num_value_layers_unfrozen=1)
    with pytest.raises(ValueError, match=r"at most the 2 decoder layers of the model, got 3"):
        lm.split_params({}, num_layers_unfrozen=3)
    policy, _, frozen, _ = tiny_policy("t5", 1)
    with pytest.raises(ValueError, match="`context_tokens` and `context_mask` must be given"):
        policy.trunk(frozen, tiny_prompts())
    packed = tiny_contexts(L=4)._replace(segment_ids=jnp.zeros((4, 4), jnp.int32))
    with pytest.raises(ValueError, match="`segment_ids` must be None"):
        policy.trunk(frozen, packed)
    with pytest.raises(ValueError, match="`is_encoder_decoder` must be true"):
        make_model(tiny_hf_config("t5", is_encoder_decoder=False))


def test_lora_trains_adapters_and_the_frozen_model_is_the_reference():
    lm, whole = tiny_lm("t5", 1)
    adapter = LoraConfig(r=2)
    policy = lm.policy(adapter=adapter)
    params, frozen = lm.split_params(whole, adapter=adapter, key=jax.random.key(5))
    assert set(params) == {"lora"} and set(frozen) == set(whole) and init_reference(params) == {}
    inputs = tiny_contexts(B=3, L=6)
    moved = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(6), x.shape), params)
    run = jax.jit(lambda params: [scored(policy, p, frozen, inputs)[1] for p in ({}, params)])
    np.testing.assert_allclose(*run(params), atol=1e-4)
    base, end = run(moved)
    assert float(jnp.abs(end - base).max()) > 0.1

    @jax.jit
    def decoded(params):
        cache = policy.init_cache(params, frozen, inputs, 6)
        features, _ = policy.decode(params, frozen, ModelInputs(*inputs[:2]), cache)
        return policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE]

    np.testing.assert_allclose(decoded(moved), end, atol=1e-4)


@pytest.mark.parametrize(
    ("targets", "has_trunk"),
    [(None, False), (r"decoder\.block\.0\..*\.q", False), (r"decoder\.block\.1\..*\.wo", True)],
)
def test_the_trunk_ends_below_the_lowest_adapter(targets, has_trunk):
    lm, whole = tiny_lm("t5")
    policy = lm.policy(num_layers_unfrozen=1, adapter=LoraConfig(target_modules=targets))
    trunk = jax.eval_shape(policy.trunk, whole, tiny_contexts(L=6))
    assert (trunk is not None) is has_trunk


def test_virtual_tokens_are_refused():
    with pytest.raises(ValueError, match="`peft_type` must be LORA for a seq2seq model"):
        tiny_lm("t5")[0].policy(adapter=PrefixConfig(num_virtual_tokens=2))
