# SPDX-License-Identifier: Apache-2.0
"""Scoring of whole rows: log-probabilities and values of the policy, log-probabilities of the reference."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jrl.ops.alignment import window_states, window_targets
from jrl.ops.logprobs import token_logprobs
from jrl.typing import Features, Frozen, Params, PolicyFns, Scored, Sequences


class Score(Protocol):
    """A scoring pass."""

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params,
        sequences: Sequences,
        temperature: Float[Array, ""],
    ) -> Scored:
        """Scores the completion window of every row."""
        ...


def make_score(policy: PolicyFns, *, logprob_chunk_bytes: int) -> Score:
    """A scoring pass over completion windows; the caller jits it.

    Policy and reference share one pass of the frozen trunk; heads run on the window only. Whole rows are
    scored: a causal model's figures before the end of a completion do not depend on what comes after it.

    Args:
      policy: The model, with a value head.
      logprob_chunk_bytes: Most bytes of logits held at a time.
    Returns:
      `(params, frozen, ref_params, sequences, temperature) -> Scored`, unmasked: what stands at mask 0 is
      finite and means nothing.
    """

    def logprobs(
        params: Params, frozen: Frozen, hidden: jax.Array, sequences: Sequences, temperature: jax.Array
    ) -> jax.Array:
        width = sequences.mask.shape[1]
        logits_fn = partial(policy.logits, params, frozen)
        return token_logprobs(
            logits_fn,
            window_states(hidden, sequences.starts, width=width),
            window_targets(sequences.inputs.tokens, sequences.starts, width=width),
            temperature=temperature,
            chunk_bytes=logprob_chunk_bytes,
            vocab_size=jax.eval_shape(logits_fn, hidden[:, 0]).shape[-1],
        ).logprobs

    def score(
        params: Params,
        frozen: Frozen,
        ref_params: Params,
        sequences: Sequences,
        temperature: Float[Array, ""],
    ) -> Scored:
        trunk = policy.trunk(frozen, sequences.inputs)
        features: Features = policy.branch(params, frozen, trunk, sequences.inputs, None)
        reference: Features = policy.branch(ref_params, frozen, trunk, sequences.inputs, None)
        states = window_states(features.value, sequences.starts, width=sequences.mask.shape[1])
        return Scored(
            logprobs=logprobs(params, frozen, features.policy, sequences, temperature),
            ref_logprobs=logprobs(ref_params, frozen, reference.policy, sequences, temperature),
            values=policy.heads(params, states)["values"],
        )

    return score
