# SPDX-License-Identifier: Apache-2.0
"""The tables of every family: they cover the parameter tree exactly and can be inverted."""

import copy
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from transformers import JambaConfig, MambaConfig

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.families import FAMILIES, base, find_family
from jrl.models.hub import read_hf_config
from jrl.models.model import CausalLM
from jrl.models.transformer import init_decoder
from jrl.typing import ModelInputs
from tests.models import multimodal_cases
from tests.models.family_cases import CASES
from tests.models.family_cases_mixers import JAMBA
from tests.tiny import tiny_hf_config


def test_every_decoder_family_is_in_the_cases():
    causal = {name: family for name, family in FAMILIES.items() if family.kind == "causal"}
    multimodal = {name for name, family in causal.items() if family.is_multimodal}
    assert {config.model_type for config in multimodal_cases.CASES.values()} == multimodal
    decoders = set(causal) - multimodal
    assert {config.model_type for config in CASES.values()} == decoders
    assert {case.partition("-")[0] for case in CASES} == decoders


def test_the_table_of_the_docs_has_a_row_for_every_case():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    for case in CASES | multimodal_cases.CASES:
        family, _, variant = case.partition("-")
        rows = [line for line in page.splitlines() if line.startswith(f"| {family} | {variant or '–'} |")]
        assert len(rows) == 1 and "| equal | same logits |" in rows[0], (
            f"{case}: run tests/models/parity_table.py"
        )


@functools.cache
def table_and_shapes(case):
    """The model's config, its entries, and the shape of every parameter by its path."""
    model = CausalLM.from_config(CASES[case])
    shapes = jax.eval_shape(lambda: init_decoder(model.config, jax.random.key(0)))
    flat = {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}
    return model.config, model.entries(), flat


@pytest.mark.parametrize("case", CASES)
def test_table_covers_the_parameter_tree_exactly_once(case):
    _, entries, shapes = table_and_shapes(case)
    covered = {}
    for entry in entries:
        for path in entry.paths:
            covered.setdefault(path, []).append(entry.index)
    # By one tensor as a whole, or by one for each index of the first axis.
    assert covered.keys() == shapes.keys()
    for path, indices in covered.items():
        assert indices in ([None], list(range(shapes[path][0]))), path
    assert len({entry.name for entry in entries}) == len(entries)


@pytest.mark.parametrize("case", CASES)
def test_transforms_invert_each_other(case):
    config, entries, shapes = table_and_shapes(case)
    for entry in entries:
        filled = [shapes[path] if entry.index is None else shapes[path][1:] for path in entry.paths]
        tensor = np.arange(np.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
        parts = entry.transform.load(tensor, filled)
        assert [part.shape for part in parts] == filled, entry.name
        np.testing.assert_array_equal(entry.transform.save(parts, config.vocab_size), tensor, entry.name)


@pytest.mark.parametrize("case", CASES)
def test_branches_have_all_that_they_compute_with(case):
    # The last layer trains, over a frozen trunk, and the value function has a copy of its own.
    model = CausalLM.from_config(CASES[case], value_head="linear")
    config, counts = model.config, dict(num_layers_unfrozen=1, num_value_layers_unfrozen=1)
    policy = model.policy(**counts)
    inputs = ModelInputs(jnp.zeros((2, 9), jnp.int32), jnp.ones((2, 9), bool))

    def run(key):
        params, frozen = model.split_params(model.init(key), **counts)
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        return policy.logits(params, frozen, features.policy), policy.heads(params, features.value)

    logits, values = jax.eval_shape(run, jax.random.key(0))
    assert logits.shape == (2, 9, config.padded_vocab_size)
    assert values["values"].shape == (2, 9)


def test_linear_golden():
    # Torch keeps (out, in): y = W x. As a kernel (in, heads, head width) of 2 heads of width 1: y = x K.
    weight = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (kernel,) = base.linear().load(weight, [(3, 2, 1)])
    assert kernel[:, :, 0].tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


def test_fused_conv1d_golden():
    # GPT-2 keeps (in, q | k | v), here one input and two heads of width 1 each.
    q, k, v = base.conv1d().load(np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), [(1, 2, 1)] * 3)
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([1, 2], [3, 4], [5, 6])


def test_fused_linear_golden():
    # One input; q has two heads of width 1, k and v one: their rows lie one below the other.
    weight = np.array([[1.0], [2.0], [3.0], [4.0]])
    q, k, v = base.linear().load(weight, [(1, 2, 1), (1, 1, 1), (1, 1, 1)])
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([1, 2], [3], [4])


def test_by_head_golden():
    # Two heads of width 1: q, k and v of the first, then of the second.
    numbers = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    for q, k, v in (
        base.linear_by_head().load(numbers[:, None], [(1, 2, 1)] * 3),
        base.vector_by_head().load(numbers, [(2, 1)] * 3),
    ):
        assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([1, 4], [2, 5], [3, 6])


@pytest.mark.parametrize("transform", [base.linear(), base.conv1d(), base.linear_by_head()])
def test_weights_are_laid_out_under_jit_too(transform):
    weight = np.arange(48.0, dtype=np.float32).reshape(4, 12)
    weight = weight if transform.inputs_first else weight.T
    shapes = [(4, 2, 2)] * 3
    traced = jax.jit(lambda tensor: transform.load(tensor, shapes))(weight)
    jax.tree.map(np.testing.assert_array_equal, traced, transform.load(weight, shapes))


def test_vocabulary_is_padded_with_zeros():
    (head,) = base.vocabulary(transposed=True).load(np.ones((3, 2)), [(2, 64)])
    assert head.shape == (2, 64) and head[:, :3].all() and not head[:, 3:].any()
    (bias,) = base.vocabulary_vector().load(np.ones(3), [(64,)])
    assert bias.shape == (64,) and bias[:3].all() and not bias[3:].any()


def test_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(ValueError, match=r"'mamba' is not supported; supported are: .*gpt2, .*llama"):
        CausalLM.from_config(MambaConfig())
    with pytest.raises(ValueError, match=r"'qwen2_vl' is not supported.* Did you mean `qwen2_5_vl`\?"):
        find_family("qwen2_vl")
    assert find_family("gpt2") is FAMILIES["gpt2"]


@pytest.mark.parametrize(
    ("case", "option", "value", "message"),
    [
        ("gpt2", "add_cross_attention", True, "gpt2: `add_cross_attention` must be False, got True"),
        ("gpt2", "activation_function", "tanh", "gpt2: the activation must be one of gelu, .* got 'tanh'"),
        ("gpt_bigcode", "add_cross_attention", True, "gpt_bigcode: `add_cross_attention` must be False"),
        ("gpt_neo", "attention_layers", ["global", "sparse"] * 2, "`attention_types` .* got 'sparse'"),
        ("gptj", "tie_word_embeddings", True, "gptj: `tie_word_embeddings` must be False, got True"),
        (
            "gpt_neox",
            "rope_parameters",
            {"rope_type": "longrope"},
            "gpt_neox: `rope_type` must be .*'longrope'",
        ),
        (
            "opt",
            "layer_norm_elementwise_affine",
            False,
            "`layer_norm_elementwise_affine` must be True, got False",
        ),
        (
            "bloom",
            "apply_residual_connection_post_layernorm",
            True,
            "bloom: `apply_residual_connection_post_layernorm` must be False, got True",
        ),
        ("kimi_linear", "tie_word_embeddings", True, "`tie_word_embeddings` must be False, got True"),
        ("kimi_linear", "num_key_value_heads", 2, "`num_key_value_heads` must be 4, got 2"),
        ("kimi_linear", "topk_group", 4, "`num_expert_group` must divide num_experts = 6 .* got 3 and 4"),
        ("kimi_linear", "mla_use_nope", False, "kimi_linear: `mla_use_nope` must be True, got False"),
        ("kimi_linear", "mla_use_output_gate", True, "`mla_use_output_gate` must be False, got True"),
        ("kimi_linear", "moe_router_activation_func", "softmax", "must be 'sigmoid', got 'softmax'"),
        ("kimi_linear", "num_nextn_predict_layers", 1, "`num_nextn_predict_layers` must be 0, got 1"),
        ("jamba", "sliding_window", 4, "jamba: `sliding_window` must be None, got 4: torch attends to all"),
        (
            "kimi_linear-file",
            "linear_head_dim",
            8,
            "`linear_attn_config` must say head_dim = 8, got 6: it contradicts another key",
        ),
        (
            "kimi_linear-file",
            "layer_types",
            ["full_attention", "full_attention", "linear_attention"],
            r"`linear_attn_config` must say kda_layers = \[3\], got \[1, 3\]",
        ),
        (
            "kimi_linear",
            "linear_attn_config",
            {"use_full_rank_gate": True},
            "must say use_full_rank_gate = None, got True: .* asks for what is not implemented",
        ),
        ("phi3", "rope_parameters", {"rope_type": "unheard"}, "phi3: `rope_type` must be .* got 'unheard'"),
        ("llama", "rope_parameters", {"rope_type": "unheard"}, "llama: `rope_type` must be .* got 'unheard'"),
    ],
)
def test_unsupported_options_are_named(case, option, value, message):
    config = copy.deepcopy(CASES[case])
    setattr(config, option, value)
    with pytest.raises(ValueError, match=message):
        CausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "ignored", "kept"),
    [
        ("gpt2", ["h.0.attn.bias", "h.0.attn.masked_bias"], ["h.0.attn.c_attn.bias"]),
        ("gpt_bigcode", ["bias", "h.0.attn.bias"], ["h.0.attn.c_attn.bias", "ln_f.bias"]),
        (
            "gpt_neo",
            ["h.0.attn.attention.bias", "h.0.attn.attention.masked_bias"],
            ["h.0.attn.attention.out_proj.bias"],
        ),
        ("gptj", ["h.0.attn.bias", "h.0.attn.masked_bias"], ["h.0.mlp.fc_in.bias"]),
        (
            "gpt_neox",
            [
                "layers.0.attention.bias",
                "layers.0.attention.masked_bias",
                "layers.0.attention.rotary_emb.inv_freq",
            ],
            ["layers.0.attention.dense.bias", "layers.0.attention.query_key_value.bias"],
        ),
        ("phi3", ["layers.0.self_attn.rotary_emb.inv_freq"], ["layers.0.self_attn.o_proj.weight"]),
        ("llama", ["layers.0.self_attn.rotary_emb.inv_freq"], ["layers.0.self_attn.o_proj.weight"]),
    ],
)
def test_buffers_of_old_checkpoints_are_passed_over_and_nothing_else(family, ignored, kept):
    found, config = find_family(family), CausalLM.from_config(CASES[family]).config
    assert all(found.is_ignored(found.base_prefix + name, config) for name in ignored)
    assert not any(found.is_ignored(found.base_prefix + name, config) for name in kept)


@pytest.mark.parametrize("family", ["jamba", "qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_without_experts_the_keys_that_describe_them_are_passed_over(family):
    config = copy.deepcopy(CASES[family])
    config.num_experts = 0
    found = CausalLM.from_config(config).config
    assert all(layer.experts is None for layer in found.layers)
    assert found.mlp_width == config.intermediate_size


def test_which_layers_of_jamba_attend_and_which_have_experts():
    """Of eight layers the fifth attends, and every other one has experts, as published."""
    config = JambaConfig(**JAMBA | dict(num_hidden_layers=8, attn_layer_period=8, attn_layer_offset=4))
    config.expert_layer_offset = 1
    layers = CausalLM.from_config(config).config.layers
    assert [layer.mixer is None for layer in layers] == [False] * 4 + [True] + [False] * 3
    assert [layer.experts is not None for layer in layers] == [False, True] * 4


@pytest.mark.parametrize("off", [False, 0, None, []])
def test_an_option_of_kimi_linear_that_is_off_need_not_be_known(off):
    config = copy.deepcopy(CASES["kimi_linear"])
    config.linear_attn_config = {"gate_lower_bound": off}
    CausalLM.from_config(config)


def test_a_scan_that_is_steered_by_what_is_not_normalised_is_refused():
    CausalLM.from_config(JambaConfig(**JAMBA, mamba_inner_layernorms=True))
    with pytest.raises(ValueError, match="jamba: `mamba_inner_layernorms` must be True, got False"):
        CausalLM.from_config(JambaConfig(**JAMBA, mamba_inner_layernorms=False))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_the_layer_behind_the_last_is_passed_over_and_no_other(family):
    found, config = find_family(family), CausalLM.from_config(CASES[family]).config
    ignored = [i for i in range(100) if found.is_ignored(f"model.layers.{i}.mlp.gate.weight", config)]
    assert ignored == [config.num_layers] == [3]
    assert not find_family("llama").is_ignored("model.layers.3.mlp.gate.weight", config)


def saved(model, folder):
    """(parameters, tensors of the file) of a checkpoint with random weights."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    save_checkpoint(folder, model, params)
    return load_checkpoint(folder).params, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "bare", "extra"),
    [
        ("bloom", True, []),
        ("opt-350m", True, ["lm_head.weight"]),
        ("gpt_neo", False, ["transformer.h.1.attn.attention.masked_bias", "lm_head.weight"]),
        ("gptj", False, ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt_neox", False, ["gpt_neox.layers.0.attention.bias"]),
        ("gpt_neox-tied", False, ["embed_out.weight"]),
    ],
)
def test_published_checkpoints_of_the_family_are_read(case, bare, extra, tmp_path):
    # Bodies saved alone lack the prefix; old files hold masks, and tied heads a second time.
    model = CausalLM.from_config(CASES[case])
    expected, tensors = saved(model, tmp_path)
    if bare:
        tensors = {name.removeprefix(model.family.base_prefix): t for name, t in tensors.items()}
    assert not tensors.keys() & set(extra)
    embedding = np.asarray(expected["embed"]["embedding"])[: model.vocab_size]
    heads = ("lm_head.weight", "embed_out.weight")
    more = {name: embedding if name in heads else np.ones((3, 3), np.float32) for name in extra}
    save_file(tensors | more, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path).params, expected)


def test_a_body_that_files_name_otherwise_is_read_under_either_name(tmp_path):
    model = CausalLM.from_config(CASES["nemotron_h"])
    expected, tensors = saved(model, tmp_path)
    assert {name.partition(".")[0] for name in tensors} == {"backbone", "lm_head"}
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path).params, expected)


def test_a_dense_layer_of_kimi_linear_is_read_under_either_name(tmp_path):
    model = CausalLM.from_config(CASES["kimi_linear-file"])
    expected, tensors = saved(model, tmp_path)
    layers = {name.partition(".mlp.")[0] for name in tensors if ".mlp." in name}
    assert layers == {"model.layers.0"} and tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path).params, expected)


@pytest.mark.parametrize("lists", [{"kda_layers": [1, 2, 9]}, {"kda_layers": [1]}, None])
def test_layers_that_a_config_counts_wrongly_are_refused_by_its_file(lists, tmp_path):
    CASES["kimi_linear-file"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["layer_types"]
    told = None if lists is None else fields["linear_attn_config"] | lists
    path.write_text(json.dumps(fields | {"linear_attn_config": told}))
    with pytest.raises(ValueError, match=r"config\.json is refused by transformers"):
        read_hf_config(tmp_path)


def test_logits_of_the_model_cover_the_real_vocabulary_only():
    model = CausalLM.from_config(tiny_hf_config("gpt2", tie_word_embeddings=False))
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    assert (logits.shape, logits.dtype) == ((2, 5, 97), jnp.float32)
