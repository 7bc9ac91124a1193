# SPDX-License-Identifier: Apache-2.0
"""Scoring of whole rows: log-probabilities and values of the policy, log-probabilities of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from jaxtyping import Array, Float

from jrl.forward import Reader
from jrl.typing import Frozen, Params, PolicyFns, Scored, Sequences


class Score(Protocol):
    """A scoring pass."""

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params | None,
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
      policy: The model.
      logprob_chunk_bytes: Most bytes of logits held at a time.
      with_full_kl: Whether to compute `Scored.full_kl`, which takes the logits of both models once more.
    Returns:
      `(params, frozen, ref_params, sequences, temperature) -> Scored`, unmasked: what stands at mask 0 is
      finite and means nothing. Without a reference (None) nothing is said of one, without a value head no values.
    """
    reader = Reader(policy, chunk_bytes=logprob_chunk_bytes)

    def score(
        params: Params,
        frozen: Frozen,
        ref_params: Params | None,
        sequences: Sequences,
        temperature: Float[Array, ""],
    ) -> Scored:
        read = replace(reader, temperature=temperature)
        trunk = read.trunk_of(frozen, sequences)
        now = read(params, frozen, sequences, trunk=trunk)
        if ref_params is None:
            return Scored(now.logprobs, None, now.values)
        return Scored(
            logprobs=now.logprobs,
            ref_logprobs=read(ref_params, frozen, sequences, trunk=trunk).logprobs,
            values=now.values,
            full_kl=read.kl(params, ref_params, frozen, sequences, trunk=trunk) if with_full_kl else None,
        )

    return score
