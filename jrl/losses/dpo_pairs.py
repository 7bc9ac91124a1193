# SPDX-License-Identifier: Apache-2.0
"""Numbers of preference pairs from log-probabilities of tokens: sums, log-ratios, scores, weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.losses.dpo_divergence import DIVERGENCES, Divergence
from jrl.ops.checks import Scalar, check_batch, check_same_floats, check_same_shape
from jrl.ops.masking import masked_mean, masked_sum, zero_masked


class Completion(NamedTuple):
    """The chosen or the rejected completions of a batch of pairs, by token. Only `logprobs` takes a gradient.

    Attributes:
      logprobs: log π_θ of the tokens, in nats.
      ref_logprobs: log π_ref of the same.
      entropy: Of the policy at each token, in nats.
      collision: log Σ_v π_θ(v)²: the expected log-probability of a match, by which WPO aligns rows.
      mean_logits: Mean of the policy's logits over the vocabulary.
      is_top: True where no token is more probable than the completion's own.
      mask: True on the completion's tokens. Elsewhere nothing is read, so NaN may stand there.
    """

    logprobs: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    collision: Float[Array, "B T"]
    mean_logits: Float[Array, "B T"]
    is_top: Bool[Array, "B T"]
    mask: Bool[Array, "B T"]


class Pairs(NamedTuple):
    """A batch of pairs as losses read it: y⁺ is the chosen completion, y⁻ the rejected one.

    Attributes:
      chosen: log π(y⁺|x), summed over tokens, in nats; under `ld_alpha`, tokens beyond the shorter one weigh less.
      rejected: log π(y⁻|x), likewise.
      ref_chosen: log π_ref(y⁺|x), likewise.
      ref_rejected: log π_ref(y⁻|x), likewise.
      chosen_scores: f′(π/π_ref) of y⁺; the log-ratio under the reverse KL.
      rejected_scores: The same of y⁻.
      chosen_lengths: Tokens of y⁺, at least 1.
      rejected_lengths: Tokens of y⁻, at least 1.
      chosen_nll: −log π(y⁺|x), every token weighing 1.
      pairs_per_token: Pairs over chosen tokens, both of the whole optimizer batch.
      valid: False on copies that only fill the batch up.
    Example:
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))
      >>> pairs.chosen_ratios.tolist(), pairs.rejected_ratios.tolist(), pairs.margins.tolist()
      ([1.0], [-1.0], [2.0])
    """

    chosen: Float[Array, "B"]
    rejected: Float[Array, "B"]
    ref_chosen: Float[Array, "B"]
    ref_rejected: Float[Array, "B"]
    chosen_scores: Float[Array, "B"]
    rejected_scores: Float[Array, "B"]
    chosen_lengths: Float[Array, "B"]
    rejected_lengths: Float[Array, "B"]
    chosen_nll: Float[Array, "B"]
    pairs_per_token: Float[Array, ""]
    valid: Bool[Array, "B"]

    @property
    def chosen_ratios(self) -> Float[Array, "B"]:
        """Δ⁺ = log π/π_ref of y⁺; β times it is the implicit reward."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Float[Array, "B"]:
        """Δ⁻ = log π/π_ref of y⁻."""
        return self.rejected - self.ref_rejected

    @property
    def margins(self) -> Float[Array, "B"]:
        """δ = f′ of y⁺ − f′ of y⁻, which most losses increase."""
        return self.chosen_scores - self.rejected_scores


def pairs_from_logprobs(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    ref_chosen: Float[Array, "B"],
    ref_rejected: Float[Array, "B"],
    *,
    divergence: Divergence = DIVERGENCES["reverse_kl"],
    alpha: Scalar = 1.0,
) -> Pairs:
    """Pairs of which only the completions' log-probabilities are known; each completion counts as one token.

    Args:
      chosen: log π(y⁺|x), in nats.
      rejected: log π(y⁻|x), in nats.
      ref_chosen: log π_ref(y⁺|x), in nats.
      ref_rejected: log π_ref(y⁻|x), in nats.
      divergence: Makes scores of log-ratios; by default they are the log-ratios.
      alpha: α of the α-divergence, other than 1; other divergences do not read it.
    Returns:
      Pairs, all of them valid.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If one is not of a float dtype.
    Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; divergences: Wang et al. 2023, arXiv:2309.16240.
    Example:
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))
      >>> pairs.margins.tolist()  # (−1 + 2) − (−3 + 2)
      [2.0]
    """
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    for name, array in zip(names, (chosen, rejected, ref_chosen, ref_rejected), strict=True):
        check_same_floats(name, array, "chosen", chosen)
    one = jnp.ones_like(chosen)
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_scores=divergence(chosen - ref_chosen, alpha=alpha),
        rejected_scores=divergence(rejected - ref_rejected, alpha=alpha),
        chosen_lengths=one,
        rejected_lengths=one,
        chosen_nll=-chosen,
        pairs_per_token=jnp.ones(()),
        valid=one > 0,
    )


def completion_logprobs(
    logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    shared_lengths: Int[Array, "B"] | None = None,
    ld_alpha: Scalar = 1.0,
) -> Float[Array, "B"]:
    """log π(y|x): the sum over the completion's tokens, never their mean.

    With `shared_lengths` it is Σ_{t ≤ l} log π(a_t) + α·Σ_{t > l} log π(a_t), l the length of the shorter
    completion of the pair: what a completion gains by mere length then counts less (LD-DPO).

    Args:
      logprobs: Log-probabilities of the tokens, in nats.
      mask: True on the completion's tokens; only they are counted.
      shared_lengths: l; None: every token weighs 1.
      ld_alpha: α in [0, 1].
    Returns:
      At most 0, one a completion, in nats.
    Reference: Liu et al. 2024, arXiv:2409.06411.
    Example:
      >>> mask = jnp.array([[False, True, True]])
      >>> completion_logprobs(jnp.array([[-9.0, -1.0, -2.0]]), mask).tolist()
      [-3.0]
      >>> shared = jnp.array([1])
      >>> completion_logprobs(jnp.array([[-9.0, -1.0, -2.0]]), mask, shared_lengths=shared, ld_alpha=0.5).tolist()
      [-2.0]
    """
    check_batch(mask, logprobs=logprobs)
    if shared_lengths is None:
        return masked_sum(logprobs, mask, axis=1)
    shared = jnp.cumsum(mask, axis=1, dtype=jnp.int32) <= shared_lengths[:, None]
    return masked_sum(logprobs, mask & shared, axis=1) + ld_alpha * masked_sum(
        logprobs, mask & ~shared, axis=1
    )


def make_pairs(
    chosen: Completion,
    rejected: Completion,
    valid: Bool[Array, "B"],
    *,
    divergence: Divergence,
    alpha: Scalar,
    ld_alpha: Scalar | None,
    pairs_per_token: Float[Array, ""],
) -> Pairs:
    """Sums the tokens of both sides of each pair, and takes their log-ratios.

    Args:
      chosen: y⁺ of each pair.
      rejected: y⁻ of each pair.
      valid: False on copies.
      divergence: Makes scores of log-ratios.
      alpha: α of the α-divergence, other than 1; other divergences do not read it.
      ld_alpha: Weight, in [0, 1], of tokens beyond the shorter completion; None: 1.
      pairs_per_token: Of the whole optimizer batch.
    Returns:
      Sums and log-ratios, one a pair, in nats.
    Raises:
      ValueError: If shapes differ.
    Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; divergences: Wang et al. 2023, arXiv:2309.16240.
    Example:
      >>> zero = jnp.zeros((1, 2))
      >>> rejected = Completion(zero, zero, zero, zero, zero, is_top=zero > 0, mask=zero == 0)
      >>> chosen = rejected._replace(logprobs=zero - 1.0, ref_logprobs=zero - 1.5)
      >>> options = {"divergence": Divergence(lambda log_ratios: log_ratios), "alpha": 1.0, "ld_alpha": None}
      >>> pairs = make_pairs(chosen, rejected, jnp.ones(1, bool), **options, pairs_per_token=jnp.array(0.5))
      >>> pairs.chosen.tolist(), pairs.margins.tolist()
      ([-2.0], [1.0])
    """
    check_same_shape("rejected.mask", rejected.mask, "chosen.mask", chosen.mask)
    _check_sides(chosen, rejected)
    lengths = [jnp.sum(side.mask, axis=1, dtype=jnp.int32) for side in (chosen, rejected)]
    shared = None if ld_alpha is None else jnp.minimum(*lengths)
    weight = 1.0 if ld_alpha is None else ld_alpha

    def total(logprobs: Float[Array, "B T"], side: Completion) -> Float[Array, "B"]:
        return completion_logprobs(logprobs, side.mask, shared_lengths=shared, ld_alpha=weight)

    now = [total(side.logprobs, side) for side in (chosen, rejected)]
    ref = [jax.lax.stop_gradient(total(side.ref_logprobs, side)) for side in (chosen, rejected)]
    counts = [jnp.maximum(length, 1).astype(now[0].dtype) for length in lengths]
    return Pairs(
        chosen=now[0],
        rejected=now[1],
        ref_chosen=ref[0],
        ref_rejected=ref[1],
        chosen_scores=divergence(now[0] - ref[0], alpha=alpha),
        rejected_scores=divergence(now[1] - ref[1], alpha=alpha),
        chosen_lengths=counts[0],
        rejected_lengths=counts[1],
        chosen_nll=-completion_logprobs(chosen.logprobs, chosen.mask),
        pairs_per_token=pairs_per_token,
        valid=valid,
    )


def pairs_per_chosen_token(mask: Bool[Array, "B T"], valid: Bool[Array, "B"]) -> Float[Array, ""]:
    """Pairs over chosen tokens: times it, a sum over these tokens is their mean, in a loss that is a sum over pairs.

    Args:
      mask: True on the tokens of the chosen completions.
      valid: False on copies, of which neither pair nor tokens count.
    Returns:
      Valid pairs over their chosen tokens; with no such token, their number.
    Reference: none; a count.
    Example:
      >>> mask = jnp.array([[True, True, True], [True, False, False]])
      >>> float(pairs_per_chosen_token(mask, jnp.array([True, True])))  # 2 pairs, 4 tokens
      0.5
    """
    num_tokens = jnp.sum(mask & valid[:, None], dtype=jnp.float32)
    return jnp.sum(valid, dtype=jnp.float32) / jnp.maximum(num_tokens, 1.0)


def wpo_weights(chosen: Completion, rejected: Completion) -> Float[Array, "B"]:
    """WPO's weights of pairs, w(y⁺)·w(y⁻): how typical each pair is of the present policy. No gradient.

        w(y) = exp( 1/|y| Σ_t [log π(a_t) − log Σ_v π(v)²] )

    A completion whose tokens are as probable as sampled ones are on average has w = 1.

    Args:
      chosen: y⁺ of each pair.
      rejected: y⁻ of each pair.
    Returns:
      Above 0, one a pair.
    Reference: Zhou et al. 2024, arXiv:2406.11827, eq. 2.
    Example:
      >>> zero = jnp.zeros((1, 2))
      >>> rejected = Completion(zero, zero, zero, zero, zero, is_top=zero > 0, mask=zero == 0)
      >>> chosen = rejected._replace(logprobs=zero - 2.0, collision=zero - 1.0)
      >>> round(float(wpo_weights(chosen, rejected)[0]), 4)  # e^(−2 + 1)
      0.3679
    """
    _check_sides(chosen, rejected)

    def log_weight(side: Completion) -> Float[Array, "B"]:
        return masked_mean(zero_masked(side.logprobs - side.collision, side.mask), side.mask, axis=1)

    return jax.lax.stop_gradient(jnp.exp(log_weight(chosen) + log_weight(rejected)))


def _check_sides(chosen: Completion, rejected: Completion) -> None:
    """Looks at all arrays of both sides but `is_top`, which is of claims."""
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        arrays = {
            f"{name}.{field}": x for field, x in side._asdict().items() if field not in ("mask", "is_top")
        }
        check_batch(side.mask, name=f"{name}.mask", **arrays)
