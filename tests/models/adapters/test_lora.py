# SPDX-License-Identifier: Apache-2.0
"""LoRA: where it starts, what it computes, what it trains, and what it refuses."""

import copy
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.compilation import COMPILER_OPTIONS
from jrl.learners.optimizers import decayed
from jrl.mesh import path_name
from jrl.models.adapters import LoraConfig, read_adapter_config
from jrl.models.adapters.targets import DEFAULT_TARGETS
from jrl.models.families import FAMILIES
from jrl.models.layers import Projection, adapted_kernel
from jrl.models.model import CausalLM, make_model
from jrl.models.policy import branch_start
from jrl.models.seq2seq_policy import branch_start as seq2seq_branch_start
from tests.models.family_cases import CASES
from tests.models.test_policy import decode_all, scorer
from tests.tiny import VOCAB_SIZE, tiny_contexts, tiny_lm, tiny_prompts

EVERYWHERE = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
# Of each block the fused or the first and the last projection: what compiles is small, and the paths are those.
SOME = ("c_attn", "c_proj", "q_proj", "o_proj")


def adapted(family, config, *, scale=0.1, **options):
    """(policy, params, frozen) with an adapter away from its start by so much."""
    if family in ("gpt2", "llama", "t5"):
        lm, whole = tiny_lm(family)
    else:
        lm = make_model(CASES[family])
        whole = lm.init(jax.random.key(0))
    split = {"adapter": config} | options
    places = {name: value for name, value in split.items() if name != "compute_dtype"}
    params, frozen = lm.split_params(whole, key=jax.random.key(0), **places)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)
    ]
    return lm.policy(**split), structure.unflatten(moved), frozen


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"init_lora_weights": "gaussian", "use_rslora": True}]
)
def test_a_fresh_adapter_is_the_base_model_to_the_bit(family, options):
    config = LoraConfig(r=2, target_modules=SOME, **options)
    policy, params, frozen = adapted(family, config, scale=0.0)
    score = scorer(policy)
    prompts = tiny_prompts()
    if "use_dora" in options:
        # The norms are divided by themselves, but computed by two programs.
        np.testing.assert_allclose(
            score(params, frozen, prompts)[0], score({}, frozen, prompts)[0], atol=1e-5
        )
    else:
        np.testing.assert_array_equal(score(params, frozen, prompts)[0], score({}, frozen, prompts)[0])


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_projection_computes_the_formula(use_dora):
    rng = np.random.default_rng(0)
    w, bias = rng.normal(size=(6, 2, 4)), rng.normal(size=(2, 4))
    a, b, m = rng.normal(size=(6, 3)), rng.normal(size=(3, 2, 4)), rng.normal(size=(2, 4))
    x = rng.normal(size=(5, 6))
    # y = m / ‖W + a·b‖ · (W + a·b)ᵀ x + bias, the norm over the inputs of each output.
    whole = w + np.einsum("ir,rnh->inh", a, b)
    if use_dora:
        whole = whole * m / np.linalg.norm(whole, axis=0)
    wanted = np.einsum("ti,inh->tnh", x, whole) + bias
    leaf = {"a": a, "b": b} | ({"magnitude": m} if use_dora else {})
    leaf = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), leaf)
    params = {"kernel": jnp.asarray(w, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    module = Projection((6,), (2, 4), True, 0.02, jnp.float32)
    got = module.apply({"params": params, "lora": leaf}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(adapted_kernel(params["kernel"], leaf), whole, atol=1e-5)


@pytest.mark.slow
def test_the_norm_of_dora_passes_no_gradient():
    w, x = jnp.asarray([[3.0], [4.0]]), jnp.asarray([[1.0, 2.0]])
    leaf = {"a": jnp.asarray([[1.0], [0.0]]), "b": jnp.asarray([[0.0]]), "magnitude": jnp.asarray([10.0])}

    def output(leaf):
        return (
            Projection((2,), (1,), False, 0.02, jnp.float32)
            .apply({"params": {"kernel": w}, "lora": leaf}, x)
            .sum()
        )

    # y = m/‖W‖ · (x·W + (x·a)·b) with ‖W‖ = 5 constant: dy/db = m/5 · x·a = 2, dy/dm = x·W/5 = 11/5.
    gradient = jax.grad(output)(leaf)
    np.testing.assert_allclose(gradient["b"], [[2.0]], rtol=1e-6)
    np.testing.assert_allclose(gradient["magnitude"], [2.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("gpt2", EVERYWHERE, marks=pytest.mark.slow),
        ("llama", LoraConfig(r=2, target_modules=("q_proj", "lm_head"), use_dora=True)),
    ],
)
def test_gradient_reaches_every_adapter_and_nothing_frozen(family, config):
    policy, params, frozen = adapted(family, config)
    prompts = tiny_prompts()

    def loss(params, frozen):
        features = policy.branch(params, frozen, policy.trunk(frozen, prompts), prompts, None)
        return jnp.square(policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE]).sum()

    gradient, of_frozen = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, frozen)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)
    for leaf in jax.tree.leaves(of_frozen):
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lore_2_7_decoding_with_an_adapter_equals_scoring(family):
    policy, params, frozen = adapted(family, EVERYWHERE)
    inputs = tiny_prompts(3, 12)
    real = inputs.attention_mask

    @jax.jit
    def both(params, frozen):
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        return scored.policy, decode_all(policy, params, frozen, inputs, prefill=8).policy

    scored, decoded = both(params, frozen)
    np.testing.assert_allclose(scored[real], decoded[real], atol=1e-4)


def test_lore_2_12_base_and_adapter_are_sampled_and_not_their_rounded_sum():
    policy, params, frozen = adapted("llama", EVERYWHERE, scale=0.02)
    lm, _ = tiny_lm("llama")
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    inputs = tiny_prompts(4, 12)
    inputs = inputs._replace(attention_mask=jnp.ones((4, 12), bool))
    lora = lm.bind(EVERYWHERE)

    @jax.jit
    def logprobs(params, frozen):
        exact = lora.merge(jax.tree.map(lambda x: x.astype(jnp.float32), frozen), params["lora"])
        merged = lora.merge(frozen, params["lora"])
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        sampled = decode_all(policy, params, frozen, inputs, prefill=4).policy
        logits = [policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE] for hidden in (scored, sampled)]
        logits += [lm.logits(weights, inputs.tokens) for weights in (exact, merged)]
        return [jax.nn.log_softmax(each) for each in logits]

    scored, sampled, exact, merged = logprobs(params, frozen)
    # Sampler and scorer are one policy, that of the unrounded sum; a merged one in bfloat16 is another.
    np.testing.assert_allclose(sampled, scored, atol=1e-5)
    np.testing.assert_allclose(scored, exact, atol=1e-5)
    assert float(jnp.abs(merged - sampled).max()) > 1e-3


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "down_proj", "lm_head"]),
        ("gpt2", ["c_attn", "c_fc"]),
        ("t5", ["q", "wo"]),
        # Its keys and values are made of kernel and adapter together, added up in float32.
        ("deepseek_v3", ["q_b_proj", "kv_b_proj", "o_proj"]),
    ],
)
def test_a_loop_over_tokens_reads_adapters_that_are_rounded_already(family, targets):
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    policy, params, frozen = adapted(family, config, compute_dtype=jnp.bfloat16)
    inputs = tiny_contexts(4, 8, 3) if family == "t5" else tiny_prompts(4, 8)

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def decoded(params):
        cache = policy.init_cache(params, frozen, inputs, 8)
        hidden = policy.decode(params, frozen, inputs, cache)[0].policy
        return hidden, policy.logits(params, frozen, hidden)

    once = policy.loop_weights(params, 4, 8)
    # What a loop reads under float32: arranged in the same way, and rounded by the program alone.
    unrounded = adapted(family, config, compute_dtype=jnp.float32)[0].loop_weights(params, 4, 8)
    jax.tree.map(np.testing.assert_array_equal, decoded(once), decoded(unrounded))
    (hidden, logits), (wanted_hidden, wanted_logits) = decoded(once), decoded(params)
    np.testing.assert_array_equal(hidden, wanted_hidden)
    # A head's adapter stays in float32, and its A is transposed once or in the product. Without AVX-512, XLA for CPUs
    # has another kernel for a transposed factor, which adds up in another order.
    rounding = 1e-6 if "lm_head" in targets else 0
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=rounding)
    wide = ("lm_head", "k_up", "v_up")
    kinds = {
        path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(once["lora"].leaves)
    }
    assert len(kinds) > 2
    assert {name for name, kind in kinds.items() if kind == jnp.float32} == {
        name for name in kinds if any(each in name for each in wide)
    }


@pytest.mark.parametrize("use_dora", [False, True])
def test_merge_computes_the_same_and_unmerge_goes_back(use_dora):
    config = LoraConfig(r=2, target_modules=SOME, use_dora=use_dora)
    policy, params, frozen = adapted("gpt2", config)
    lm, whole = tiny_lm("gpt2")
    prompts, lora = tiny_prompts(), lm.bind(config)
    merged = jax.jit(lora.merge)(frozen, params["lora"])
    real = prompts.attention_mask
    np.testing.assert_allclose(
        jax.jit(lm.logits)(merged, *prompts[:2])[real],
        scorer(policy)(params, frozen, prompts)[0][real],
        atol=1e-4,
    )
    if use_dora:
        with pytest.raises(ValueError, match="cannot undo DoRA"):
            lora.unmerge(merged, params["lora"])
    else:
        back = jax.jit(lora.unmerge)(merged, params["lora"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back, dict(whole))


@pytest.mark.parametrize(("layers", "cut"), [((1,), 1), (None, None)])
def test_layers_below_the_first_adapter_are_a_shared_trunk(layers, cut):
    config = LoraConfig(r=2, target_modules=("q_proj",), layers_to_transform=layers)
    policy, params, frozen = adapted("llama", config)
    assert len(params["lora"]) == (1 if layers else 2)
    prompts = tiny_prompts()
    trunk = jax.eval_shape(policy.trunk, frozen, prompts)
    assert (trunk is None) == (cut is None)
    lm, _ = tiny_lm("llama")
    merged = lm.bind(config).merge(frozen, params["lora"])
    real = prompts.attention_mask
    np.testing.assert_allclose(
        scorer(policy)(params, frozen, prompts)[0][real],
        jax.jit(lm.logits)(merged, *prompts[:2])[real],
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("targets", "cut"),
    [
        (("project_in",), None),
        (("project_in", "project_out", "lm_head"), None),
        (r"model\.decoder\.(project_in|layers\.1\..*q_proj)", None),
        (("project_out",), 2),
        (("project_out", "lm_head"), 2),
        (r"model\.decoder\.(project_out|layers\.1\..*q_proj)", 1),
    ],
)
@pytest.mark.slow
def test_maps_below_and_above_the_layers_act_in_decoding_and_in_scoring(targets, cut):
    hf_config = copy.deepcopy(CASES["opt-350m"])
    hf_config.tie_word_embeddings = "lm_head" not in targets
    lm, config = CausalLM.from_config(hf_config), LoraConfig(r=2, target_modules=targets)
    params, frozen = lm.split_params(lm.init(jax.random.key(0)), adapter=config, key=jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf + 0.3, params)
    policy, inputs, lora = lm.policy(adapter=config), tiny_prompts(3, 8), lm.bind(config)

    @jax.jit
    def all_three(params, frozen):
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        decoded = decode_all(policy, params, frozen, inputs, prefill=5).policy
        logits = [policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE] for hidden in (scored, decoded)]
        return *logits, lm.logits(lora.merge(frozen, params["lora"]), *inputs[:2])

    scored, decoded, merged = (logits[inputs.attention_mask] for logits in all_three(params, frozen))
    np.testing.assert_allclose(scored, decoded, atol=1e-4)
    np.testing.assert_allclose(scored, merged, atol=1e-4)
    assert branch_start(lm.config, -1, 0, lora) == cut


def test_a_map_that_is_neither_below_nor_above_the_layers_is_refused():
    lora = tiny_lm("llama")[0].bind(LoraConfig(target_modules=("lm_head",)))
    assert lora.first_layer > 2
    (module,) = lora.modules
    elsewhere = replace(module, parts=(replace(module.parts[0], path=("somewhere",)),))
    with pytest.raises(ValueError, match="lm_head holds the parameter 'somewhere', which is neither"):
        _ = replace(lora, modules=(elsewhere,)).first_layer


@pytest.mark.parametrize(
    ("targets", "cut"),
    [
        ("lm_head", 2),
        (r"lm_head|encoder\..*\.1\..*\.wo", None),
        (r"decoder\.block\.1\..*\.q", 1),
        (r"decoder\.block\.0\..*\.q", None),
    ],
)
def test_the_trunk_of_an_encoder_and_a_decoder_ends_below_the_lowest_adapter(targets, cut):
    lm, _ = tiny_lm("t5")
    lora = lm.bind(LoraConfig(target_modules=targets))
    assert seq2seq_branch_start(lm.config, -1, 0, lora) == cut


@pytest.mark.parametrize(
    ("family", "task"), [("llama", "SEQ_2_SEQ_LM"), ("t5", "CAUSAL_LM"), ("llama", "SEQ_CLS")]
)
def test_an_adapter_of_another_task_is_refused(family, task):
    lm, _ = tiny_lm(family)
    own = {"llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}[family]
    given = {"peft_type": "LORA", "task_type": task, "r": 2}
    with pytest.raises(ValueError, match=f"`task_type` must be {own} for a {family} model; got '{task}'"):
        lm.bind(read_adapter_config(given))
    for accepted in (own, None):
        assert lm.bind(read_adapter_config(given | {"task_type": accepted})).modules


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_language_model_has_no_score_to_save_whole(family):
    given = {"peft_type": "LORA", "modules_to_save": ["score"]}
    with pytest.raises(
        ValueError, match="`modules_to_save` names 'score', which must be the end of a module's name"
    ):
        tiny_lm(family)[0].bind(read_adapter_config(given))


@pytest.mark.slow
def test_the_value_branch_is_not_adapted():
    policy, params, frozen = adapted("llama", EVERYWHERE, num_value_layers_unfrozen=1)
    assert set(params) == {"lora", "value_branch"}
    prompts = tiny_prompts()
    features = jax.jit(lambda p, f: policy.branch(p, f, policy.trunk(f, prompts), prompts, None))(
        params, frozen
    )
    assert float(jnp.abs(features.policy - features.value).max()) > 1e-2


def test_lore_2_6_adapter_dropout_acts_only_where_a_key_is_given():
    config = LoraConfig(r=2, target_modules=SOME, lora_dropout=0.5)
    policy, params, frozen = adapted("gpt2", config)
    prompts = tiny_prompts()
    hidden = jax.jit(lambda key: policy.branch(params, frozen, None, prompts, key).policy)
    calm, dropped = hidden(None), hidden(jax.random.key(0))
    np.testing.assert_array_equal(calm, hidden(None))
    assert float(jnp.abs(calm - dropped).max()) > 1e-2


@pytest.mark.slow
def test_remat_changes_nothing():
    lm, _ = tiny_lm("gpt2")
    config = LoraConfig(r=2, use_dora=True)
    _, params, frozen = adapted("gpt2", config)
    prompts = tiny_prompts()

    def loss(params, remat):
        policy = lm.policy(adapter=config, remat=remat)
        return jnp.square(policy.branch(params, frozen, None, prompts, None).policy).sum()

    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)


def test_rank_and_alpha_of_their_own():
    lm, _ = tiny_lm("llama")
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=("q_proj", "v_proj"),
        rank_pattern={r"layers\.1\.self_attn\.v_proj": 3},
        alpha_pattern={"q_proj": 10},
    )
    found = {module.name: (module.rank, module.scale) for module in lm.bind(config).modules}
    assert found == {
        "model.layers.0.self_attn.q_proj": (2, 5.0),
        "model.layers.0.self_attn.v_proj": (2, 2.0),
        "model.layers.1.self_attn.q_proj": (2, 5.0),
        "model.layers.1.self_attn.v_proj": (3, 4 / 3),
    }


@pytest.mark.parametrize("targets", ["all-linear", ("in_proj", "out_proj")])
@pytest.mark.parametrize("case", ["falcon_h1", "nemotron_h"])
def test_what_peft_does_not_adapt_is_refused(case, targets):
    lm = CausalLM.from_config(CASES[case])
    with pytest.raises(ValueError, match=r"must leave out model\.layers\.0\.\w+\.out_proj: PEFT refuses"):
        lm.bind(LoraConfig(target_modules=targets))
    names = {
        module.name.rsplit(".", 1)[-1]
        for module in lm.bind(LoraConfig(target_modules=targets, exclude_modules=("out_proj",))).modules
    }
    assert "in_proj" in names and "out_proj" not in names


@pytest.mark.parametrize("targets", ["all-linear", ("x_proj", "dt_proj")])
def test_what_torch_reads_past_an_adapter_is_refused(targets):
    lm = CausalLM.from_config(CASES["jamba"])
    with pytest.raises(
        ValueError, match=r"must leave out model\.layers\.0\.mamba\.dt_proj: torch reads its weight"
    ):
        lm.bind(LoraConfig(target_modules=targets))
    found = lm.bind(LoraConfig(target_modules=targets, exclude_modules=("dt_proj",))).modules
    names = {module.name.rsplit(".", 1)[-1] for module in found}
    assert "x_proj" in names and "dt_proj" not in names


def test_defaults_are_those_of_peft():
    assert set(DEFAULT_TARGETS) == set(FAMILIES)
    names = [module.name for module in tiny_lm("gpt2")[0].bind(LoraConfig()).modules]
    assert names == ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"]


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("llama", ("embed_tokens",), "matches model.embed_tokens, which is no linear map"),
        ("llama", ("input_layernorm",), "which is no linear map"),
        ("llama", ("c_attn",), "matches no module of this llama model"),
        ("gpt2", ("c_attn", "lm_head"), "names lm_head, which this model does not have: its head is tied"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(family, targets, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_lm(family)[0].bind(LoraConfig(target_modules=targets))


def test_a_fresh_adapter_needs_a_key():
    lm, whole = tiny_lm("gpt2")
    with pytest.raises(ValueError, match="`key` must be given to start a fresh adapter"):
        lm.split_params(whole, adapter=LoraConfig())


def test_lore_7_5_weight_decay_skips_the_norms_of_dora():
    lm, whole = tiny_lm("gpt2")
    params, _ = lm.split_params(whole, adapter=LoraConfig(use_dora=True), key=jax.random.key(0))
    assert decayed(params["lora"]["transformer.h.0.attn.c_attn"]) == {
        "A": True,
        "B": True,
        "magnitude": False,
    }


def test_experts_are_no_modules_and_their_router_is_a_map_like_others():
    lm = CausalLM.from_config(CASES["mixtral"])
    (module,) = lm.bind(LoraConfig(target_modules=("model.layers.0.mlp.gate",))).modules
    assert module.parts[0].path == ("layers_0", "experts", "router")
    everywhere = lm.bind(LoraConfig(target_modules="all-linear")).modules
    parts = {part.path[1:] for module in everywhere for part in module.parts}
    assert {path[0] for path in parts} == {"attn", "experts"}
    assert {path[1] for path in parts if path[0] == "experts"} == {"gate", "up", "down", "router"}
    with pytest.raises(ValueError, match="or one of several stacked experts"):
        lm.bind(LoraConfig(target_modules=("w1", "w2")))
    # The file's name of it, which transformers does not have in memory: PEFT finds nothing there either.
    with pytest.raises(ValueError, match="matches no module of this mixtral model"):
        lm.bind(LoraConfig(target_modules=("model.layers.0.block_sparse_moe.gate",)))


def test_a_pattern_that_is_no_pattern_is_named():
    lm, _ = tiny_lm("llama")
    with pytest.raises(ValueError, match=r"'\(q_proj' must be a pattern of whole module names"):
        lm.bind(LoraConfig(target_modules="(q_proj"))
