# SPDX-License-Identifier: Apache-2.0
"""Scoring of whole rows: log-probabilities and values of the policy, log-probabilities of the reference."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Array, Float

from jrl.ops.forward import window_features, window_kl, window_logprobs
from jrl.typing import Frozen, Params, PolicyFns, Scored, Sequences


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


def make_score(policy: PolicyFns, *, logprob_chunk_bytes: int, with_full_kl: bool = False) -> Score:
    """A scoring pass over completion windows; the caller jits it.

    Policy and reference share one pass of the frozen trunk; heads run on the window only. Whole rows are
    scored: a causal model's figures before the end of a completion do not depend on what comes after it.

    Args:
      policy: The model, with a value head.
      logprob_chunk_bytes: Most bytes of logits held at a time.
      with_full_kl: Whether to compute `Scored.full_kl`, which takes the logits of both models once more.
    Returns:
      `(params, frozen, ref_params, sequences, temperature) -> Scored`, unmasked: what stands at mask 0 is
      finite and means nothing.
    """

    def score(
        params: Params,
        frozen: Frozen,
        ref_params: Params,
        sequences: Sequences,
        temperature: Float[Array, ""],
    ) -> Scored:
        trunk = policy.trunk(frozen, sequences.inputs)
        features = window_features(policy, params, frozen, trunk, sequences)
        reference = window_features(policy, ref_params, frozen, trunk, sequences)

        def logprobs(weights: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
            return window_logprobs(
                policy,
                weights,
                frozen,
                hidden,
                sequences,
                temperature=temperature,
                chunk_bytes=logprob_chunk_bytes,
            ).logprobs

        return Scored(
            logprobs=logprobs(params, features.policy),
            ref_logprobs=logprobs(ref_params, reference.policy),
            values=policy.heads(params, features.value)["values"],
            full_kl=None
            if not with_full_kl
            else window_kl(
                policy,
                params,
                ref_params,
                frozen,
                features.policy,
                reference.policy,
                temperature=temperature,
                chunk_bytes=logprob_chunk_bytes,
            ),
        )

    return score
