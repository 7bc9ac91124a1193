# SPDX-License-Identifier: Apache-2.0
"""Every key of every family's config: changed, torch and jrl agree, or jrl refuses, or torch does not change."""

import copy
import dataclasses

import numpy as np
import pytest
from transformers import GPT2Config, LlamaConfig, OPTConfig

from jrl.models.families import find_family
from jrl.models.families.config_keys import SILENT, read_all_keys, usual_values
from jrl.models.model import make_model
from tests.models import multimodal_cases, seq2seq_cases
from tests.models.case_fields import GPT, MODERN
from tests.models.family_cases import CASES

ALL = CASES | multimodal_cases.CASES | seq2seq_cases.CASES
PLAIN = {name: config for name, config in ALL.items() if "-" not in name}
TOKENS = np.random.default_rng(0).integers(2, 80, (2, 21))
"""Longer than the windows, so that these act."""
FINE = ("agree", "refused", "silent in torch", "torch refuses", "no other value")
"""Outcomes of a changed key that are as they should be."""
FOLLOWS = {"num_attention_heads": ("head_dim", "num_key_value_heads")}
"""Sizes that follow from a key, or must agree with it, of which a refusal speaks in the place of it."""
STRINGS = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "activation": "relu",
    "activation_function": "relu",
    "feed_forward_proj": "gated-silu",
}
MADE = ("dense_act_fn", "is_gated_act")
"""What transformers makes of a key, and keeps beside it."""


def changed(config, key):
    """A copy of a config, the key of its text model set to another value that its class takes; None: it takes none."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    key = in_file(text, key)
    value = vars(text).get(key)
    options = (
        {
            bool: [not value],
            int: [
                value * 2 if isinstance(value, int) else None,
                value + 1 if isinstance(value, int) else None,
            ],
            float: [value * 0.5 + 0.125 if isinstance(value, float) else None],
            str: [STRINGS.get(key)],
            type(None): [2, 0.5, True],
            list: [value[::-1] if isinstance(value, list) else None],
            tuple: [tuple(0.5 * x + 0.125 for x in value) if isinstance(value, tuple) else None],
        }[type(value)]
        if not isinstance(value, dict)
        else [{**value, "rope_theta": 77.0}]
        if "rope_theta" in value
        else []
    )
    for option in options:
        if option is None or option == value:
            continue
        try:
            fields = {name: kept for name, kept in text.to_dict().items() if name not in MADE} | {key: option}
            remade = type(text).from_dict(fields)
        except Exception:  # transformers' own checks
            continue
        if text is config:
            return remade
        config.text_config = remade
        return config
    return None


def in_file(text, key):
    """Name in config.json of a field of a class, which may have another one."""
    return type(text).attribute_map.get(key, key)


def outcome(config, key, plain, state, folder):
    """What becomes of a change: "refused", "agree", "silent in torch", or how jrl differs."""
    from jrl.models.checkpoint import load_checkpoint

    other = changed(config, key)
    if other is None:
        return "no other value"
    try:
        oracle = build(other)
    except Exception:
        return "torch refuses"
    shapes = {name: tensor.shape for name, tensor in oracle.state_dict().items()}
    is_same = shapes == {name: tensor.shape for name, tensor in state.items()}
    if is_same:
        oracle.load_state_dict(state)
        try:
            theirs = torch_logits(oracle)
        except RuntimeError:  # sizes that do not fit together
            return "torch refuses"
        if np.array_equal(theirs, plain):
            return "silent in torch"
    oracle.save_pretrained(folder)
    try:
        loaded = load_checkpoint(folder)
    except ValueError as error:
        names = key, in_file(config.get_text_config(), key)
        return "refused" if any(is_named(name, str(error)) for name in names) else str(error)
    if not is_same:
        return "agree"  # on names and shapes of all tensors
    # Op by op: keys of a family change few of the operations, and each change would make a program of its own.
    context = {"context_tokens": TOKENS} if loaded.model.family.kind == "seq2seq" else {}
    ours = np.asarray(loaded.model.logits(loaded.params, TOKENS, **context))
    error = float(np.abs(ours - theirs).max())
    return "agree" if error < 1e-4 else f"off by {error:.1e}"


def build(config):
    """A fresh torch model."""
    from tests.models import parity, seq2seq_parity

    if find_family(config.model_type).kind == "seq2seq":
        return seq2seq_parity.build(config)
    return parity.auto_class(config).from_config(config, attn_implementation="eager").eval()


def torch_logits(oracle):
    """Logits of the rows; an encoder-decoder reads them as the context, too."""
    import torch

    from tests.models.parity import writer

    tokens = torch.tensor(TOKENS)
    is_seq2seq = find_family(oracle.config.model_type).kind == "seq2seq"
    with torch.no_grad():
        return writer(oracle)(tokens, **({"decoder_input_ids": tokens} if is_seq2seq else {})).logits.numpy()


def is_named(key, message):
    """True where a refusal speaks of the key: any other error is a defect that looks like one."""
    names = (key, *FOLLOWS.get(key, ()))
    return any(f"`{name}`" in message for name in names)


def walk(name, folder):
    """The outcome of every key of a family's config class."""
    from tests.models import parity, seq2seq_parity

    config = PLAIN[name]
    is_seq2seq = find_family(config.model_type).kind == "seq2seq"
    oracle = (seq2seq_parity if is_seq2seq else parity).perturbed(config, seed=0)
    plain = torch_logits(oracle)
    keys, state = usual_values(type(config.get_text_config())), oracle.state_dict()
    return {key: outcome(config, key, plain, state, folder / key) for key in keys}


# One family of each kind of structure; the others, some minutes in all, are slow.
KINDS = {
    *(
        "gpt2",
        "opt",
        "bloom",
        "gptj",
        "falcon",
        "llama",
        "gemma3_text",
        "gemma4_text",
        "llama4_text",
        "mixtral",
    ),
    *(
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "qwen3_next",
        "falcon_h1",
        "jamba",
        "nemotron_h",
        "lfm2",
        "qwen2_5_vl",
        "umt5",
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in PLAIN]
)
def test_every_key_is_heeded_or_refused_or_changes_nothing(name, tmp_path):
    pytest.importorskip("torch", reason="needs the parity extra")
    found = walk(name, tmp_path)
    assert not {key: what for key, what in found.items() if what not in FINE}
    assert "agree" in found.values()


def test_a_refusal_names_the_key():
    assert is_named("hidden_act", "llama: `hidden_act` must be 'silu', got 'relu'")
    assert is_named("num_attention_heads", "`head_dim`, or the part of it that rotates, must be even")
    assert not is_named("hidden_act", "model.layers.0.mlp.up_proj.weight is missing")
    assert not is_named("rope", "llama: `rope_type` must be default")


@pytest.mark.parametrize(
    "config",
    [GPT2Config(**GPT), LlamaConfig(**MODERN), PLAIN["t5"]],
    ids=lambda config: config.model_type,
)
def test_no_key_of_a_class_is_passed_over(config):
    """Without torch: whatever a key is changed to, it is read, refused, or among those that change nothing."""
    family = find_family(config.model_type)
    whole = read_all_keys(family, config)
    for key in usual_values(type(config)):
        other = changed(config, key)
        if other is None or key in SILENT:
            continue
        try:
            assert read_all_keys(family, other) != whole, key
        except ValueError as error:
            assert key in str(error) or "activation" in str(error) or "divide" in str(error), key


def test_a_key_that_nobody_reads_must_have_its_usual_value():
    config = OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, layerdrop=0.25)
    with pytest.raises(
        ValueError, match=r"opt: `layerdrop` must be 0.0, got 0.25: nothing here reads this key"
    ):
        make_model(config)


def test_a_key_that_a_class_calls_otherwise_is_not_passed_over():
    config = CASES["kimi_linear"]
    others = [name for name in usual_values(type(config)) if name != "n_group"]
    family = dataclasses.replace(
        find_family("kimi_linear"), read_config=lambda hf: [getattr(hf, name) for name in others]
    )
    with pytest.raises(ValueError, match=r"kimi_linear: `num_expert_group` must be 1, got 3"):
        read_all_keys(family, config)


def test_every_silent_key_has_a_reason_and_is_one_of_some_class():
    keys = {key for config in PLAIN.values() for key in vars(config)}
    others = {"qa_dropout", "sinusoidal_pos_embds"}
    assert all(SILENT.values()) and set(SILENT) - keys <= others
