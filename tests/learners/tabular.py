# SPDX-License-Identifier: Apache-2.0
"""The smallest policy there is: a table of next-token logits by last token. It compiles in a moment."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.alignment import length_mask, window_states, window_targets
from jrl.ops.logprobs import logprobs_from_logits, take_targets
from jrl.typing import Features, ModelInputs, PolicyFns, Rollouts, Scored, Sequences

VOCAB = 8
EOS, START = 1, 2


def tabular_policy(vocab: int = VOCAB) -> PolicyFns:
    """Logits `one_hot(token) @ table + bias`, values `one_hot(token) @ v`; the trunk is the one-hot.

    Q values, where `params` hold such heads, are tables like that of the logits.
    """

    def trunk(frozen: Any, inputs: ModelInputs) -> jax.Array:
        del frozen
        return jax.nn.one_hot(inputs.tokens, vocab)

    def branch(params: Any, frozen: Any, trunk: Any, inputs: ModelInputs, dropout_key: Any) -> Features:
        del params, frozen, inputs
        assert dropout_key is None
        return Features(trunk, trunk)

    def logits(params: Any, frozen: Any, hidden: jax.Array) -> jax.Array:
        return hidden @ params["table"]["kernel"] + jnp.broadcast_to(
            frozen["bias"], (*hidden.shape[:-1], vocab)
        )

    def heads(params: Any, hidden: jax.Array, actions: jax.Array | None = None) -> dict[str, jax.Array]:
        found = {}
        if "v_head" in params:
            found["values"] = hidden @ params["v_head"]["kernel"]
        if "q_heads" in params:
            q_values = [hidden @ head["kernel"] for head in params["q_heads"].values()]
            found["q_values"] = jnp.stack(
                q_values if actions is None else [take_targets(values, actions) for values in q_values]
            )
        return found

    def decode(params: Any, frozen: Any, inputs: ModelInputs, cache: Any) -> tuple[Features, Any]:
        return branch(params, frozen, trunk(frozen, inputs), inputs, None), cache

    return PolicyFns(
        trunk, branch, logits, heads, lambda params, frozen, prompts, length: jnp.zeros(()), decode
    )


def tabular_params(vocab: int = VOCAB, seed: int | None = None) -> tuple[Any, Any]:
    """(params, frozen): the uniform policy, or a random one."""
    kernel, values = np.zeros((vocab, vocab)), np.zeros(vocab)
    if seed is not None:
        rng = np.random.default_rng(seed)
        kernel, values = rng.normal(size=(vocab, vocab)), rng.normal(size=vocab)
    params = {
        "table": {"kernel": jnp.asarray(kernel, jnp.float32)},
        "v_head": {"kernel": jnp.asarray(values, jnp.float32)},
    }
    return params, {"bias": jnp.zeros(vocab)}


def tabular_sequences(tokens: Any, lengths: Any) -> Sequences:
    """Completions behind the prompt [START]."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    num_rows, width = tokens.shape
    rows = jnp.concatenate([jnp.full((num_rows, 1), START), tokens], axis=1)
    inputs = ModelInputs(rows, length_mask(lengths + 1, width=width + 1))
    return Sequences(inputs, jnp.zeros(num_rows, jnp.int32), length_mask(lengths, width=width))


def tabular_rollouts(
    params: Any, frozen: Any, key: jax.Array, *, num_rows: int = 16, width: int = 4
) -> tuple[Sequences, Scored]:
    """Completions sampled from the table, ended by EOS or the width; the reference is the uniform policy."""
    table = params["table"]["kernel"] + jnp.broadcast_to(frozen["bias"], params["table"]["kernel"].shape)

    def step(last: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jax.random.categorical(key, table[last])
        return token, token

    start = jnp.full((num_rows,), START)
    _, tokens = jax.lax.scan(step, start, jax.random.split(key, width))
    tokens = tokens.T
    ended = tokens == EOS
    lengths = jnp.where(ended.any(axis=1), jnp.argmax(ended, axis=1) + 1, width)
    sequences = tabular_sequences(tokens, lengths)
    return sequences, tabular_scored(params, frozen, sequences)


def tabular_scored(params: Any, frozen: Any, sequences: Sequences) -> Scored:
    """Log-probabilities and values under `params`; the reference is the uniform policy."""
    policy = tabular_policy(params["v_head"]["kernel"].shape[0])
    width = sequences.mask.shape[1]
    hidden = window_states(policy.trunk(frozen, sequences.inputs), sequences.starts, width=width)
    targets = window_targets(sequences.inputs.tokens, sequences.starts, width=width)
    logits = policy.logits(params, frozen, hidden)
    uniform = jnp.full(targets.shape, -jnp.log(logits.shape[-1]))
    return Scored(logprobs_from_logits(logits, targets), uniform, policy.heads(params, hidden)["values"])


def tabular_batch(
    params: Any, frozen: Any, key: jax.Array, *, num_rows: int = 16, width: int = 4, seed: int = 0
) -> Rollouts:
    """Rollouts with random scores on the last tokens."""
    sequences, scored = tabular_rollouts(params, frozen, key, num_rows=num_rows, width=width)
    last = jnp.sum(sequences.mask, axis=1) - 1
    scores = np.random.default_rng(seed).normal(size=num_rows)
    return Rollouts(sequences, scored, jnp.asarray(np.eye(width)[last] * scores[:, None], jnp.float32))
