# SPDX-License-Identifier: Apache-2.0
"""A step of decoding reads the written part of the cache alone, and draws what it drew from the whole."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import cache
from jrl.models.adapters import PrefixConfig, PromptConfig
from jrl.models.cache import LayerCache, empty_buffers
from jrl.models.model import make_model
from jrl.models.policy import make_policy
from jrl.rollout import generate
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs
from tests.models.test_blocks import BASE, KINDS, LENGTH, random_params
from tests.tiny import PAD_ID, tiny_contexts, tiny_hf_config, tiny_lm, tiny_policy, tiny_prompts

COLUMNS = 8
FORMS = {"one buffer": True, "several buffers": False}
"""Whether products read slices of one buffer as they lie."""


@pytest.fixture(params=FORMS)
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Steps read multiples of eight columns, in either form."""
    monkeypatch.setattr(cache, "READ_COLUMNS", COLUMNS)
    monkeypatch.setattr(cache, "reads_slices", lambda _: FORMS[request.param])
    return monkeypatch


def generated(policy: Any, params: Any, frozen: Any, prompts: ModelInputs, count: int) -> Any:
    """Greedy completions, without an end."""
    run = make_generate(policy, max_new_tokens=count, eos_token_ids=(), pad_token_id=PAD_ID, do_sample=False)
    rows = jnp.arange(prompts.tokens.shape[0])
    knobs = SamplingKnobs(jnp.float32(1.0), jnp.float32(1.0))
    return jax.jit(run)(params, frozen, prompts, rows, knobs, jax.random.key(0))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_ids_are_those_of_a_cache_that_is_read_whole(in_parts, family):
    """24 columns and a few more: the steps pass two borders, and the last buffer is shorter."""
    policy, params, frozen, _ = tiny_policy(family)
    prompts, count = (tiny_contexts(), 28) if family == "t5" else (tiny_prompts(P=9), 20)
    found = generated(policy, params, frozen, prompts, count)
    in_parts.setattr(cache, "READ_COLUMNS", 1 << 10)
    wanted = generated(policy, params, frozen, prompts, count)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


def test_a_prompt_that_is_read_in_parts_falls_into_several_multiples(in_parts):
    """18 columns in six parts of three, of which two go over a border."""
    policy, params, frozen, _ = tiny_policy("llama")
    in_parts.setattr(generate, "PREFILL_TOKENS", 12)
    found = generated(policy, params, frozen, tiny_prompts(P=18), 4)
    in_parts.setattr(cache, "READ_COLUMNS", 1 << 10)
    in_parts.setattr(generate, "PREFILL_TOKENS", 1 << 10)
    wanted = generated(policy, params, frozen, tiny_prompts(P=18), 4)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", ["alibi", "sandwich-windows-caps"])
def test_decoding_equals_scoring(in_parts, kind):
    config = dataclasses.replace(BASE, **KINDS[kind])
    policy, params = make_policy(config, num_layers_unfrozen=-1), random_params(config)
    tokens = jax.random.randint(jax.random.key(2), (2, LENGTH), 2, 97)
    mask = jnp.arange(LENGTH)[None, :] >= jnp.array([[0], [3]])
    inputs = ModelInputs(tokens, mask)

    @jax.jit
    def runs(params: Any) -> Any:
        scored = policy.branch(params, {}, None, inputs, None).policy
        state = policy.init_cache(params, {}, inputs, LENGTH + 5)
        first, state = policy.decode(params, {}, jax.tree.map(lambda x: x[:, :6], inputs), state)

        def step(state: Any, column: Any) -> Any:
            features, state = policy.decode(params, {}, ModelInputs(*(x[:, None] for x in column)), state)
            return state, features.policy[:, 0]

        _, later = jax.lax.scan(step, state, (tokens[:, 6:].T, mask[:, 6:].T))
        return scored, jnp.concatenate([first.policy, later.swapaxes(0, 1)], axis=1)

    scored, decoded = (np.asarray(x)[np.asarray(mask)] for x in runs(params))
    assert scored.std() > 0.1
    np.testing.assert_allclose(decoded, scored, atol=2e-5)


@pytest.mark.parametrize("config", [PrefixConfig(3), PromptConfig(3)], ids=["prefix", "prompt"])
def test_virtual_tokens_come_first_in_a_cache_of_parts(in_parts, config):
    lm, whole = tiny_lm("llama")
    params, frozen = lm.split_params(whole, adapter=config, key=jax.random.key(0))
    found = generated(lm.policy(adapter=config), params, frozen, tiny_prompts(), 12)
    in_parts.setattr(cache, "READ_COLUMNS", 1 << 10)
    wanted = generated(lm.policy(adapter=config), params, frozen, tiny_prompts(), 12)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


@pytest.mark.parametrize("count", [1, 5, 13])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "traced"])
def test_new_columns_go_where_one_buffer_has_them(in_parts, count, is_known):
    rng = np.random.default_rng(0)
    new = LayerCache(*((jnp.asarray(rng.normal(size=(2, 3, count, 4)), jnp.float32),) for _ in range(2)))
    empty = empty_buffers((2, 3, 21, 4), 1, jnp.float32)
    for column in range(22 - count):
        at = np.int32(column) if is_known else jnp.int32(column)
        written = jax.jit(empty.append)(new, at) if not is_known else empty.append(new, at)
        for parts, (part,) in zip(written, new, strict=True):
            wanted = np.zeros((2, 3, 21, 4), np.float32)
            wanted[:, :, column : column + count] = part
            np.testing.assert_array_equal(np.concatenate(parts, axis=2), wanted)


def test_a_short_cache_is_one_buffer_and_read_whole(monkeypatch):
    short = jax.eval_shape(lambda: empty_buffers((2, 3, cache.READ_COLUMNS, 4), 1, jnp.float32))
    assert len(short.k) == len(short.v) == 1
    monkeypatch.setattr(cache, "reads_slices", lambda _: False)
    long = jax.eval_shape(lambda: empty_buffers((2, 3, 2 * cache.READ_COLUMNS + 1, 4), 1, jnp.float32))
    assert [buffer.shape[2] for buffer in long.k] == [256, 256, 1]
    monkeypatch.setattr(cache, "reads_slices", lambda _: True)
    long = jax.eval_shape(lambda: empty_buffers((2, 3, 2 * cache.READ_COLUMNS + 1, 4), 1, jnp.float32))
    assert [buffer.shape[2] for buffer in long.k] == [513]


def test_a_step_copies_no_part_of_the_cache():
    """As this platform's compiler leaves it: nothing of a buffer's size is made but the buffers, each in place."""
    lm = make_model(tiny_hf_config("llama", n_positions=2048, max_position_embeddings=2048))
    params, frozen = jax.eval_shape(
        lambda key: lm.split_params(lm.init(key), num_layers_unfrozen=-1), jax.random.key(0)
    )
    policy = lm.policy(num_layers_unfrozen=-1)
    rows, prompt, count = 3, 300, 400
    run = make_generate(policy, max_new_tokens=count, eos_token_ids=(), pad_token_id=0, do_sample=False)
    tokens = jax.ShapeDtypeStruct((rows, prompt), jnp.int32)
    real, number = jax.ShapeDtypeStruct((rows, prompt), bool), jax.ShapeDtypeStruct((), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    knobs = SamplingKnobs(number, number)
    compiled = jax.jit(run).lower(params, frozen, ModelInputs(tokens, real), ids, knobs, key).compile()
    # What the body of the loop makes that is as large as the last buffer at least.
    made = re.findall(
        r"%(\S+) = f32\[3,2,(\d{3,}),8\]\S* ([\w-]+)\(.*op_name=\"[^\"]*/while/", compiled.as_text()
    )
    assert {int(size) for _, size, _ in made} == {256, 699 - 512}
    kept = [name for name, _, kind in made if kind not in ("get-tuple-element", "parameter")]
    assert kept and all(re.search("dynamic.update.slice", name) for name in kept), kept


class TestOwnColumns:
    """Rows whose tokens lie one behind the other, whatever comes when."""

    ROWS, ROOM = 4, 40

    @pytest.fixture(params=["gpt2", "llama", "alibi", "sandwich-windows-caps", "prefix"])
    def model(self, request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
        if request.param in KINDS:
            config = dataclasses.replace(BASE, **KINDS[request.param])
            return make_policy(config, num_layers_unfrozen=-1), random_params(config), {}
        if request.param == "prefix":
            lm, whole = tiny_lm("llama")
            params, frozen = lm.split_params(whole, adapter=PrefixConfig(3), key=jax.random.key(0))
            return lm.policy(adapter=PrefixConfig(3)), params, frozen
        policy, params, frozen, _ = tiny_policy(request.param)
        return policy, params, frozen

    def play(self, model: tuple[Any, Any, Any], seed: int = 0) -> tuple[Any, list[list[int]], Any]:
        """Chunks of random tokens with padding anywhere, of which rows forget some now and then."""
        policy, params, frozen = model
        random = np.random.default_rng(seed)
        first = ModelInputs(jnp.zeros((self.ROWS, 1), jnp.int32), jnp.zeros((self.ROWS, 1), bool))
        held: list[list[int]] = [[] for _ in range(self.ROWS)]
        start = policy.own_columns(policy.init_cache(params, frozen, first, self.ROOM))
        decode = jax.jit(lambda inputs, cache: policy.decode(params, frozen, inputs, cache))
        found = start
        for width in (7, 1, 5, 1, 1, 7, 5):
            tokens = random.integers(2, 90, (self.ROWS, width))
            mask = random.random((self.ROWS, width)) < 0.7
            _, found = decode(ModelInputs(jnp.asarray(tokens), jnp.asarray(mask)), found)
            for row, ids in enumerate(held):
                ids += tokens[row][mask[row]].tolist()
            counts = np.asarray([random.integers(0, min(4, len(ids)) + 1) for ids in held])
            found = policy.forget(found, jnp.asarray(counts))
            held = [ids[: len(ids) - count] for ids, count in zip(held, counts, strict=True)]
        return found, held, decode

    def test_what_is_held_equals_a_fresh_prefill(self, in_parts, model):
        policy, params, frozen = model
        played, held, decode = self.play(model)
        width = max(map(len, held))
        tokens = np.stack([np.pad(np.asarray(ids, np.int32), (width - len(ids), 0)) for ids in held])
        mask = np.arange(width)[None, :] >= np.asarray([[width - len(ids)] for ids in held])
        inputs = ModelInputs(jnp.asarray(tokens), jnp.asarray(mask))
        empty = policy.own_columns(policy.init_cache(params, frozen, inputs, self.ROOM))
        _, fresh = decode(inputs, empty)
        np.testing.assert_array_equal(played.mask, fresh.mask)
        np.testing.assert_array_equal(played.column, fresh.column)
        np.testing.assert_array_equal(played.positions, fresh.positions)
        for a, b in zip(jax.tree.leaves(played.layers), jax.tree.leaves(fresh.layers), strict=True):
            assert a.shape == b.shape
        whole = lambda parts: np.concatenate([np.asarray(part) for part in parts], axis=2)  # noqa: E731
        real = np.asarray(fresh.mask)[:, None, :, None]
        for a, b in zip(played.layers, fresh.layers, strict=True):
            np.testing.assert_allclose(whole(a.k) * real, whole(b.k) * real, atol=1e-5)
            np.testing.assert_allclose(whole(a.v) * real, whole(b.v) * real, atol=1e-5)

    def test_the_next_token_reads_it_as_a_row_of_its_own(self, in_parts, model):
        policy, params, frozen = model
        played, held, decode = self.play(model, seed=1)
        newest = ModelInputs(jnp.full((self.ROWS, 1), 5), jnp.ones((self.ROWS, 1), bool))
        found = decode(newest, played)[0].policy[:, -1]

        @jax.jit
        def branch(alone: ModelInputs) -> Any:
            return policy.branch(params, frozen, policy.trunk(frozen, alone), alone, None).policy[0]

        width = max(map(len, held)) + 1
        for row, ids in enumerate(held):
            tokens = np.pad(np.asarray([[*ids, 5]], np.int32), ((0, 0), (0, width - len(ids) - 1)))
            # What stands behind a token is not read by it.
            wanted = branch(ModelInputs(jnp.asarray(tokens), jnp.arange(width)[None] <= len(ids)))[len(ids)]
            np.testing.assert_allclose(found[row], wanted, atol=2e-5)

    def test_a_row_without_a_token_stays_as_it_is(self, model):
        played, _, decode = self.play(model)
        mask = jnp.asarray([[True], [False], [True], [False]])
        _, found = decode(ModelInputs(jnp.full((self.ROWS, 1), 7), mask), played)
        for before, after in zip(jax.tree.leaves(played), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(before[1::2], after[1::2])

    def test_seq2seq_models_refuse(self):
        policy, params, frozen, _ = tiny_policy("t5")
        with pytest.raises(ValueError, match="causal language model"):
            jax.eval_shape(lambda: policy.own_columns(policy.init_cache(params, frozen, tiny_contexts(), 8)))
