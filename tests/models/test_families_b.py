# SPDX-License-Identifier: Apache-2.0
"""What the llama-like families read from their configs, and what they refuse."""

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from jrl.models import families
from jrl.models.families import find_family
from tests.models.case_fields import MODERN

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(hf_config):
    return find_family(hf_config.model_type).read_config(hf_config)


def windows(hf_config):
    return [layer.window for layer in read(hf_config).layers]


def changed(hf_config, **options):
    """The config with options set past the checks of transformers, as a hand-written file may have them."""
    for name, value in options.items():
        object.__setattr__(hf_config, name, value)
    return hf_config


def test_windows_follow_the_types_of_layers():
    deep = MODERN | dict(num_hidden_layers=6)
    assert windows(MistralConfig(**deep, sliding_window=8)) == [8] * 6
    assert windows(MistralConfig(**deep, sliding_window=None)) == [None] * 6
    # Qwen 2: the first `max_window_layers` layers see everything, and without the switch all do.
    late = dict(sliding_window=8, max_window_layers=4)
    assert windows(Qwen2Config(**deep, **late, use_sliding_window=True)) == [None] * 4 + [8] * 2
    assert windows(Qwen2Config(**deep, **late, use_sliding_window=False)) == [None] * 6
    assert windows(Gemma2Config(**deep, sliding_window=8)) == [8, None] * 3
    assert windows(Gemma3TextConfig(**deep, sliding_window=8)) == [8] * 5 + [None]
    types = [GLOBAL, LOCAL] * 3
    assert windows(Qwen3Config(**deep, **late, use_sliding_window=True, layer_types=types)) == [None, 8] * 3


def test_gemma_3_has_rotary_positions_for_each_type_of_layer():
    scaled = {
        GLOBAL: dict(rope_type="linear", factor=8.0),
        LOCAL: dict(rope_type="default", rope_theta=500.0),
    }
    config = read(Gemma3TextConfig(**MODERN | dict(num_hidden_layers=6), rope_parameters=scaled))
    first, *_, last = (layer.rope for layer in config.layers)
    assert (first.theta, first.scaling) == (500.0, None)
    assert (last.theta, last.scaling.factor) == (1e6, 8.0)


def test_smollm3_leaves_out_the_positions_of_every_fourth_layer():
    config = read(SmolLM3Config(**MODERN | dict(num_hidden_layers=8)))
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 2
    # The list may be longer than the model.
    config = read(SmolLM3Config(**MODERN, no_rope_layers=[0, 1, 1, 1]))
    assert [layer.rope is None for layer in config.layers] == [True, False]


def test_head_size_is_read_where_the_class_does_not_declare_it():
    assert read(Qwen2Config(**MODERN)).head_dim == 8
    assert read(Qwen2Config(**MODERN, head_dim=16)).head_dim == 16
    assert read(MistralConfig(**MODERN, head_dim=16)).layers[0].attention_scale == 0.25


def test_gemma_scales_scores_by_its_own_scalar():
    config = read(Gemma2Config(**MODERN, query_pre_attn_scalar=64))
    assert config.layers[0].attention_scale == 0.125
    assert config.embedding_scale == pytest.approx(32**0.5)


@pytest.mark.parametrize(
    "hf_config, options, message",
    [
        (
            LlamaConfig(**MODERN),
            dict(hidden_act="tanh"),
            "llama: the activation must be one of .* got 'tanh'",
        ),
        (
            LlamaConfig(**MODERN),
            dict(rope_parameters=dict(rope_type="spiral", rope_theta=1e4)),
            "llama: `rope_type` must be among .*; got 'spiral'",
        ),
        (
            GemmaConfig(**MODERN),
            dict(use_bidirectional_attention=True),
            "gemma: `use_bidirectional_attention` must be False, got True",
        ),
        (
            Gemma3TextConfig(**MODERN),
            dict(attn_logit_softcapping=50.0),
            "gemma3_text: `attn_logit_softcapping` must be None, got 50.0",
        ),
        (
            Gemma2Config(**MODERN),
            dict(layer_types=[LOCAL, "chunked_attention"]),
            "gemma2: `layer_types` must be among full_attention, sliding_attention; got 'chunked_attention'",
        ),
        (
            Qwen3Config(**MODERN),
            dict(layer_types=[GLOBAL]),
            "qwen3: `layer_types` must have num_hidden_layers = 2 entries, got 1",
        ),
        (
            Qwen2Config(**MODERN),
            dict(layer_types=[GLOBAL, LOCAL]),
            "qwen2: `sliding_window` must be a number of tokens, got None",
        ),
        (
            SmolLM3Config(**MODERN),
            dict(no_rope_layers=[1]),
            "smollm3: `no_rope_layers` must have num_hidden_layers = 2 entries, got 1",
        ),
    ],
)
def test_unsupported_options_are_refused(hf_config, options, message):
    with pytest.raises(ValueError, match=message):
        read(changed(hf_config, **options))


def test_a_multimodal_model_is_refused_with_the_name_of_its_text_model(monkeypatch):
    known = {name: family for name, family in families.FAMILIES.items() if name != "gemma3"}
    monkeypatch.setattr(families, "FAMILIES", known)
    with pytest.raises(ValueError, match=r"'gemma3' is not supported.* its text model, 'gemma3_text'"):
        find_family("gemma3")
