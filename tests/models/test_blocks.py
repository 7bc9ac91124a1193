# SPDX-License-Identifier: Apache-2.0
"""Every kind of block and of position: decoding agrees with scoring, and padding changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.attention import attend, full_context
from jrl.models.blocks import BLOCKS
from jrl.models.config import Experts, LayerConfig, Rope, TransformerConfig
from jrl.models.policy import make_policy
from jrl.models.positions import alibi_slopes
from jrl.models.score_blocks import Operands
from jrl.models.transformer import init_decoder
from jrl.typing import ModelInputs

BASE = TransformerConfig(
    vocab_size=97,
    width=32,
    layers=(LayerConfig(8**-0.5),) * 2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=64,
    max_positions=64,
    activation="gelu_tanh",
    gated_mlp=False,
    norm="layer",
    norm_epsilon=1e-5,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    tie_embeddings=False,
    init_range=0.2,
)
ROTARY = LayerConfig(8**-0.5, rope=Rope(100.0))
KINDS = {
    "alibi": dict(alibi=True, embedding_norm=True),
    "offset-post-norm-narrow": dict(
        learned_positions=True, position_offset=2, block="post_norm", final_norm=False, embedding_width=16
    ),
    "parallel-interleaved": dict(
        layers=(LayerConfig(8**-0.5, rope=Rope(100.0, dim=4, interleaved=True)),) * 2,
        block="parallel",
        head_bias=True,
    ),
    "parallel-two-norms": dict(layers=(ROTARY,) * 2, block="parallel_two_norms"),
    "sandwich-windows-caps": dict(
        layers=(dataclasses.replace(ROTARY, window=4), LayerConfig(0.3, rope=Rope(10.0))),
        block="sandwich",
        norm="rms_plus_one",
        qk_norm="head",
        attention_softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=32**0.5,
    ),
    "output-norm-all-heads": dict(layers=(ROTARY,) * 2, block="output_norm", norm="rms", qk_norm="all_heads"),
    "experts": dict(
        layers=(ROTARY, dataclasses.replace(ROTARY, experts=Experts(4, 2, 16, True))), activation="silu"
    ),
}
LENGTH, PADS = 12, 5


def random_params(config):
    """Every parameter is random, norms and biases too, or a mistake in one of them stays hidden."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_decoder(config, jax.random.key(0)))

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(mean, 0.15, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def same_row_twice():
    """One row padded on the right and once more padded on the left, and where its tokens stand in each."""
    ids = jax.random.randint(jax.random.key(2), (LENGTH,), 2, 97)
    starts = jnp.array([[0], [PADS]])
    columns = jnp.arange(LENGTH + PADS)[None, :] - starts
    mask = (columns >= 0) & (columns < LENGTH)
    return ModelInputs(jnp.where(mask, ids[jnp.clip(columns, 0, LENGTH - 1)], 0), mask), mask


@pytest.mark.parametrize("kind", KINDS)
def test_lore_2_7_cached_decode_equals_scoring_for_every_kind_of_layer(kind):
    config = dataclasses.replace(BASE, **KINDS[kind])
    policy = make_policy(config, num_layers_unfrozen=-1)
    inputs, real = same_row_twice()

    @jax.jit
    def runs(params):
        scored = policy.branch(params, {}, None, inputs, None).policy
        cache = policy.init_cache(params, {}, inputs, LENGTH + PADS)
        first, cache = policy.decode(params, {}, jax.tree.map(lambda x: x[:, :8], inputs), cache)

        def step(cache, column):
            one = ModelInputs(*(x[:, None] for x in column))
            features, cache = policy.decode(params, {}, one, cache)
            return cache, features.policy[:, 0]

        _, later = jax.lax.scan(step, cache, (inputs.tokens[:, 8:].T, inputs.attention_mask[:, 8:].T))
        decoded = jnp.concatenate([first.policy, later.swapaxes(0, 1)], axis=1)
        return policy.logits(params, {}, jnp.stack([scored, decoded]))[..., :97]

    scored, decoded = np.asarray(runs(random_params(config)))
    assert scored[0, :LENGTH].std() > 0.1
    np.testing.assert_allclose(scored[1, PADS:], scored[0, :LENGTH], atol=2e-5)
    np.testing.assert_allclose(decoded[real], scored[real], atol=2e-5)


def test_every_kind_of_block_is_tried():
    assert {KINDS[kind].get("block", "pre_norm") for kind in KINDS} == set(BLOCKS)


def test_a_window_hides_what_lies_before_it():
    config = dataclasses.replace(BASE, layers=(dataclasses.replace(ROTARY, window=3), ROTARY))
    mask = jnp.arange(6)[None] >= 1
    positions = jnp.maximum(jnp.arange(6)[None] - 1, 0)
    narrow, wide = full_context(config, mask, positions).masks
    assert narrow[0, 5].tolist() == [False, False, False, True, True, True]
    assert wide[0, 5].tolist() == [False, True, True, True, True, True]


def test_alibi_slopes_golden():
    # Press et al. 2021: for 8 heads 1/2, 1/4, ... 1/256; other counts take every other slope of twice as many.
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


def test_attend_against_the_formula():
    q, k, v = (jax.random.normal(key, (1, 2, 3, 4)) for key in jax.random.split(jax.random.key(0), 3))
    bias = jax.random.normal(jax.random.key(1), (1, 2, 3, 3))
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    found = attend(Operands(q.swapaxes(1, 2), (k,), (v,), mask, bias), scale=0.3, softcap=1.5)
    scores = 1.5 * np.tanh(0.3 * np.einsum("bnqh,bnsh->bnqs", q, k) / 1.5) + bias
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("bnqs,bnsh->bqnh", weights, v), atol=1e-6)
