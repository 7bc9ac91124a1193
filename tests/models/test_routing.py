# SPDX-License-Identifier: Apache-2.0
"""Routing replay: what the sampler records is what whole rows visit, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import MixtralConfig

from jrl.models.adapters.config import PromptConfig
from jrl.models.config import Experts
from jrl.models.experts import route, shares
from jrl.models.model import CausalLM
from jrl.models.routing import record_dtype, record_shape
from jrl.ops.alignment import join
from jrl.rollout.generate import make_generate
from jrl.rollout.score import make_score
from jrl.typing import Completions, ModelInputs, Sequences
from tests.models.family_cases_mixers import CASES as HYBRIDS
from tests.models.family_cases_moe import CASES, MIXTRAL
from tests.rollout.programs import PLAIN, knobs
from tests.tiny import PAD_ID, tiny_lm, tiny_prompts

NEW_TOKENS = 12
NOISY = MixtralConfig(**MIXTRAL | dict(num_local_experts=16, initializer_range=0.2))
NAMES = ["mixtral", "qwen3_moe-some-layers", pytest.param("jamba", marks=pytest.mark.slow)]


@functools.cache
def model(name: str) -> tuple[CausalLM, Any]:
    config = NOISY if name == "noisy" else (CASES | HYBRIDS)[name]
    lm = CausalLM.from_config(config)
    return lm, lm.init(jax.random.key(3))


def sampled(
    name: str, *, replay: bool, dtype: Any = jnp.float32, eos: tuple[int, ...] = (5, 6, 7, 8), **options: Any
) -> tuple[ModelInputs, Completions]:
    """Ragged prompts and their completions; several ids end a row, so that some do early."""
    lm, params = model(name)
    policy = lm.policy(compute_dtype=dtype, routing_replay=replay)
    settings = dict(max_new_tokens=NEW_TOKENS, eos_token_ids=eos, pad_token_id=PAD_ID) | options
    prompts = tiny_prompts()
    rows = jnp.arange(prompts.tokens.shape[0] * settings.get("num_generations", 1))
    return prompts, jax.jit(make_generate(policy, **settings))(
        params, {}, prompts, rows, knobs(), jax.random.key(0)
    )


@functools.cache
def recorded(name: str) -> Sequences:
    return join(*sampled(name, replay=True), pad_token_id=PAD_ID)


def scored(name: str, sequences: Sequences, *, dtype: Any = jnp.float32, **options: Any) -> jax.Array:
    lm, params = model(name)
    trainable, frozen = lm.split_params(params, **options)
    score = make_score(lm.policy(compute_dtype=dtype, **options), logprob_chunk_bytes=PLAIN)
    return jax.jit(score)(trainable, frozen, None, sequences, jnp.float32(1.0)).logprobs


def without_record(sequences: Sequences) -> Sequences:
    return sequences._replace(inputs=sequences.inputs._replace(experts=None))


def own_choices(name: str, sequences: Sequences) -> np.ndarray:
    """What whole rows choose for themselves, as a prefill of them records it."""
    lm, params = model(name)
    policy = lm.policy(routing_replay=True)
    inputs = sequences.inputs._replace(experts=None)

    @jax.jit
    def read(params: Any) -> jax.Array:
        cache = policy.init_cache(params, {}, inputs, inputs.tokens.shape[1])
        return policy.visited(policy.decode(params, {}, inputs, cache)[1])

    return np.asarray(read(params))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_route_visits_what_it_is_told_and_weighs_by_the_scores(scoring):
    """Golden: softmax(log p) = p, and the sigmoid of a logit is its probability."""
    p = jnp.array([[[0.3, 0.1, 0.6]]])
    scores, bias = (jnp.log(p), None) if scoring == "softmax" else (jnp.log(p / (1 - p)), jnp.zeros(3))
    experts = Experts(3, 2, 4, True, scoring=scoring)
    weights, chosen = route(scores, experts, bias, jnp.array([[[1, 0]]], jnp.int8))
    assert chosen.tolist() == [[[1, 0]]]
    np.testing.assert_allclose(weights.ravel(), [0.25, 0.75], atol=1e-6)
    free = route(scores, experts, bias, jnp.full((1, 1, 2), -1, jnp.int8))
    for with_record, plain in zip(free, route(scores, experts, bias), strict=True):
        np.testing.assert_array_equal(with_record, plain)


def test_shares_of_a_token_have_the_sum_1():
    p = jnp.array([[[0.3, 0.1, 0.6]]])
    experts = Experts(3, 2, 4, True, scoring="sigmoid")
    np.testing.assert_allclose(shares(jnp.log(p / (1 - p)), experts), p, atol=1e-6)
    np.testing.assert_allclose(shares(jnp.log(p), Experts(3, 2, 4, True)), p, atol=1e-6)


def test_gradients_pass_through_the_weights_of_replayed_experts():
    experts = Experts(3, 2, 4, True)
    scores = jnp.log(jnp.array([[[0.3, 0.1, 0.6]]]))
    gradient = jax.grad(lambda s: route(s, experts, None, jnp.array([[[1, 0]]]))[0][0, 0, 0])(scores)
    # w₁ = p₁ / (p₁ + p₀) is a logistic function of the two scores: dw₁/ds₁ = w₁·w₀.
    np.testing.assert_allclose(gradient.ravel(), [-0.1875, 0.1875, 0.0], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_record_holds_the_choices_of_every_token_that_was_read(name):
    sequences = recorded(name)
    record = np.asarray(sequences.inputs.experts)
    lm = model(name)[0]
    assert record.shape[2:] == record_shape(lm.config) and record.dtype == record_dtype(lm.config) == np.int8
    # All real tokens but the last one, which the sampler never reads.
    lengths = np.asarray(sequences.inputs.attention_mask).sum(axis=1)
    assert len(set(lengths.tolist())) > 1
    known = np.arange(record.shape[1])[None, :] < lengths[:, None] - 1
    assert (record[~known] == -1).all() and (record[known] >= 0).all()
    np.testing.assert_array_equal(record[known], own_choices(name, sequences)[known])


def test_recording_changes_no_sample():
    for plain, kept in zip(
        sampled("mixtral", replay=False)[1], sampled("mixtral", replay=True)[1], strict=True
    ):
        if plain is not None:
            np.testing.assert_array_equal(plain, kept)


@pytest.mark.parametrize("options", [{}, {"num_layers_unfrozen": 1}])
@pytest.mark.parametrize("name", NAMES)
def test_replayed_scores_equal_plain_ones_where_nothing_rounds(name, options):
    sequences = recorded(name)
    plain = scored(name, without_record(sequences), **options)
    np.testing.assert_allclose(scored(name, sequences, **options), plain, atol=1e-6)


@pytest.mark.parametrize("share_layers", [False, True])
def test_rows_visit_the_experts_of_their_record(share_layers):
    """Other choices give other scores; the same ones again give the same. Layers that share a body, too."""
    sequences = recorded("mixtral")
    lm, params = model("mixtral")
    score = jax.jit(make_score(lm.policy(share_layers=share_layers), logprob_chunk_bytes=PLAIN))

    def read(record: Any) -> np.ndarray:
        rows = sequences._replace(inputs=sequences.inputs._replace(experts=record))
        return np.asarray(score(params, {}, None, rows, jnp.float32(1.0)).logprobs)[sequences.mask]

    record = np.asarray(sequences.inputs.experts)
    plain = read(record)
    swapped = record.copy()
    swapped[:, :, -1] = np.where(record[:, :, -1] >= 0, (record[:, :, -1] + 2) % 5, -1)
    assert np.abs(read(swapped) - plain).max() > 1e-4
    # The order of a token's experts says nothing.
    np.testing.assert_allclose(read(record[..., ::-1]), plain, atol=1e-5)


def test_nothing_depends_on_the_experts_of_the_last_token_or_of_padding():
    sequences = recorded("mixtral")
    record = np.asarray(sequences.inputs.experts)
    spoiled = np.where(record < 0, 4, record)
    assert (spoiled != record).any()
    rows = sequences._replace(inputs=sequences.inputs._replace(experts=spoiled))
    mask = np.asarray(sequences.mask)
    np.testing.assert_array_equal(
        scored("mixtral", rows)[mask], np.asarray(scored("mixtral", sequences))[mask]
    )


@pytest.mark.parametrize("limit", [3, 16], ids=["columns", "rows"])
def test_the_record_is_right_after_a_prefill_in_parts_and_for_several_samples(limit, monkeypatch):
    """One column at a time, or two rows."""
    monkeypatch.setattr("jrl.rollout.generate.PREFILL_TOKENS", limit)
    prompts, completions = sampled("mixtral", replay=True, num_generations=2)
    rows = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), prompts)
    sequences = join(rows, completions, pad_token_id=PAD_ID)
    record = np.asarray(sequences.inputs.experts)
    known = record >= 0
    assert known.any()
    np.testing.assert_array_equal(record[known], own_choices("mixtral", sequences)[known])


@pytest.mark.slow
def test_replay_brings_a_rounding_sampler_nearer_to_the_learner():
    """bfloat16 in the sampler, float32 in the learner: where experts differ, ratios are largest."""
    prompts, completions = sampled("noisy", replay=True, dtype=jnp.bfloat16, eos=(), max_new_tokens=48)
    sequences = join(prompts, completions, pad_token_id=PAD_ID)
    record = np.asarray(sequences.inputs.experts)
    others = np.sort(record, axis=-1) != np.sort(own_choices("noisy", sequences), axis=-1)
    assert 0 < others[record >= 0].mean() < 0.2, "the sampler chose as the learner does, or by chance"
    mask = np.asarray(sequences.mask)
    replayed, plain = (
        np.abs(np.expm1(scored("noisy", rows) - completions.logprobs))[mask]
        for rows in (sequences, without_record(sequences))
    )
    print(f"|ratio - 1|: mean {replayed.mean():.4f} max {replayed.max():.3f} with replay", end=", ")
    print(f"mean {plain.mean():.4f} max {plain.max():.3f} without")
    assert replayed.mean() < 0.8 * plain.mean() and replayed.max() < 0.8 * plain.max()


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="`routing_replay` must be False for a model without a mixture"):
        tiny_lm("llama")[0].policy(routing_replay=True)
    with pytest.raises(ValueError, match="`routing_replay` must be off for a seq2seq model"):
        tiny_lm("t5")[0].policy(routing_replay=True)
    with pytest.raises(ValueError, match="`routing_replay` must be off under prompt tuning"):
        model("mixtral")[0].policy(adapter=PromptConfig(2), routing_replay=True)
