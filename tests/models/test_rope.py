# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of published checkpoints, in the words of their own config.json, old and new."""

import math

import numpy as np
import pytest
from transformers import Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config

from jrl.models.config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    YarnRopeScaling,
)
from jrl.models.families.rope import read_longrope, read_rope

LLAMA31 = dict(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
)
SCOUT = LLAMA31 | dict(rope_scaling=LLAMA31["rope_scaling"] | dict(factor=16.0, high_freq_factor=1.0))
QWEN25 = dict(
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    rope_theta=1000000.0,
    rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn"),
)
SHORT = [1.0 + 0.05 * pair for pair in range(48)]
PHI3_128K = dict(
    hidden_size=3072,
    num_attention_heads=32,
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_theta=10000.0,
    rope_scaling=dict(long_factor=[2.0 * factor for factor in SHORT], short_factor=SHORT, type="longrope"),
)
GEMMA3_4B = dict(
    rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling=dict(factor=8.0, rope_type="linear")
)
PYTHIA = dict(hidden_size=512, num_attention_heads=8, rotary_pct=0.25, rotary_emb_base=10000)


def old_ropes():
    """The rope of each of the checkpoints above, the config it is from, and the type of layer it is for."""
    scout = LlamaConfig(**SCOUT)
    llama, qwen2, phi3 = LlamaConfig(**LLAMA31), Qwen2Config(**QWEN25), Phi3Config(**PHI3_128K)
    gemma3, neox = Gemma3TextConfig(**GEMMA3_4B), GPTNeoXConfig(**PYTHIA)
    return {
        "llama-3.1": (read_rope("llama", llama.rope_parameters, 128), llama, None),
        "llama-4-scout": (read_rope("llama", scout.rope_parameters, 128), scout, None),
        "qwen2.5": (read_rope("qwen2", qwen2.rope_parameters, 128), qwen2, None),
        "phi-3": (read_longrope("phi3", phi3.rope_parameters, 96, 131072, partial=True), phi3, None),
        "gemma-3": tuple(
            [
                read_rope("gemma3_text", gemma3.rope_parameters["full_attention"], 256),
                gemma3,
                "full_attention",
            ]
        ),
        "pythia": (read_rope("gpt_neox", neox.rope_parameters, 64, partial=True), neox, None),
    }


def test_old_style_configs_are_understood():
    found = {name: rope for name, (rope, _, _) in old_ropes().items()}
    assert found["llama-3.1"] == Rope(5e5, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))
    # The two bounds are one: a wavelength is kept or stretched.
    assert found["llama-4-scout"] == Rope(5e5, Llama3RopeScaling(16.0, 1.0, 1.0, 8192))
    stretch = Rope(5e5).frequencies(128) / found["llama-4-scout"].frequencies(128)
    assert set(stretch.round(4).tolist()) == {1.0, 16.0}
    assert found["qwen2.5"] == Rope(1e6, YarnRopeScaling(4.0, 32768, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0))
    sharper = math.sqrt(1 + math.log(32) / math.log(4096))
    assert found["phi-3"] == Rope(1e4, LongRopeScaling(tuple(SHORT), sharper), is_bounded=True)
    assert found["gemma-3"] == Rope(1e6, LinearRopeScaling(8.0))
    assert found["pythia"] == Rope(1e4, dim=16)
    local = Gemma3TextConfig(**GEMMA3_4B).rope_parameters["sliding_attention"]
    assert read_rope("gemma3_text", local, 256) == Rope(1e4)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5", "phi-3", "gemma-3"])
def test_frequencies_and_attention_factor_equal_torch(name):
    pytest.importorskip("torch", reason="needs the parity extra")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, config, kind = old_ropes()[name]
    parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", layer_type=kind)
    ours = rope.frequencies(
        config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    )
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=2e-6)
    assert rope.scaling.attention_factor == pytest.approx(factor, rel=1e-12)


def test_yarn_takes_its_attention_factor_from_one_value_two_or_the_config():
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=4096)
    grows = math.log(40.0) / 10

    def factor(**more):
        return read_rope("llama", yarn | more, 64).scaling.attention_factor

    assert factor() == pytest.approx(1 + grows)
    assert factor(mscale=1.0, mscale_all_dim=0.5) == pytest.approx((1 + grows) / (1 + grows / 2))
    assert factor(mscale=1.0) == pytest.approx(1 + grows)
    assert factor(factor=1.0) == 1.0
    assert factor(attention_factor=0.7, mscale=1.0, mscale_all_dim=0.5) == 0.7
    assert read_rope("llama", yarn | dict(truncate=False), 64).scaling.truncate is False


def test_dynamic_scaling_is_none_within_the_context():
    dynamic = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    assert read_rope("llama", dynamic, 64) == Rope(1e4, is_bounded=True)


PLAIN = dict(rope_type="default", rope_theta=1e4)
YARN = PLAIN | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = PLAIN | LLAMA31["rope_scaling"]
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0], long_factor=[2.0])
LONG |= dict(original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "parameters, message",
    [
        (PLAIN | dict(rope_type="spiral"), "llama: `rope_type` must be among default, .*; got 'spiral'"),
        (LONG, "`rope_type` must be among .*; got 'longrope'"),
        (
            PLAIN | dict(rope_type="linear"),
            "`factor` of `rope_type` 'linear' must be a positive finite number, got None",
        ),
        (PLAIN | dict(rope_type="yarn", factor=4.0), "`original_max_position_embeddings` of .* got None"),
        (
            PLAIN | dict(rope_theta=None),
            "`rope_theta` of `rope_type` 'default' must be a positive finite number, got None",
        ),
        (PLAIN | dict(partial_rotary_factor=0.5), "`partial_rotary_factor` must be 1.0, got 0.5"),
        (
            PLAIN | dict(rope_type="linear", factor=0),
            "`factor` of .* must be a positive finite number, got 0",
        ),
        (PLAIN | dict(rope_type="linear", factor=-2.0), "`factor` of .* must be a positive .*, got -2.0"),
        (PLAIN | dict(rope_type="linear", factor=math.inf), "`factor` of .* must be a positive .*, got inf"),
        (PLAIN | dict(rope_type="linear", factor=math.nan), "`factor` of .* must be a positive .*, got nan"),
        (PLAIN | dict(rope_type="linear", factor=True), "`factor` of .* must be a positive .*, got True"),
        (YARN | dict(beta_fast="fast"), "`beta_fast` of .* must be a positive finite number, got 'fast'"),
        (YARN | dict(attention_factor=0.0), "`attention_factor` of .* must be a positive .*, got 0.0"),
        (YARN | dict(mscale=[1.0], mscale_all_dim=1.0), r"`mscale` of .* must be a positive .*, got \[1.0\]"),
        (LLAMA3 | dict(high_freq_factor=0.5), "must be at least `low_freq_factor`, 1.0; got 0.5"),
        (dict(full_attention=PLAIN), "must hold `rope_type`, got only full_attention"),
    ],
)
def test_unsupported_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        read_rope("llama", parameters, 64)


def test_longrope_refuses_other_types_and_a_wrong_number_of_factors():
    with pytest.raises(ValueError, match="phi3: `rope_type` must be longrope; got 'default'"):
        read_longrope("phi3", PLAIN, 8, 128)
    with pytest.raises(ValueError, match=r"`short_factor` must have 4 entries, .*; got 1"):
        read_longrope("phi3", LONG, 8, 128)
    for factors in (1.0, ["long"], [0.0], [math.inf]):
        with pytest.raises(ValueError, match="`short_factor` must be a list of positive finite numbers"):
            read_longrope("phi3", LONG | dict(short_factor=factors), 8, 128)
    assert read_longrope("phi3", LONG | dict(partial_rotary_factor=0.25), 8, 128, partial=True).dim == 2
    with pytest.raises(ValueError, match=r"`partial_rotary_factor` must be 1.0"):
        read_longrope("phi3", LONG | dict(partial_rotary_factor=0.25), 8, 128)
