# SPDX-License-Identifier: Apache-2.0
"""The decoding kernel, interpreted, against einsums: same outputs, and what a row that it cannot read becomes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import decode_attention
from jrl.models.attention import attend
from jrl.models.cache import LayerCache, Places
from jrl.models.decode_attention import BLOCK, attend_spans, decodes_by_kernel, key_spans, whole_blocks
from jrl.models.decoder_policy import DecoderPolicy
from jrl.models.model import make_model
from jrl.models.score_blocks import Operands
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs
from tests.models.family_cases import CASES
from tests.models.triton_interpreter import kernels_of
from tests.tiny import tiny_hf_config, tiny_prompts


def draw(rows, heads, kv_heads, length, width, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, 1, heads, width), (rows, kv_heads, length, width), (rows, kv_heads, length, width)
    return (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def cache_of(k, v):
    return LayerCache((k,), (v,))


def appended(cache, new, columns):
    """The cache as other ways of decoding write it, one new column of every row."""
    return cache.append(new, Places(columns[:, None], jnp.max(columns)))


def is_as_near_as_einsums(found, q, cache, mask):
    """Whether outputs in bfloat16 are as near to float32 as those of einsums."""
    wide_q, wide = jax.tree.map(lambda x: x.astype(jnp.float32), (q, cache))
    exact = attend(Operands(wide_q, *wide, mask), scale=0.1)
    by_einsum = attend(Operands(q, *cache, mask), scale=0.1)
    far = [float(jnp.linalg.norm(x.astype(jnp.float32) - exact)) for x in (found, by_einsum)]
    return far[0] <= 1.5 * far[1] + 1e-3 * float(jnp.linalg.norm(exact))


def spans_mask(spans, length):
    columns = np.arange(length)
    return jnp.asarray([[(columns >= start) & (columns < stop)] for start, stop in spans])


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(14, 2), (4, 4), (40, 2)], ids=["groups of 7", "of 1", "of 20"]
)
def test_the_kernel_is_einsums(heads, kv_heads):
    """Spans that begin and end inside blocks, at their edges, of one column, and of none."""
    length = 3 * BLOCK
    q, k, v = draw(6, heads, kv_heads, length, 16)
    spans = [(0, length), (5, 77), (BLOCK, 2 * BLOCK), (130, 131), (0, 1), (9, 9)]
    mask = spans_mask(spans, length)
    found, _ = attend_spans(q, None, cache_of(k, v), key_spans(mask, jnp.zeros(6, int)), scale=0.3)
    expected = attend(Operands(q, (k,), (v,), mask), scale=0.3)
    np.testing.assert_allclose(found[:5], expected[:5], atol=2e-6)
    np.testing.assert_array_equal(found[5], 0.0)


def test_a_row_with_a_gap_becomes_nan_and_leaves_the_others_alone():
    length = BLOCK
    q, k, v = draw(3, 4, 2, length, 16)
    mask = spans_mask([(3, 40), (3, 40), (0, 12)], length).at[1, 0, 20].set(False)
    found, _ = attend_spans(q, None, cache_of(k, v), key_spans(mask, jnp.zeros(3, int)), scale=1.0)
    assert np.isnan(found).all((1, 2, 3)).tolist() == [False, True, False]
    np.testing.assert_allclose(found[::2], attend(Operands(q, (k,), (v,), mask), scale=1.0)[::2], atol=2e-6)


def test_the_newest_token_is_read_and_written():
    """The newest column is the last of a span, alone in it, outside it, and behind the cache."""
    length, width = 2 * BLOCK, 16
    spans = [(0, 71), (5, 100), (9, 10), (3, 40), (0, length), (BLOCK, BLOCK + 1)]
    mask, columns = spans_mask(spans, length), jnp.asarray([70, 99, 9, 50, length, BLOCK])
    q, k, v = draw(6, 40, 2, length, width)
    new = cache_of(*(jax.random.normal(jax.random.key(seed), (6, 2, 1, width)) for seed in (7, 8)))
    # What the columns held before is read by nobody.
    stale = appended(cache_of(k, v), jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), new), columns)
    found, after = attend_spans(q, new, stale, key_spans(mask, columns), scale=0.3)
    expected = appended(cache_of(k, v), new, columns)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    np.testing.assert_allclose(found, attend(Operands(q, *expected, mask), scale=0.3), atol=2e-6)


@pytest.mark.skipif(
    jax.default_backend() != "gpu" and jax.__version_info__ >= (0, 11),
    reason="JAX 0.11 lowers it where a GPU is",
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    [(14, 2, 64), (34, 2, 16), (4, 4, 128)],
    ids=["groups of 7", "of 17", "of 1"],
)
@pytest.mark.parametrize("appends", [True, False])
def test_as_lowered_for_a_gpu_it_is_einsums(heads, kv_heads, width, appends, monkeypatch):
    """The Triton module, run in NumPy, in bfloat16; no element of the output is left out, none but a column written."""
    monkeypatch.setattr(decode_attention, "platform", lambda: "gpu")
    length = 3 * BLOCK
    spans = [(3, length), (0, BLOCK), (BLOCK, BLOCK + 1), (5, 40), (9, 10)]
    columns = jnp.asarray([length - 1, BLOCK - 1, BLOCK, length, 9])
    mask = spans_mask(spans, length)
    q, k, v = draw(5, heads, kv_heads, length, width, jnp.bfloat16)
    # The fourth row does not read its newest key, however large its score is.
    new_k, new_v = (k[:, :, 5:6] + 1).at[3].multiply(100), v[:, :, 9:10] - 1
    new, cache, where = cache_of(new_k, new_v), cache_of(k, v), key_spans(mask, columns)
    decode = jax.jit(lambda *given: attend_spans(*given, scale=0.1))
    (kernel,) = kernels_of(
        decode.trace(q, new if appends else None, cache, where).lower(lowering_platforms=("cuda",))
    )
    tokens = jnp.concatenate([q[:, 0], *([new_k[:, :, 0], new_v[:, :, 0]] if appends else [])], axis=1)
    out = np.full((5, heads, width), np.nan, q.dtype)
    stored_k, stored_v = np.array(k), np.array(v)
    numbers = [np.asarray(x) for x in (where.starts, where.stops, where.columns, where.fill)]
    kernel.run([np.asarray(tokens), stored_k, stored_v, *numbers, out, stored_k, stored_v], seed=0)
    after = appended(cache, new, columns) if appends else cache
    jax.tree.map(np.testing.assert_array_equal, cache_of(stored_k, stored_v), after)
    assert is_as_near_as_einsums(jnp.asarray(out)[:, None], q, after, mask)


@pytest.fixture
def by_kernel(monkeypatch):
    """Has every decoder read its cache by the kernel."""
    return lambda: monkeypatch.setattr(DecoderPolicy, "_by_kernel", True)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "phi3-window",
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon_h1", "gemma4_text")),
    ],
)
def test_sampling_by_the_kernel_is_sampling_by_einsums(name, by_kernel):
    """Rows with padding on the left, two samples of a prompt, more columns than a block; a window, and lent keys."""
    lm = make_model(CASES[name])
    params = lm.init(jax.random.key(0))
    prompts = tiny_prompts(3, 60)

    def sample():
        generate = make_generate(
            lm.policy(), max_new_tokens=9, eos_token_ids=(), pad_token_id=0, num_generations=2
        )
        knobs = SamplingKnobs(jnp.float32(1))
        return jax.jit(generate)(params, {}, prompts, jnp.arange(6), knobs, jax.random.key(1))

    expected = sample()
    by_kernel()
    found = sample()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def test_the_record_of_experts_is_as_long_as_by_einsums(by_kernel):
    lm = make_model(CASES["mixtral"])
    params, prompts = lm.init(jax.random.key(0)), tiny_prompts(3, 7)

    def experts():
        generate = make_generate(
            lm.policy(routing_replay=True), max_new_tokens=4, eos_token_ids=(), pad_token_id=0
        )
        knobs = SamplingKnobs(jnp.float32(1))
        return jax.jit(generate)(params, {}, prompts, jnp.arange(3), knobs, jax.random.key(1)).experts

    expected = experts()
    by_kernel()
    np.testing.assert_array_equal(experts(), expected)


def test_rows_with_columns_of_their_own(by_kernel):
    """Turns of an environment: one token for some rows, and none for one that has read nothing."""
    lm = make_model(tiny_hf_config("llama"))
    params = lm.init(jax.random.key(0))
    texts = tiny_prompts(4, 9)

    def read():
        policy = lm.policy()
        nothing = ModelInputs(jnp.zeros((4, 1), jnp.int32), jnp.zeros((4, 1), bool))
        cache = policy.own_columns(policy.init_cache(params, {}, nothing, 80))
        texts_mask = texts.attention_mask.at[2].set(False)
        cache = policy.decode(params, {}, ModelInputs(texts.tokens, texts_mask), cache)[1]
        one = ModelInputs(jnp.asarray([[5], [6], [7], [8]]), jnp.asarray([[True], [True], [False], [True]]))
        return policy.decode(params, {}, one, cache)[0].policy

    expected = read()
    by_kernel()
    found = read()
    np.testing.assert_allclose(found[jnp.asarray([0, 1, 3])], expected[jnp.asarray([0, 1, 3])], atol=1e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("dtype", "width", "serves"),
    [(jnp.bfloat16, 64, True), (jnp.float32, 64, False), (jnp.float16, 64, False), (jnp.bfloat16, 96, False)],
)
def test_where_the_kernel_serves(dtype, width, serves):
    config = make_model(tiny_hf_config("llama", head_dim=width)).config
    assert decodes_by_kernel("cudnn", config, dtype) == serves
    assert not any(decodes_by_kernel(other, config, dtype) for other in (None, "xla", "einsum"))


@pytest.fixture
def without_kernel(monkeypatch):
    """A JAX without Triton's dialect."""
    monkeypatch.delattr(jax.experimental.pallas, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    decode_attention._triton.cache_clear()
    yield
    decode_attention._triton.cache_clear()


@pytest.mark.usefixtures("without_kernel")
def test_a_jax_without_the_kernel_has_einsums():
    config = make_model(tiny_hf_config("llama", head_dim=64)).config
    assert not decodes_by_kernel("cudnn", config, jnp.bfloat16)


def test_a_cache_has_whole_blocks():
    assert [whole_blocks(length) for length in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]


on_a_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="the kernel itself needs an NVIDIA GPU")


@on_a_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (32, 8, 128), (8, 1, 256)])
def test_on_a_gpu_it_is_einsums_too(heads, kv_heads, width):
    length = 8 * BLOCK
    q, *cache = draw(64, heads, kv_heads, length, width, jnp.bfloat16)
    cache = cache_of(*cache)
    ends = np.random.default_rng(0).integers(1, length, size=64)
    mask = spans_mask([(end // 3, end) for end in ends], length)
    found, _ = attend_spans(q, None, cache, key_spans(mask, jnp.zeros(64, int)), scale=0.1)
    assert is_as_near_as_einsums(found, q, cache, mask)


@on_a_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (32, 8, 128), (8, 8, 16)])
def test_on_a_gpu_the_newest_token_is_read_and_written(heads, kv_heads, width):
    length = 8 * BLOCK
    q, k, v = draw(64, heads, kv_heads, length, width, jnp.bfloat16)
    new = cache_of(k[:, :, 5:6] + 1, v[:, :, 9:10] - 1)
    columns = np.random.default_rng(0).integers(0, length + 5, size=64)
    mask = spans_mask([(column // 3, min(column + 1, length)) for column in columns], length)
    spans = key_spans(mask, jnp.asarray(columns))
    decode = jax.jit(lambda q, new, cache: attend_spans(q, new, cache, spans, scale=0.1), donate_argnums=2)
    expected = appended(cache_of(k, v), new, jnp.asarray(columns))
    found, after = decode(q, new, cache_of(k, v))
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert is_as_near_as_einsums(found, q, expected, mask)
