# SPDX-License-Identifier: Apache-2.0
"""Stored rollouts for learner tests: random completions of ragged length, scored by the policy itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.forward import window_features, window_logprobs
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.ops.alignment import join, window_columns
from jrl.ops.rewards import place_scores
from jrl.typing import (
    ComparisonBatch,
    Completions,
    ILQLBatch,
    ModelInputs,
    PreferenceBatch,
    Rollouts,
    Scored,
    Sequences,
)
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_contexts, tiny_policy, tiny_prompts

PADDED_VOCAB = 128
CHUNK_BYTES = 1 << 28


def sgd(lr: float = 0.1, max_grad_norm: float | None = None) -> optax.GradientTransformation:
    """Plain gradient descent, so that parameters show gradients."""
    return make_optimizer("sgd", {"lr": lr}, make_schedule("constant", {}), max_grad_norm=max_grad_norm)


def adam(lr: float = 1e-3, **kwargs: Any) -> optax.GradientTransformation:
    """AdamW without decay."""
    arguments = {"lr": lr, "weight_decay": 0.0, **kwargs}
    return make_optimizer("adamw", arguments, make_schedule("constant", {}), max_grad_norm=None)


def copied(tree: Any) -> Any:
    """Buffers of its own, fit to be donated."""
    return jax.tree.map(jnp.copy, tree)


def random_sequences(
    num_rows: int = 8,
    prompt: int = 6,
    width: int = 5,
    seed: int = 0,
    *,
    family: str = "gpt2",
    prompt_seed: int | None = None,
) -> Sequences:
    """Ragged prompts with ragged random completions, the last token of each an EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, size=num_rows)
    tokens = rng.integers(2, VOCAB_SIZE, size=(num_rows, width))
    tokens[np.arange(num_rows), lengths - 1] = EOS_ID
    tokens = np.where(np.arange(width)[None, :] < lengths[:, None], tokens, PAD_ID)
    completions = Completions(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        terminated=jnp.ones(num_rows, bool),
        logprobs=jnp.zeros((num_rows, width)),
    )
    make_prompts = tiny_contexts if family == "t5" else tiny_prompts
    prompts = make_prompts(num_rows, prompt, seed=seed if prompt_seed is None else prompt_seed)
    return join(prompts, completions, pad_token_id=PAD_ID)


def random_preferences(
    num_rows: int = 8, seed: int = 0, *, family: str = "gpt2", copies: int = 0
) -> PreferenceBatch:
    """Pairs of ragged completions of the same prompts, with a random reference; the last `copies` fill the batch up."""
    chosen = random_sequences(num_rows, seed=seed, family=family)
    rejected = random_sequences(num_rows, seed=seed + 100, family=family, prompt_seed=seed)
    rng = np.random.default_rng(seed + 1)
    ref = [
        jnp.where(side.mask, -4.5 + jnp.asarray(rng.normal(size=side.mask.shape), jnp.float32), 0.0)
        for side in (chosen, rejected)
    ]
    return PreferenceBatch(chosen, rejected, jnp.arange(num_rows) < num_rows - copies, *ref)


def rewarded_samples(num_rows: int = 8, seed: int = 0, *, family: str = "gpt2") -> ILQLBatch:
    """The same completions as actions of offline samples, with a random reward on the last token of each."""
    inputs, starts, mask = random_sequences(num_rows, seed=seed, family=family)
    columns = window_columns(starts, width=mask.shape[1], length=inputs.tokens.shape[1])
    rewards = jnp.asarray(np.random.default_rng(seed + 1).normal(size=num_rows), jnp.float32)
    return ILQLBatch(inputs, jnp.where(mask, columns, 0), mask, place_scores(rewards, mask))


def random_comparisons(num_pairs: int = 8, width: int = 8, seed: int = 0) -> ComparisonBatch:
    """Ragged random texts with margins; the last pair only fills the batch up."""
    rng = np.random.default_rng(seed)

    def texts() -> ModelInputs:
        lengths = rng.integers(1, width + 1, size=num_pairs)
        mask = np.arange(width)[None, :] < lengths[:, None]
        tokens = np.where(mask, rng.integers(2, VOCAB_SIZE, size=(num_pairs, width)), PAD_ID)
        return ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))

    margins = jnp.asarray(rng.normal(size=num_pairs), jnp.float32)
    return ComparisonBatch(texts(), texts(), jnp.arange(num_pairs) < num_pairs - 1, margins)


@functools.cache
def scorer(family: str, num_layers_unfrozen: int, temperature: float) -> Any:
    """Compiled scoring of sequences by a policy: (log-probabilities, values)."""
    policy, *_ = tiny_policy(family, num_layers_unfrozen)

    @jax.jit
    def score(params: Any, frozen: Any, sequences: Sequences) -> tuple[jax.Array, jax.Array]:
        trunk = policy.trunk(frozen, sequences.inputs)
        features = window_features(policy, params, frozen, trunk, sequences)
        scored = window_logprobs(
            policy,
            params,
            frozen,
            features.policy,
            sequences,
            temperature=temperature,
            chunk_bytes=CHUNK_BYTES,
            with_entropy=False,
        )
        return scored.logprobs, policy.heads(params, features.value)["values"]

    return score


def stored_rollouts(
    family: str = "gpt2",
    num_layers_unfrozen: int = -1,
    *,
    num_rows: int = 8,
    seed: int = 0,
    temperature: float = 1.0,
    drift: float = 0.0,
) -> Rollouts:
    """Rollouts with random scores on their last tokens.

    Args:
      family: Of the tiny policy that scores them.
      num_layers_unfrozen: Of that policy.
      num_rows: N.
      seed: Of tokens and scores.
      temperature: Of the log-probabilities.
      drift: How far the reference's log-probabilities and the values are moved off those of the policy.
    """
    _, params, frozen, _ = tiny_policy(family, num_layers_unfrozen)
    sequences = random_sequences(num_rows, seed=seed, family=family)
    logprobs, values = scorer(family, num_layers_unfrozen, temperature)(params, frozen, sequences)
    rng = np.random.default_rng(seed + 1)
    noise = jnp.asarray(rng.normal(size=(2, *logprobs.shape)) * drift, jnp.float32)
    scores = place_scores(jnp.asarray(rng.normal(size=num_rows), jnp.float32), sequences.mask)
    return Rollouts(sequences, Scored(logprobs, logprobs + noise[0], values + noise[1]), scores)
