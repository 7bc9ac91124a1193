# SPDX-License-Identifier: Apache-2.0
"""Prefix and prompt tuning as a cache that is not empty: decoding, scoring, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.optimizers import decayed
from jrl.models.adapters import PrefixConfig, PromptConfig, read_adapter_config
from tests.models.test_policy import decode_all, scorer
from tests.tiny import VOCAB_SIZE, tiny_lm, tiny_prompts

CONFIGS = {
    "prefix": PrefixConfig(3),
    "projected": PrefixConfig(3, prefix_projection=True, encoder_hidden_size=8),
    "prompt": PromptConfig(3),
}


def tuned(family, config):
    lm, whole = tiny_lm(family)
    params, frozen = lm.split_params(whole, adapter=config, key=jax.random.key(0))
    return lm.policy(adapter=config), params, frozen


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_lore_2_7_decoding_equals_scoring_and_padding_changes_nothing(family, name):
    policy, params, frozen = tuned(family, CONFIGS[name])
    inputs = tiny_prompts(3, 8)
    real = np.asarray(inputs.attention_mask)
    lengths = real.sum(axis=1)
    columns = np.arange(8)[None, :]
    right = columns < lengths[:, None]
    # The same rows with their padding on the other side.
    source = np.where(right, columns + 8 - lengths[:, None], 0)
    moved = inputs._replace(
        tokens=jnp.take_along_axis(inputs.tokens, jnp.asarray(source), axis=1),
        attention_mask=jnp.asarray(right),
    )

    @jax.jit
    def all_three(params, frozen):
        scored = [policy.branch(params, frozen, None, rows, None).policy for rows in (inputs, moved)]
        return *scored, decode_all(policy, params, frozen, inputs, prefill=5).policy

    scored, shifted, decoded = all_three(params, frozen)
    np.testing.assert_allclose(scored[real], decoded[real], atol=1e-4)
    np.testing.assert_allclose(scored[real], shifted[right], atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_reaches_the_virtual_tokens_alone(name):
    policy, params, frozen = tuned("llama", CONFIGS[name])
    prompts = tiny_prompts()

    def loss(params, frozen):
        hidden = policy.branch(params, frozen, None, prompts, None).policy
        return jnp.square(policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]).sum()

    gradient, of_frozen = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, frozen)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)
    for leaf in jax.tree.leaves(of_frozen):
        np.testing.assert_array_equal(leaf, 0.0)


def test_the_reference_knows_no_virtual_tokens():
    policy, _, frozen = tuned("gpt2", CONFIGS["prefix"])
    lm, whole = tiny_lm("gpt2")
    prompts = tiny_prompts()
    real = prompts.attention_mask
    np.testing.assert_allclose(
        scorer(policy)({}, frozen, prompts)[0][real], jax.jit(lm.logits)(whole, *prompts[:2])[real], atol=1e-5
    )


def test_a_prompt_of_real_embeddings_is_a_prompt_of_tokens():
    lm, whole = tiny_lm("gpt2")
    ids = (5, 9, 7)
    config = PromptConfig(3, "TEXT", "any", text_ids=ids)
    policy, params, frozen = tuned("gpt2", config)
    prompts = tiny_prompts(2, 6)
    prompts = prompts._replace(attention_mask=jnp.ones((2, 6), bool))
    longer = jnp.concatenate([jnp.broadcast_to(jnp.asarray(ids), (2, 3)), prompts.tokens], axis=1)
    np.testing.assert_allclose(
        scorer(policy)(params, frozen, prompts)[0], jax.jit(lm.logits)(whole, longer)[:, 3:], atol=1e-4
    )


def test_starts():
    lm, whole = tiny_lm("llama")

    def start(config):
        return lm.split_params(whole, adapter=config, key=jax.random.key(0))[0]

    assert float(jnp.abs(start(PrefixConfig(2, init_weights="zero"))["prefix"]["embedding"]).max()) == 0.0
    projected = start(PrefixConfig(2, prefix_projection=True, init_weights="zero"))["prefix"]
    assert all(float(jnp.abs(leaf).max()) == 0.0 for leaf in jax.tree.leaves(projected["out"]))
    sampled = start(PromptConfig(2, "SAMPLE_VOCAB"))["prompt"]["embedding"]
    table = np.asarray(whole["embed"]["embedding"])
    assert all((table == np.asarray(row)).all(axis=1).any() for row in sampled)


def test_weight_decay_skips_the_biases_of_the_projection():
    lm, whole = tiny_lm("llama")
    params, _ = lm.split_params(whole, adapter=CONFIGS["projected"], key=jax.random.key(0))
    one = {"kernel": True, "bias": False}
    assert decayed(params) == {"prefix": {"embedding": True, "in": one, "out": one}}


def test_virtual_tokens_of_another_task_are_refused():
    given = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2, "task_type": "SEQ_2_SEQ_LM"}
    with pytest.raises(
        ValueError, match="`task_type` must be CAUSAL_LM for a llama model; got 'SEQ_2_SEQ_LM'"
    ):
        tiny_lm("llama")[0].bind(read_adapter_config(given))


def test_what_virtual_tokens_exclude():
    lm, _ = tiny_lm("llama")
    with pytest.raises(
        ValueError, match="`num_value_layers_unfrozen` must be 0 under prefix and prompt tuning"
    ):
        lm.policy(adapter=PrefixConfig(2), num_value_layers_unfrozen=1)
    policy, params, frozen = tuned("llama", CONFIGS["prefix"])
    packed = tiny_prompts()._replace(segment_ids=jnp.zeros((4, 8), jnp.int32))
    with pytest.raises(ValueError, match="`segment_ids` must be None under prefix and prompt tuning"):
        policy.branch(params, frozen, None, packed, None)
