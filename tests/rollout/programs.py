# SPDX-License-Identifier: Apache-2.0
"""Compiled samplers and scoring passes that the tests of this folder share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.alignment import join
from jrl.rollout.generate import Generate, make_generate
from jrl.rollout.score import Score, make_score
from jrl.typing import Completions, ModelInputs, SamplingKnobs, Scored, Sequences
from tests.learners.tabular import EOS, VOCAB, tabular_policy
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_policy, tiny_prompts

PLAIN = 1 << 28
"""Bytes that hold all logits of the tests: the plain path."""
LONG = 64
"""Tokens of the long rollouts."""


def knobs(temperature: float = 1.0, top_p: float = 1.0) -> SamplingKnobs:
    return SamplingKnobs(np.float32(temperature), np.float32(top_p))


@functools.cache
def sampler(family: str, unfrozen: int = -1, value_layers: int = 0, **settings: Any) -> Generate:
    """Of a tiny decoder; without EOS unless told otherwise, so that every row is full."""
    policy = tiny_policy(family, unfrozen, num_value_layers_unfrozen=value_layers)[0]
    settings = dict(eos_token_ids=(), pad_token_id=PAD_ID, max_new_tokens=LONG) | settings
    return jax.jit(make_generate(policy, **settings))


@functools.cache
def scorer(family: str, unfrozen: int = -1, value_layers: int = 0) -> Score:
    policy = tiny_policy(family, unfrozen, num_value_layers_unfrozen=value_layers)[0]
    return jax.jit(make_score(policy, logprob_chunk_bytes=PLAIN))


@functools.cache
def long_rollout(family: str) -> tuple[ModelInputs, Completions]:
    """Prompts and 64 sampled tokens a row, at temperature 1."""
    return tiny_prompts(), sample(family, tiny_prompts())


@functools.cache
def _whole_logits(family: str) -> Callable[[ModelInputs], jax.Array]:
    policy, params, frozen, _ = tiny_policy(family)

    @jax.jit
    def logits(inputs: ModelInputs) -> jax.Array:
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        return policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]

    return logits


def window_logits(family: str, sequences: Sequences) -> np.ndarray:
    """Logits of every state of the window, cut out of one pass over whole rows, float64."""
    logits = np.asarray(_whole_logits(family)(sequences.inputs), np.float64)
    columns = np.asarray(sequences.starts)[:, None] + np.arange(sequences.mask.shape[1])
    return np.take_along_axis(logits, columns[..., None], axis=1)


joined = jax.jit(join, static_argnames="pad_token_id")


def sample(
    family: str,
    prompts: ModelInputs,
    *,
    row_ids: Any = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    **settings: Any,
) -> Completions:
    """Completions of the tiny decoder; temperature and top-p are traced, `settings` are static."""
    unfrozen, value_layers = settings.pop("unfrozen", -1), settings.pop("value_layers", 0)
    _, params, frozen, _ = tiny_policy(family, unfrozen, num_value_layers_unfrozen=value_layers)
    rows = np.arange(prompts.tokens.shape[0]) if row_ids is None else np.asarray(row_ids)
    run = sampler(family, unfrozen, value_layers, **settings)
    return run(
        params, frozen, prompts, rows.astype(np.int32), knobs(temperature, top_p), jax.random.key(seed)
    )


def rescore(
    family: str,
    prompts: ModelInputs,
    completions: Completions,
    *,
    temperature: float = 1.0,
    unfrozen: int = -1,
) -> tuple[Sequences, Scored]:
    """The same rows in one pass, by a policy whose reference is a copy of it."""
    _, params, frozen, ref_params = tiny_policy(family, unfrozen)
    sequences = joined(prompts, completions, pad_token_id=PAD_ID)
    return sequences, scorer(family, unfrozen)(params, frozen, ref_params, sequences, np.float32(temperature))


@functools.cache
def table_sampler(**settings: Any) -> Generate:
    """Of the tabular policy, which compiles in a moment."""
    defaults = dict(max_new_tokens=4, eos_token_ids=(EOS,), pad_token_id=0)
    return jax.jit(make_generate(tabular_policy(), **(defaults | settings)))


def table(transitions: dict[int, int]) -> tuple[Any, Any]:
    """(params, frozen) of a certain walk: from token `a` to token `transitions[a]`; other tokens stay put."""
    kernel = np.full((VOCAB, VOCAB), -40.0, np.float32)
    for token in range(VOCAB):
        kernel[token, transitions.get(token, token)] = 40.0
    return tabled(kernel)


def tabled(kernel: Any) -> tuple[Any, Any]:
    """(params, frozen) of a policy with these logits by last token."""
    params = {"table": {"kernel": np.float32(kernel)}, "v_head": {"kernel": np.zeros(VOCAB, np.float32)}}
    return params, {"bias": np.zeros(VOCAB, np.float32)}


def prompts_ending_in(last: Any, width: int = 2) -> ModelInputs:
    """One prompt a row, left-padded: a single token."""
    tokens = np.zeros((len(last), width), np.int32)
    tokens[:, -1] = last
    return ModelInputs(
        jnp.asarray(tokens), jnp.asarray(np.arange(width) == width - 1)[None].repeat(len(last), 0)
    )


def walk(
    parameters: tuple[Any, Any],
    prompts: ModelInputs,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    **settings: Any,
) -> Completions:
    """Completions of a tabular policy."""
    rows = np.arange(prompts.tokens.shape[0], dtype=np.int32)
    run = table_sampler(**settings)
    return run(*parameters, prompts, rows, knobs(temperature, top_p), jax.random.key(seed))
