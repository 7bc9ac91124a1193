# SPDX-License-Identifier: Apache-2.0
"""Sampling steered by Q − V: against a slow reference without cache, one step and one row at a time, in NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.rollout.generate import make_generate
from jrl.typing import Completions, ModelInputs, SamplingKnobs
from tests.tiny import PAD_ID, VOCAB_SIZE, loud_heads, tiny_contexts, tiny_policy, tiny_prompts

FAMILIES = ["gpt2", "t5"]
ROWS, STEPS, TOP_K = 4, 6, 5
BETAS = [0.0, 1.0, 30.0]
TEMPERATURE = 0.7
ROW_IDS = np.arange(ROWS, dtype=np.int32)
# Each token may be followed by about half of the others.
FORBIDDEN = np.random.default_rng(5).random((VOCAB_SIZE, VOCAB_SIZE)) < 0.5


@functools.cache
def steered(family: str) -> tuple[Any, Any, Any]:
    """(policy, params, frozen) of a tiny model whose value and Q heads say something."""
    policy, params, frozen, _ = tiny_policy(family, num_q_heads=2)
    return policy, loud_heads(params), frozen


def prompts_of(family: str) -> ModelInputs:
    return tiny_contexts(ROWS) if family == "t5" else tiny_prompts(ROWS)


def knobs(beta: float | None) -> SamplingKnobs:
    weight = None if beta is None else np.float32(beta)
    return SamplingKnobs(np.float32(TEMPERATURE), np.float32(1), weight, FORBIDDEN)


@functools.cache
def program(family: str, is_steered: bool) -> Any:
    """One sampler a family; without steering another, so that the programs of the first can be counted."""
    del is_steered
    settings = dict(max_new_tokens=STEPS, eos_token_ids=(), pad_token_id=PAD_ID, top_k=TOP_K)
    return jax.jit(make_generate(steered(family)[0], **settings))


def run(family: str, beta: float | None) -> Completions:
    _, params, frozen = steered(family)
    arguments = params, frozen, prompts_of(family), ROW_IDS, knobs(beta), jax.random.key(3)
    return program(family, beta is not None)(*arguments)


@functools.cache
def full_pass(family: str) -> Any:
    """One row from its first column on: logits, V and min Q of every column, real vocabulary only."""
    policy, params, frozen = steered(family)

    @jax.jit
    def read(inputs: ModelInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        heads = policy.heads(params, features.value)
        logits = policy.logits(params, frozen, features.policy)
        return logits[0, :, :VOCAB_SIZE], heads["values"][0], heads["q_values"].min(axis=0)[0, :, :VOCAB_SIZE]

    return read


@functools.cache
def uniforms() -> np.ndarray:
    """The number that each token of each row is drawn with."""
    keys = [jax.random.fold_in(jax.random.key(3), row) for row in range(ROWS)]
    return np.array(
        [[jax.random.uniform(jax.random.fold_in(k, t)) for t in range(STEPS)] for k in keys], np.float64
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def reference(family: str, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, log-probabilities), by the rule as it is written: mask, log π + β(Q − V), top-k, temperature, draw."""
    prompts, read = prompts_of(family), full_pass(family)
    width = prompts.tokens.shape[1] + STEPS
    tokens, logprobs = np.zeros((ROWS, STEPS), np.int32), np.zeros((ROWS, STEPS))
    for row in range(ROWS):
        ids = [int(i) for i in np.asarray(prompts.tokens[row])[np.asarray(prompts.attention_mask[row])]]
        for t in range(STEPS):
            columns = np.arange(width)[None] < len(ids)
            padded = np.zeros((1, width), np.int32)
            padded[0, : len(ids)] = ids
            context = (
                (None, None) if prompts.context_tokens is None else (x[row : row + 1] for x in prompts[3:5])
            )
            logits, values, q = read(ModelInputs(jnp.asarray(padded), jnp.asarray(columns), None, *context))
            z, v, best = (np.float64(x[len(ids) - 1]) for x in (logits, values, q))
            z = np.where(FORBIDDEN[ids[-1]], -np.inf, z)
            s = log_softmax(z) + beta * (best - v)
            s = np.where(s >= np.sort(s)[-TOP_K], s, -np.inf)
            p = np.exp(log_softmax(s / TEMPERATURE))
            drawn = int(np.argmax(np.cumsum(p) > uniforms()[row, t]))
            tokens[row, t], logprobs[row, t] = drawn, np.log(p[drawn])
            ids.append(drawn)
    return tokens, logprobs


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """With its two programs compiled: the sampler, and the pass over whole rows."""
    run(request.param, 1.0)
    reference(request.param, 1.0)
    return request.param


@pytest.fixture(scope="module")
def plain() -> Completions:
    """Sampled without any steering by a model that has Q heads."""
    return run("gpt2", None)


@pytest.mark.parametrize("beta", BETAS)
def test_lore_8_5_decoding_adds_beta_times_q_minus_v(family: str, beta: float) -> None:
    found = run(family, beta)
    tokens, logprobs = reference(family, beta)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-4)


def test_all_betas_share_one_program(family: str) -> None:
    drawn = {np.asarray(run(family, beta).tokens).tobytes() for beta in [*BETAS, 100.0]}
    assert program(family, True)._cache_size() == 1
    assert len(drawn) > 1, "beta has an effect"


def test_beta_zero_is_plain_sampling(plain: Completions) -> None:
    """The same ids and log-probabilities, bit for bit, though the heads say much."""
    jax.tree.map(np.testing.assert_array_equal, run("gpt2", 0.0), plain)


def test_an_untrained_model_is_not_steered(plain: Completions) -> None:
    """Fresh heads say 0."""
    _, params, frozen, _ = tiny_policy("gpt2", num_q_heads=2)
    fresh = program("gpt2", True)(
        params, frozen, prompts_of("gpt2"), ROW_IDS, knobs(100.0), jax.random.key(3)
    )
    np.testing.assert_array_equal(fresh.tokens, plain.tokens)


def test_a_forbidden_transition_never_happens(plain: Completions) -> None:
    """From the last token of the prompt on, with steering and without."""
    for tokens in (plain.tokens, run("gpt2", 1.0).tokens):
        walks = np.concatenate([prompts_of("gpt2").tokens[:, -1:], tokens], axis=1)
        assert not FORBIDDEN[walks[:, :-1], walks[:, 1:]].any()


def test_a_model_without_q_heads_cannot_be_steered() -> None:
    _, params, frozen, _ = tiny_policy("gpt2")
    with pytest.raises(ValueError, match=r"`knobs\.beta` must be None for a model without q_values"):
        program("gpt2", True)(params, frozen, prompts_of("gpt2"), ROW_IDS, knobs(1.0), jax.random.key(0))
