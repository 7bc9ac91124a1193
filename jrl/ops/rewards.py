# SPDX-License-Identifier: Apache-2.0
"""Per-token rewards from scores.

The order is fixed: clip the scores (`clip_scores`) → scale them (`jrl.ops.moments`) → place them on the last
action (`place_scores`) → subtract the KL penalty (`penalize_kl`) → advantages (`jrl.ops.returns`) → whiten.
Clipping after the KL penalty would hide it; whitening before would rescale it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import Scalar, check_batch, check_float, check_mask, check_positive, check_same_shape
from jrl.ops.kl import kl_k1
from jrl.ops.masking import zero_masked


def clip_scores(scores: Float[Array, "*shape"], *, clip_range: Scalar) -> Float[Array, "*shape"]:
    """Scores limited to [−clip_range, clip_range]; per token where rewards are dense.

    Args:
      scores: One a completion, or one a token.
      clip_range: Largest absolute value, > 0.
    Returns:
      Of the shape of `scores`, in their unit.
    Raises:
      ValueError: If `clip_range` is not positive.
    Reference: none; plain arithmetic.
    Example:
      >>> clip_scores(jnp.array([-3.0, 0.5]), clip_range=1.0).tolist()
      [-1.0, 0.5]
    """
    check_float("scores", scores)
    check_positive("clip_range", clip_range)
    return jnp.clip(scores, -clip_range, clip_range)


def missing_eos_penalty(
    scores: Float[Array, "B"], terminated: Bool[Array, "B"], *, penalty: Scalar
) -> Float[Array, "B"]:
    """Scores minus `penalty` (>= 0) for completions that the length limit cut before they ended.

    Args:
      scores: One a completion.
      terminated: True where a completion ended by itself.
      penalty: >= 0, in units of the score.
    Returns:
      One a completion, in units of the score.
    Reference: Huang et al. 2024, arXiv:2403.17031, detail 3 ("EOS trick").
    Example:
      >>> missing_eos_penalty(jnp.array([1.0, 1.0]), jnp.array([True, False]), penalty=2.0).tolist()
      [1.0, -1.0]
    """
    check_batch(terminated, name="terminated", scores=scores)
    return jnp.where(terminated, scores, scores - penalty)


def overlong_penalty(lengths: Int[Array, "B"], *, max_length: int, buffer_length: int) -> Float[Array, "B"]:
    """Term added to the score of a long completion: 0, then a line down to −1, instead of a cliff at the limit.

        0 up to L − b;   (L − b − n)/b up to L;   −1 above

    Add it before a group's statistics, and not before asking whether the group's scores differ.

    Args:
      lengths: n, actions of each completion.
      max_length: L, from which on the penalty is whole.
      buffer_length: b, in [1, L]: tokens over which it grows.
    Returns:
      In [−1, 0], one a completion; multiply it by what a unit is worth.
    Raises:
      ValueError: If the buffer does not fit into the length.
    Reference: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 13; there 20,480 and 4,096.
    Example:
      >>> overlong_penalty(jnp.array([6, 8, 10, 12]), max_length=10, buffer_length=4).tolist()
      [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer_length <= max_length:
        raise ValueError(
            f"`buffer_length` must be in [1, max_length] = [1, {max_length}], got {buffer_length}."
        )
    room = (max_length - buffer_length) - lengths
    return jnp.clip(room.astype(jnp.float32) / buffer_length, -1.0, 0.0)


def last_token_scores(scores: Float[Array, "B L"], attention_mask: Bool[Array, "B L"]) -> Float[Array, "B"]:
    """Score at each row's last real token: a reward model's verdict on the row.

    Padding may stand on either side and be of any length. A row of mere padding gets 0.

    Args:
      scores: A reward model's output at each column.
      attention_mask: True on real tokens.
    Returns:
      One a row, in units of the score.
    Reference: none; plain indexing.
    Example:
      >>> mask = jnp.array([[True, True, False], [False, True, True]])
      >>> last_token_scores(jnp.array([[1.0, 2.0, 9.0], [9.0, 3.0, 4.0]]), mask).tolist()
      [2.0, 4.0]
    """
    check_batch(attention_mask, name="attention_mask", scores=scores)
    real_from_here = jnp.cumsum(attention_mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
    return jnp.sum(jnp.where(attention_mask & (real_from_here == 1), scores, 0.0), axis=1)


def calibrate_scores(
    scores: Float[Array, "B"], reference_scores: Float[Array, "N"], *, unit_variance: bool
) -> Float[Array, "B"]:
    """Scores shifted so that reference completions score 0 on average, and scaled to unit variance if asked.

    An uncentred score pays for mere existence: it acts as a bonus, or a fine, on every completion alike.

    Args:
      scores: To be shifted.
      reference_scores: Of completions of the reference policy, or of demonstrations; at least two to scale.
      unit_variance: Also divide by their standard deviation (ddof 1).
    Returns:
      One a completion: in units of the score, or of its deviation.
    Reference: Stiennon et al. 2020, arXiv:2009.01325: reference summaries score 0 on average.
    Example:
      >>> calibrate_scores(jnp.array([3.0]), jnp.array([1.0, 3.0]), unit_variance=False).tolist()
      [1.0]
    """
    check_float("scores", scores)
    check_float("reference_scores", reference_scores)
    centred = scores - jnp.mean(reference_scores)
    return centred / jnp.std(reference_scores, ddof=1) if unit_variance else centred


def place_scores(scores: Float[Array, "B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Puts each row's score on its last action (the EOS, or the token before the cut), 0 elsewhere.

    Args:
      scores: One number a completion.
      mask: True on actions, holes allowed. A row without any gets 0 everywhere.
    Returns:
      Rewards of the actions, before any KL penalty.
    Reference: none; plain indexing.
    Example:
      >>> place_scores(jnp.array([7.0]), jnp.array([[True, True, False]])).tolist()
      [[0.0, 7.0, 0.0]]
    """
    check_mask(mask)
    check_float("scores", scores)
    check_same_shape("scores", scores, "mask[:, 0]", mask[:, 0])
    actions_from_here = jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
    is_last = mask & (actions_from_here == 1)
    return jnp.where(is_last, scores[:, None], 0.0)


def penalize_kl(
    rewards: Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    kl_coef: Scalar,
) -> Float[Array, "B T"]:
    """Rewards of the actions, minus β·k1 on each one.

    Args:
      rewards: Rewards of the actions: scores already clipped, scaled and placed.
      logprobs: Under the policy that acted, in nats.
      ref_logprobs: Under the reference.
      mask: True on actions.
      kl_coef: β >= 0.
    Returns:
      Rewards; 0 where `mask` is False. A reward is data: the caller does not differentiate it.
    Reference: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    Example:
      >>> rewards, logprobs, ref_logprobs = jnp.array([[0.0, 1.0]]), jnp.full((1, 2), -1.0), jnp.array([[-1.5, -1.0]])
      >>> penalize_kl(rewards, logprobs, ref_logprobs, jnp.ones((1, 2), bool), kl_coef=0.5).tolist()
      [[-0.25, 1.0]]
    """
    check_batch(mask, rewards=rewards, logprobs=logprobs, ref_logprobs=ref_logprobs)
    penalty = kl_coef * kl_k1(zero_masked(logprobs, mask), zero_masked(ref_logprobs, mask))
    return zero_masked(rewards, mask) - penalty
