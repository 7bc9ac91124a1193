# SPDX-License-Identifier: Apache-2.0
"""Attention by one kernel against einsums with a mask: same results, same gradients, and what each cannot read."""

import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Gemma4TextConfig, MistralConfig

from jrl.models import fused_attention
from jrl.models.adapters.config import LoraConfig, PrefixConfig
from jrl.models.config import LatentAttention
from jrl.models.fused_attention import attend_fused, choose_attention, fused_rows
from jrl.models.model import make_model
from jrl.models.noise import EmbeddingNoise
from jrl.models.scorer import make_scorer, split_scorer
from jrl.rollout import generate
from jrl.rollout.generate import prefill
from jrl.typing import ModelInputs
from tests.jaxprs import equations
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier
from tests.models.family_cases import CASES
from tests.models.family_cases_gemma4 import GEMMA4
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_hf_config, tiny_lm

# What each of these has that the others have not: learned positions, grouped heads, a window, norms of queries and
# keys, scales that differ by layer, partial rotary positions in a parallel block.
CHOSEN = ("gpt2", "llama", "phi3-window", "qwen3", "gpt_neo", "gptj")
GEMMA4_LENDERS = Gemma4TextConfig(
    **GEMMA4
    | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    | dict(num_kv_shared_layers=2)
)
EINSUM_ONLY = ("bloom", "gemma2")


def right_padded(lengths=(11, 4, 1, 0), width=11, seed=0):
    rng = np.random.default_rng(seed)
    mask = np.arange(width) < np.asarray(lengths)[:, None]
    tokens = np.where(mask, rng.integers(2, VOCAB_SIZE, size=mask.shape), PAD_ID)
    return ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


def results(lm, params, inputs, implementation, *, dropout_key=None, **options):
    """Log-probabilities of all tokens, and the gradient of a number made of them."""
    policy = lm.policy(attn_implementation=implementation, **options)
    params, frozen = lm.split_params(
        params, **{k: v for k, v in options.items() if k == "num_layers_unfrozen"}
    )

    @jax.jit
    def compute(params):
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, dropout_key)
        logits = policy.logits(params, frozen, features.policy)[..., :VOCAB_SIZE]
        logprobs = jnp.where(inputs.attention_mask[..., None], jax.nn.log_softmax(logits), 0.0)
        # Weights, so that the softmax's own invariance does not hide a gradient.
        return jnp.sum(logprobs * jnp.cos(jnp.arange(logprobs.size)).reshape(logprobs.shape)), logprobs

    (_, logprobs), gradient = jax.value_and_grad(compute, has_aux=True)(params)
    return logprobs, gradient


def assert_same(first, second):
    np.testing.assert_allclose(first[0], second[0], atol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(first[1]))
    for one, two in zip(jax.tree.leaves(first[1]), jax.tree.leaves(second[1]), strict=True):
        # Some gradients are 0 in truth, that of a key's bias; only rounding is left of them.
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6 * largest)


def check_family(name):
    lm = make_model(CASES[name])
    params = lm.init(jax.random.key(0))
    inputs = right_padded()
    assert_same(*(results(lm, params, inputs, kind) for kind in ("einsum", "xla")))


@pytest.mark.parametrize("name", CHOSEN)
def test_a_kernel_and_einsums_give_the_same(name):
    check_family(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in CHOSEN])
def test_of_every_family(name):
    config = make_model(CASES[name]).config
    is_latent = any(isinstance(layer.mixer, LatentAttention) for layer in config.layers)
    if config.alibi or config.attention_sinks or is_latent or config.attention_softcap is not None:
        with pytest.raises(ValueError, match="attn_implementation"):
            check_family(name)
    else:
        check_family(name)


@pytest.mark.parametrize("options", [{"num_layers_unfrozen": 1}, {"remat": True}])
def test_trunk_and_remat(options):
    lm, params = tiny_lm("llama")
    assert_same(*(results(lm, params, right_padded(), kind, **options) for kind in ("einsum", "xla")))


def test_bfloat16_is_as_near_to_float32_as_einsums_are():
    lm, params = tiny_lm("llama")
    exact = results(lm, params, right_padded(), "einsum")[0]
    far = [
        float(jnp.abs(results(lm, params, right_padded(), kind, compute_dtype=jnp.bfloat16)[0] - exact).max())
        for kind in ("einsum", "xla")
    ]
    assert far[1] < 1.5 * far[0] + 1e-3, far


@pytest.fixture
def kernel_calls(monkeypatch):
    """A list that grows with every layer that is traced through the kernel."""
    kernel, calls = jax.nn.dot_product_attention, []

    def counted(*args, **options):
        calls.append(options["implementation"])
        return kernel(*args, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", counted)
    return calls


def test_packed_rows_go_through_einsums(kernel_calls):
    lm, params = tiny_lm("llama")
    packed = right_padded((11, 8))._replace(segment_ids=jnp.asarray([[0] * 5 + [1] * 6, [0] * 4 + [1] * 7]))
    one, two = (results(lm, params, packed, kind) for kind in ("einsum", "xla"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not kernel_calls


def test_attention_dropout_goes_through_einsums_and_noise_does_not(kernel_calls):
    lm, params = make_model(tiny_hf_config("llama", attention_dropout=0.5)), tiny_lm("llama")[1]
    key = jax.random.key(3)
    one, two = (results(lm, params, right_padded(), kind, dropout_key=key) for kind in ("einsum", "xla"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not kernel_calls
    # Noise on the embeddings alone drops nothing, whatever rate the model has.
    noise = EmbeddingNoise(5.0, alone=True)
    assert_same(
        *(
            results(lm, params, right_padded(), kind, dropout_key=key, noise=noise)
            for kind in ("einsum", "xla")
        )
    )
    assert kernel_calls == ["xla"] * lm.config.num_layers


def test_rows_padded_on_the_left_become_nan_and_leave_the_others_alone():
    lm, params = tiny_lm("gpt2")
    inputs = right_padded((11, 4, 7))
    mask = inputs.attention_mask.at[1].set(inputs.attention_mask[1, ::-1]).at[2, 3].set(False)
    policy = lm.policy(attn_implementation="xla")
    hidden = jax.jit(policy.branch)(params, {}, None, inputs._replace(attention_mask=mask), None).policy
    assert np.isnan(hidden).all((1, 2)).tolist() == [False, True, True]
    alone = jax.jit(lm.policy().branch)(params, {}, None, inputs, None).policy
    np.testing.assert_allclose(hidden[0], alone[0], atol=1e-5)


def test_what_a_kernel_is_told_of_the_rows():
    rows = fused_rows(right_padded((11, 4, 0)).attention_mask.at[1, 0].set(False), "xla")
    assert rows.lengths.dtype == jnp.int32
    assert rows.lengths.tolist() == [11, 3, 1]  # never an empty row
    assert rows.real.sum(1).tolist() == [11, 0, 0]
    np.testing.assert_array_equal(rows.fill, [0.0, np.nan, 0.0])


def test_virtual_tokens_have_einsums_alone(kernel_calls):
    """Policy and reference alike: in low precision the KL between them would hold the rounding of two kernels."""
    lm, params = tiny_lm("llama")
    adapter = PrefixConfig(num_virtual_tokens=3)
    policy = lm.policy(adapter=adapter)
    _, frozen = lm.split_params(params, adapter=adapter, key=jax.random.key(0))
    policy.branch({}, frozen, policy.trunk(frozen, right_padded()), right_padded(), None)
    assert not kernel_calls
    with pytest.raises(ValueError, match="virtual tokens"):
        lm.policy(adapter=adapter, attn_implementation="xla")


def test_a_value_branch_and_an_adapter_go_through_the_kernel(kernel_calls):
    lm, params = tiny_lm("llama")
    inputs = right_padded()
    for options in ({"num_value_layers_unfrozen": 1}, {"adapter": LoraConfig(r=2)}):
        trainable, frozen = lm.split_params(params, key=jax.random.key(0), **options)
        hidden = []
        for kind in ("einsum", "xla"):
            policy = lm.policy(attn_implementation=kind, **options)
            features = policy.branch(trainable, frozen, policy.trunk(frozen, inputs), inputs, None)
            hidden.append([np.where(inputs.attention_mask[..., None], x, 0) for x in features[:2]])
        np.testing.assert_allclose(hidden[0], hidden[1], atol=1e-5)
        assert kernel_calls
        kernel_calls.clear()


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (64, 40), (96, None), (128, 7), (256, None)])
def test_in_bfloat16_a_kernel_is_as_near_to_float32_as_einsums_are(head_dim, window):
    """Widths that no tile divides, grouped heads, rows of one token and of none; gradients included. On a GPU the
    kernel is cuDNN's."""
    fields = {"hidden_size": 128, "head_dim": head_dim, "attention_dropout": 0.0}
    hf_config = tiny_hf_config("llama", **fields)
    if window is not None:
        plain = {key: value for key, value in hf_config.to_dict().items() if key != "model_type"}
        hf_config = MistralConfig(**plain | {"sliding_window": window})
    lm = make_model(hf_config)
    params = lm.init(jax.random.key(0))
    inputs = right_padded((77, 64, 33, 1, 0), 77)
    exact, by_einsum, by_kernel = (
        results(lm, params, inputs, kind, compute_dtype=dtype)
        for kind, dtype in (
            ("einsum", jnp.float32),
            ("einsum", jnp.bfloat16),
            ("cudnn" if jax.default_backend() == "gpu" else "xla", jnp.bfloat16),
        )
    )

    def far(found):
        return [
            float(jnp.linalg.norm(a - b)) for a, b in zip(*map(jax.tree.leaves, (found, exact)), strict=True)
        ]

    sizes = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(exact)]
    for kernel, einsum, size in zip(far(by_kernel), far(by_einsum), sizes, strict=True):
        assert kernel <= 1.5 * einsum + 1e-3 * size


def test_garbage_of_a_kernel_at_padding_reaches_nothing(monkeypatch):
    """cuDNN may leave memory as it was where there is padding, in the output and in the gradients."""
    real_kernel = jax.nn.dot_product_attention

    def dirty_kernel(q, k, v, *, query_seq_lengths, key_value_seq_lengths, **options):
        def run(q, k, v, lengths):
            return real_kernel(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options)

        def soiled(x, lengths):
            padding = jnp.arange(x.shape[1])[None, :] >= lengths[:, None]
            return jnp.where(padding[:, :, None, None], jnp.nan, x)

        @jax.custom_vjp
        def attend(q, k, v, lengths):
            return soiled(run(q, k, v, lengths), lengths)

        def forward(*args):
            return attend(*args), args

        def backward(args, gradient):
            *pulled, _ = jax.vjp(run, *args)[1](gradient)
            return *(soiled(x, args[3]) for x in pulled), np.zeros(args[3].shape, jax.dtypes.float0)

        attend.defvjp(forward, backward)
        return attend(q, k, v, query_seq_lengths)

    lm, params = tiny_lm("llama")
    clean = results(lm, params, right_padded(), "xla")
    monkeypatch.setattr(jax.nn, "dot_product_attention", dirty_kernel)
    dirty = results(lm, params, right_padded(), "xla")
    assert_same(clean, dirty)


def test_rows_of_an_odd_length_get_a_column_for_cudnn(monkeypatch):
    """JAX refuses the derivative of cuDNN's kernel for an odd length."""
    kernel, lengths = jax.nn.dot_product_attention, list[int]()

    def by_xla(q, k, v, *, implementation, **options):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        lengths.append(q.shape[1])
        return kernel(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, 11, 4, 8)) for seed in range(3))
    mask = right_padded((11, 4)).attention_mask

    def attend(implementation):
        def total(q, k, v):
            rows = fused_rows(mask, implementation)
            out = attend_fused(q, k.swapaxes(1, 2), v.swapaxes(1, 2), rows, scale=0.3, window=5)
            return jnp.sum(jnp.sin(out)), out

        (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, gradients

    (one, two) = attend("xla"), attend("cudnn")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, two)
    assert lengths == [11, 12]


def test_no_mask_of_queries_and_keys_is_made(monkeypatch):
    """The kernel is told lengths alone: with one that makes no mask, no (L, L) array is left in the program."""

    def kernel(q, k, v, bias=None, mask=None, **options):
        assert bias is None and mask is None and options["is_causal"]
        assert options["query_seq_lengths"] is options["key_value_seq_lengths"]
        return q + (k + v).repeat(q.shape[2] // k.shape[2], axis=2)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    lm, params = tiny_lm("llama")
    width = 23

    def square(implementation):
        policy = lm.policy(attn_implementation=implementation)
        inputs = right_padded((23, 5), width)
        jaxpr = jax.make_jaxpr(lambda p: policy.branch(p, {}, None, inputs, None))(params)
        return f"{width},{width}]" in str(jaxpr)

    assert square("einsum") and not square("xla")


def gpu(kind="NVIDIA H100 80GB HBM3", capability="9.0", platform="gpu"):
    return types.SimpleNamespace(device_kind=kind, compute_capability=capability, platform=platform)


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "chosen"),
    [
        (gpu(), jnp.bfloat16, {}, "cudnn"),
        (gpu(), jnp.float16, {}, "cudnn"),
        (gpu(), jnp.float32, {}, "einsum"),
        (gpu(), jnp.bfloat16, {"head_dim": 12}, "einsum"),
        (gpu(), jnp.bfloat16, {"head_dim": 256}, "cudnn"),
        (gpu("NVIDIA A100-SXM4-80GB", "8.0"), jnp.bfloat16, {"head_dim": 128}, "cudnn"),
        (gpu("NVIDIA A100-SXM4-80GB", "8.0"), jnp.bfloat16, {"head_dim": 256}, "einsum"),
        (gpu("Tesla V100-SXM2-32GB", "7.0"), jnp.float16, {}, "einsum"),
        (gpu("NVIDIA B200", "10.0"), jnp.bfloat16, {"head_dim": 128}, "cudnn"),
        (gpu("NVIDIA B200", "10.0"), jnp.bfloat16, {"head_dim": 256}, "einsum"),
        (gpu("NVIDIA GeForce RTX 5090", "12.0"), jnp.bfloat16, {"head_dim": 256}, "einsum"),
        (gpu("AMD Instinct MI300X", "gfx942"), jnp.bfloat16, {}, "einsum"),
        (gpu("TPU v5e", "", "tpu"), jnp.bfloat16, {}, "einsum"),
        (gpu(), jnp.bfloat16, {"alibi": True}, "einsum"),
        (gpu(), jnp.bfloat16, {"attention_softcap": 50.0}, "einsum"),
    ],
)
def test_auto_is_the_kernel_exactly_where_it_serves(monkeypatch, device, dtype, changes, chosen):
    monkeypatch.setattr(fused_attention.jax, "devices", lambda: [device])
    config = replace(tiny_lm("llama")[0].config, **changes)
    assert choose_attention("auto", config, dtype) == chosen
    if chosen == "einsum":
        with pytest.raises(ValueError, match=r"`model.attn_implementation` 'cudnn' does not serve here: "):
            choose_attention("cudnn", config, dtype)
    else:
        assert choose_attention("cudnn", config, dtype) == "cudnn"


@pytest.mark.parametrize(("width", "chosen"), [(128, "cudnn"), (256, "einsum")])
def test_heads_wider_than_128_are_not_asked_of_cudnn_for_an_absent_device(monkeypatch, width, chosen):
    """JAX's own check looks at the process's devices, here a CPU, and refuses them."""
    devices = types.SimpleNamespace(devices=np.array([gpu()]))
    meant = types.SimpleNamespace(device_kind=gpu().device_kind, platform="cuda")
    abstract = types.SimpleNamespace(abstract_device=meant)
    monkeypatch.setattr(fused_attention.jax.sharding, "get_mesh", lambda: devices)
    monkeypatch.setattr(fused_attention.jax.sharding, "get_abstract_mesh", lambda: abstract)
    config = replace(tiny_lm("llama")[0].config, head_dim=width)
    assert choose_attention("auto", config, jnp.bfloat16) == chosen
    if chosen == "einsum":
        with pytest.raises(ValueError, match="wider than 128, here 256, only where the GPU itself is"):
            choose_attention("cudnn", config, jnp.bfloat16)


def test_on_this_machine():
    config = tiny_lm("llama")[0].config
    assert choose_attention("einsum", config, jnp.float32) == "einsum"
    assert choose_attention("xla", config, jnp.float32) == "xla"
    if jax.default_backend() == "cpu":
        assert choose_attention("auto", config, jnp.bfloat16) == "einsum"
        with pytest.raises(ValueError, match="needs an NVIDIA GPU, and the model computes on cpu"):
            choose_attention("cudnn", config, jnp.bfloat16)


@pytest.mark.parametrize("name", EINSUM_ONLY)
def test_models_that_no_kernel_serves(name):
    lm = make_model(CASES[name])
    lm.policy(attn_implementation="auto")
    with pytest.raises(ValueError, match=r"ALiBi|caps its scores"):
        lm.policy(attn_implementation="xla")


def test_other_kinds_of_models_have_einsums_alone():
    lm, _ = tiny_lm("t5")
    lm.policy(attn_implementation="auto")
    with pytest.raises(ValueError, match="learned bias"):
        lm.policy(attn_implementation="cudnn")


def test_an_encoder_has_einsums_alone():
    model, _ = random_classifier(labelled(ENCODERS["distilbert"], 1))
    make_scorer(model, num_layers_unfrozen=-1, attn_implementation="auto")
    with pytest.raises(ValueError, match="both directions"):
        make_scorer(model, num_layers_unfrozen=-1, attn_implementation="xla")


def test_a_reward_model_scores_the_same(kernel_calls):
    model, params = random_classifier(labelled(DECODERS["llama"], 1))
    params, frozen = split_scorer(params, model)
    inputs = right_padded((11, 4, 1))

    def gradient(implementation):
        score = make_scorer(model, num_layers_unfrozen=-1, attn_implementation=implementation)

        def total(params):
            scores = score(params, frozen, inputs, None)
            return jnp.sum(scores * jnp.arange(1.0, 4.0)), scores

        (_, scores), found = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        return scores, found

    assert_same(gradient("einsum"), gradient("xla"))
    assert kernel_calls


def left_padded(lengths=(11, 4, 1, 8), width=11):
    found = right_padded(lengths, width)
    return ModelInputs(found.tokens[:, ::-1], found.attention_mask[:, ::-1])


def after_prompts(lm, params, prompts, implementation, **options):
    """(features of the last column, of a token behind it, what of the cache is read) once prompts are read."""
    policy = lm.policy(attn_implementation=implementation, **options)
    split = {
        k: v
        for k, v in options.items()
        if k in ("num_layers_unfrozen", "num_value_layers_unfrozen", "adapter")
    }
    params, frozen = lm.split_params(params, key=jax.random.key(0), **split)

    @jax.jit
    def read(params):
        last, cache = prefill(policy, params, frozen, prompts, 3)
        newest = ModelInputs(prompts.tokens[:, :1] + 1, jnp.ones((len(prompts.tokens), 1), bool))
        following, after = policy.decode(params, frozen, newest, cache)
        # What stands at padding is masked, and may be anything.
        kept = [
            jnp.where(cache.mask[:, None, :, None], x, 0)
            for x in jax.tree.leaves((cache.layers, cache.value_layers))
            if x.ndim == 4 and x.shape[2] == cache.mask.shape[1]
        ]
        return (
            last[:2],
            following[:2],
            kept,
            cache.mask,
            cache.key_positions,
            cache.positions,
            policy.visited(after),
        )

    return read(params)


def assert_prompts_are_read_alike(lm, prompts, kinds, **options):
    params = lm.init(jax.random.key(0))
    assert_alike(*(after_prompts(lm, params, prompts, kind, **options) for kind in kinds))


def assert_alike(one, two):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, two)
    assert one[2], "a cache that is compared"


@pytest.mark.parametrize("name", [*CHOSEN, "mixtral"])
def test_prompts_are_read_by_the_kernel(name, kernel_calls):
    """Left-padded rows, turned for it, fill the cache that einsums fill."""
    lm = make_model(CASES[name])
    assert_prompts_are_read_alike(lm, left_padded(), ("einsum", "xla"))
    assert kernel_calls == ["xla"] * lm.config.num_layers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"num_value_layers_unfrozen": 1}),
        ("llama", {"adapter": LoraConfig(r=2)}),
        ("mixtral", {"routing_replay": True}),
    ],
    ids=["value branch", "adapter", "record of experts"],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_what_else_is_kept_of_prompts(name, options, in_parts, kernel_calls, monkeypatch):
    """Of all rows at once and of two rows at a time."""
    lm = make_model(CASES[name])
    params = lm.init(jax.random.key(0))
    whole = after_prompts(lm, params, left_padded(), "einsum", **options)
    if in_parts:
        monkeypatch.setattr(generate, "PREFILL_TOKENS", 22)
    assert_alike(whole, after_prompts(lm, params, left_padded(), "xla", **options))
    assert kernel_calls


def test_each_layer_writes_the_cache_of_all_rows_before_the_next_one_reads_the_prompts(monkeypatch):
    """A barrier ties a layer's cache to the stream that the next layer reads. In parts it is the cache of all rows."""
    lm, params = tiny_lm("llama")
    policy = lm.policy(attn_implementation="xla")
    params, frozen = lm.split_params(params, key=jax.random.key(0))

    def barriers():
        """Shapes of what passes each barrier of the loop over parts, or of the program."""
        program = jax.make_jaxpr(lambda: prefill(policy, params, frozen, left_padded(), 3))()
        found = [eqn for eqn in equations(program) if eqn.primitive.name == "optimization_barrier"]
        return [[var.aval.shape for var in eqn.invars] for eqn in found]

    config = lm.config
    assert (config.num_kv_heads, config.head_dim, config.width, config.num_layers) == (2, 8, 32, 2)
    assert barriers() == 2 * [[(4, 11, 32), *2 * [(4, 2, 14, 8)]]]
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 22)
    assert barriers() == 2 * [[(2, 11, 32), *2 * [(2, 2, 2, 14, 8)]]]


def test_prompts_on_the_right_and_rows_of_padding_are_read_as_well(kernel_calls):
    prompts = right_padded((11, 4, 7))
    nothing = left_padded((11, 0, 8))
    lm, params = tiny_lm("llama")
    for inputs, compared in ((prompts, [0, 1, 2]), (nothing, [0, 2])):
        one, two = (after_prompts(lm, params, inputs, kind)[:3] for kind in ("einsum", "xla"))
        for x, y in zip(jax.tree.leaves(one[1:]), jax.tree.leaves(two[1:]), strict=True):
            assert np.isfinite(y).all()
            np.testing.assert_allclose(x[compared, ...], y[compared, ...], atol=1e-5)
    assert kernel_calls


def test_a_prompt_with_a_gap_becomes_nan_and_leaves_the_others_alone(kernel_calls):
    lm, params = tiny_lm("llama")
    prompts = left_padded((11, 4, 8))
    broken = prompts._replace(attention_mask=prompts.attention_mask.at[2, 6].set(False))
    (found, _), *_ = after_prompts(lm, params, broken, "xla")
    (wanted, _), *_ = after_prompts(lm, params, prompts, "einsum")
    assert np.isnan(found).all((1, 2)).tolist() == [False, False, True]
    np.testing.assert_allclose(found[:2], wanted[:2], atol=1e-5)
    assert kernel_calls


@pytest.mark.parametrize("config", [GEMMA4_LENDERS, CASES["falcon_h1"]], ids=lambda config: config.model_type)
def test_prompts_of_lenders_and_recurrences_have_einsums(config, kernel_calls):
    lm = make_model(config)
    assert_prompts_are_read_alike(lm, left_padded(), ("einsum", "xla"))
    assert not kernel_calls


def test_of_prompts_in_parts_columns_have_einsums_and_rows_the_kernel(monkeypatch, kernel_calls):
    """All but the first columns would read what is cached."""
    lm = tiny_lm("llama")[0]
    for limit, kinds in ((8, []), (22, ["xla"] * lm.config.num_layers)):
        monkeypatch.setattr(generate, "PREFILL_TOKENS", limit)
        assert_prompts_are_read_alike(lm, left_padded(), ("einsum", "xla"))
        assert kernel_calls == kinds
