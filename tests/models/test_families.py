# SPDX-License-Identifier: Apache-2.0
"""The tables of every family: they cover the parameter tree exactly and can be inverted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from transformers import BloomConfig

from jrl.models.families import FAMILIES, base, find_family
from jrl.models.model import CausalLM
from jrl.models.transformer import init_decoder
from tests.tiny import tiny_hf_config

VARIANTS = [
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt2", {"n_inner": None}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
]


def test_every_family_is_in_the_variants():
    assert {family for family, _ in VARIANTS} == set(FAMILIES)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_table_covers_the_parameter_tree_exactly_once(family, overrides):
    model = CausalLM.from_config(tiny_hf_config(family, **overrides))
    shapes = jax.eval_shape(lambda: init_decoder(model.config, jax.random.key(0)))
    entries = model.family.entries(model.config)
    paths = [path for entry in entries for path in entry.paths]
    assert sorted(paths) == sorted(flatten_dict(shapes, sep="/"))
    assert len({entry.name for entry in entries}) == len(entries)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_transforms_invert_each_other(family, overrides):
    model = CausalLM.from_config(tiny_hf_config(family, **overrides))
    shapes = flatten_dict(jax.eval_shape(lambda: init_decoder(model.config, jax.random.key(0))), sep="/")
    for entry in model.family.entries(model.config):
        tensor = np.arange(np.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
        parts = entry.transform.load(tensor, [shapes[path].shape for path in entry.paths])
        assert [part.shape for part in parts] == [shapes[path].shape for path in entry.paths], entry.name
        np.testing.assert_array_equal(
            entry.transform.save(parts, model.config.vocab_size), tensor, entry.name
        )


def test_linear_golden():
    # Torch keeps (out, in): y = W x. As a kernel (in, heads, head width) of 2 heads of width 1: y = x K.
    weight = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (kernel,) = base.linear().load(weight, [(3, 2, 1)])
    assert kernel[:, :, 0].tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


def test_fused_conv1d_golden():
    # GPT-2 keeps (in, q | k | v), here one input and two heads of width 1 each.
    q, k, v = base.conv1d().load(np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), [(1, 2, 1)] * 3)
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([1, 2], [3, 4], [5, 6])


def test_vocabulary_is_padded_with_zeros():
    (head,) = base.vocabulary(transposed=True).load(np.ones((3, 2)), [(2, 64)])
    assert head.shape == (2, 64) and head[:, :3].all() and not head[:, 3:].any()


def test_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(ValueError, match="'bloom' is not supported; supported are: gpt2, llama"):
        CausalLM.from_config(BloomConfig())
    assert find_family("gpt2") is FAMILIES["gpt2"]


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention` must be False"),
        ("gpt2", {"activation_function": "tanh"}, "activation must be one of gelu, .* got 'tanh'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "`rope_type` must be default, linear or llama3; got 'dynamic'",
        ),
    ],
)
def test_unsupported_options_are_named(family, overrides, message):
    with pytest.raises(ValueError, match=message):
        CausalLM.from_config(tiny_hf_config(family, **overrides))


def test_logits_of_the_model_cover_the_real_vocabulary_only():
    model = CausalLM.from_config(tiny_hf_config("gpt2", tie_word_embeddings=False))
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    assert (logits.shape, logits.dtype) == ((2, 5, 97), jnp.float32)
