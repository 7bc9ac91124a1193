# SPDX-License-Identifier: Apache-2.0
"""Descriptions of decoders: what of them decides whether a checkpoint of an older version goes on."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from jrl.models.config import GatedDelta, Rope, ShortConvolution, TransformerConfig
from jrl.models.families import find_family
from tests.models.case_fields import MODERN

FIRST_VERSION = (
    "TransformerConfig(vocab_size=97, width=8, layers=(LayerConfig(attention_scale=0.5, window=None, "
    "rope=Rope(theta=10000.0, scaling=None, dim=None, interleaved=False), experts=None),), num_heads=2, "
    "num_kv_heads=1, head_dim=4, mlp_width=16, max_positions=32, activation='silu', gated_mlp=True, norm='rms', "
    "norm_epsilon=1e-06, qkv_bias=False, attention_out_bias=False, mlp_bias=False, tie_embeddings=False, "
    "block='pre_norm', learned_positions=False, position_offset=0, alibi=False, qk_norm=None, "
    "attention_softcap=None, logit_softcap=None, embedding_scale=None, embedding_norm=False, embedding_width=None, "
    "final_norm=True, head_bias=False, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0, "
    "init_range=0.02, scale_residual_init=False)"
)
"""As the version of 2026-11-24 wrote it, whose checkpoints hold its fingerprint."""


def small() -> TransformerConfig:
    llama = LlamaConfig(
        vocab_size=97,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    found = find_family("llama").read_config(llama)
    assert isinstance(found, TransformerConfig)
    return found


def test_a_model_that_an_older_version_knew_has_the_text_that_it_had():
    assert repr(small()) == FIRST_VERSION
    recurrence = GatedDelta(2, 4, 5, 6, 3)
    assert repr(recurrence) == "GatedDelta(key_heads=2, value_heads=4, key_dim=5, value_dim=6, taps=3)"
    assert repr(replace(recurrence, rank=7)).endswith("taps=3, rank=7)")


def test_what_an_older_version_did_not_know_is_in_the_text():
    config = small()
    assert "residual_scale=0.5" in repr(replace(config, residual_scale=0.5))
    layer = replace(config.layers[0], mixer=ShortConvolution(3))
    assert repr(layer) != repr(config.layers[0]) and "ShortConvolution(taps=3)" in repr(layer)


def test_only_blocks_of_one_sublayer_after_the_other_may_lack_one():
    config = small()
    layers = (replace(config.layers[0], only="mixer"),)
    assert "only='mixer'" in repr(replace(config, layers=layers))
    with pytest.raises(ValueError, match=r"`block` must be 'pre_norm' .* got 'parallel'"):
        replace(config, layers=layers, block="parallel")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (dict(num_kv_heads=3), "`num_kv_heads` of layer 1 must divide num_heads = 2, got 3"),
        (dict(head_dim=6), "`rope.dim` of layer 1 must be given"),
        (dict(keys_of=1), "`keys_of` of layer 1 must be the number of an earlier layer that lends"),
        (dict(keys_of=0, rope=None, head_dim=6), "lends keys and values of the same sizes, got 0"),
        (dict(lends_keys=True, mixer=ShortConvolution(3)), "attention's alone, and its mixer is ShortConv"),
    ],
)
def test_what_a_layer_has_of_its_own_must_fit(layer, message):
    config = small()
    lender = replace(config.layers[0], lends_keys=True)
    with pytest.raises(ValueError, match=message):
        replace(config, layers=(lender, replace(config.layers[0], **layer)))


def test_a_layer_sees_the_decoder_with_its_own_sizes():
    config = small()
    own = replace(config.layers[0], rope=None, head_dim=6, num_kv_heads=2, mlp_width=5)
    config = replace(config, layers=(config.layers[0], own))
    seen = config.for_layer(own)
    assert (seen.head_dim, seen.num_kv_heads, seen.mlp_width) == (6, 2, 5) and seen.layers == config.layers
    assert config.for_layer(config.layers[0]) is config
    assert (config.head_dims, config.mlp_widths) == ((4, 6), (16, 5))


@pytest.mark.parametrize("option", [dict(stream_scale=True), dict(layer_input_width=2, layer_input_rows=9)])
def test_only_sublayers_one_after_the_other_are_followed_by_more(option):
    with pytest.raises(ValueError, match="`layer_input_width` and `stream_scale` must be unset"):
        replace(small(), block="parallel", **option)


@pytest.mark.parametrize("option", [dict(layer_input_width=2), dict(layer_input_rows=9)])
def test_what_layers_read_beside_the_stream_has_rows_and_a_width(option):
    with pytest.raises(ValueError, match=r"`layer_input_rows` must .* got (2 and None|None and 9)"):
        replace(small(), **option)


def test_up_to_the_context_a_bound_is_no_part_of_the_text():
    assert repr(Rope(1e4, is_bounded=True)) == repr(Rope(1e4))


def test_equal_texts_are_equal_models():
    config = find_family("llama").read_config(LlamaConfig(**MODERN))
    assert repr(config) != repr(replace(config, attention_sinks=True))
