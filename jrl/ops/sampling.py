# SPDX-License-Identifier: Apache-2.0
"""Logit processors and the draw itself.

A processor is `(logits, context) -> logits`; a sampler is a tuple of them. The draw inverts the distribution
function at one uniform number a row: which id comes out depends on that row's logits and number alone, so
neither neighbours nor sharding can change it, and a token costs one random number a row instead of V.

Reference: none, unless a function names one; plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_positive
from jrl.ops.logprobs import logprobs_from_logits
from jrl.ops.masking import at_least_float32


class SamplingContext(NamedTuple):
    """Inputs of a logit processor besides the logits.

    Attributes:
      num_sampled: Tokens that were sampled so far, one number for every row or a column (B 1).
      seen: True for ids that occur in the row so far, its prompt included; None unless a processor reads it.
      temperature: Divides the logits.
      top_p: Mass of the nucleus; None: all tokens are kept.
      last_tokens: The last token of each row, its prompt included; None unless a processor reads it.
      forbidden: True where the column's token may not follow the row's; None: all may.
      advantages: Q − V of every action, by which ILQL steers; None: no steering.
      beta: Weight of the advantages; goes with them.
    """

    num_sampled: Int[Array, ""] | Int[Array, "B 1"]
    seen: Bool[Array, "B V"] | None
    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None
    last_tokens: Int[Array, "B"] | None = None
    forbidden: Bool[Array, "W W"] | None = None
    advantages: Float[Array, "B V"] | None = None
    beta: Float[Array, ""] | None = None


Processor = Callable[[Float[Array, "B V"], SamplingContext], Float[Array, "B V"]]


def apply_temperature(logits: Float[Array, "B V"], temperature: Float[Array, ""]) -> Float[Array, "B V"]:
    """Logits divided by the temperature.

    Args:
      logits: Processed so far.
      temperature: > 0; below 1 sharpens the distribution.
    Returns:
      Logits, not normalised.
    Example:
      >>> apply_temperature(jnp.array([[1.0, 2.0]]), jnp.array(0.5)).tolist()
      [[2.0, 4.0]]
    """
    return logits / temperature


def keep_top_k(logits: Float[Array, "B V"], *, k: int) -> Float[Array, "B V"]:
    """−inf outside the k largest logits; all that tie with the k-th stay.

    Args:
      logits: Processed so far.
      k: Static; V or more keeps all.
    Returns:
      Logits, with −inf in the place of those that are left out.
    Raises:
      ValueError: If k is not positive.
    Reference: Fan et al. 2018, "Hierarchical neural story generation", arXiv:1805.04833.
    Example:
      >>> keep_top_k(jnp.array([[1.0, 3.0, 2.0]]), k=2).tolist()
      [[-inf, 3.0, 2.0]]
    """
    check_positive("k", k)
    if k >= logits.shape[-1]:
        return logits
    return _from(_least_kept(logits, lambda larger: jnp.sum(larger, axis=-1, keepdims=True) < k), logits)


def keep_top_p(logits: Float[Array, "B V"], top_p: Float[Array, ""]) -> Float[Array, "B V"]:
    """−inf outside the nucleus: the smallest set of most probable tokens with at least `top_p` of the mass.

    The most probable token always stays, and so do ties with the least probable one kept. `top_p` may be
    traced; at 1 nothing is removed.

    Args:
      logits: Processed so far.
      top_p: Mass of the nucleus, in (0, 1].
    Returns:
      Logits, with −inf in the place of those that are left out.
    Reference: Holtzman et al. 2020, arXiv:1904.09751, section 3.1.
    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
      >>> jnp.isneginf(keep_top_p(logits, jnp.array(0.6))).tolist()
      [[False, False, True]]
    """

    def least(exact: Float[Array, "B V"]) -> Float[Array, "B 1"]:
        weights = jnp.exp(exact - jnp.max(exact, axis=-1, keepdims=True))
        mass = top_p.astype(exact.dtype) * jnp.sum(weights, axis=-1, keepdims=True)
        return _least_kept(
            exact, lambda larger: jnp.sum(jnp.where(larger, weights, 0.0), axis=-1, keepdims=True) < mass
        )

    def none_left_out(exact: Float[Array, "B V"]) -> Float[Array, "B 1"]:
        return jnp.full((*exact.shape[:-1], 1), -jnp.inf, exact.dtype)

    # `top_p` is traced, so that a sweep compiles once; where all would be kept, nothing is searched at run time. What
    # leaves the branches is one number a row: logits that are split over devices would be gathered there.
    exact = at_least_float32(jax.lax.stop_gradient(logits))
    return _from(jax.lax.cond(top_p < 1.0, least, none_left_out, exact), logits)


def _from(least: Float[Array, "B 1"], logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """−inf below `least`; NaN stays."""
    return jnp.where(at_least_float32(logits) < least, -jnp.inf, logits)


def _least_kept(
    logits: Float[Array, "B V"], stays: Callable[[Bool[Array, "B V"]], Bool[Array, "B 1"]]
) -> Float[Array, "B 1"]:
    """The least float, at most the row's largest logit, that stays.

    The float is found by bisection over all floats, which takes as many rounds as they have bits: each reads the
    logits once, and neither orders nor moves any.

    Args:
      logits: Processed so far.
      stays: Answers for one float a row, given which logits are larger than it; once True, True for all larger floats.
    """
    exact = at_least_float32(jax.lax.stop_gradient(logits))
    bits = 8 * exact.dtype.itemsize
    whole = jnp.int64 if bits == 64 else jnp.int32

    # Without its sign a float's bits are ordered as the float is. Turned where it is negative, so are all of them.
    def turn(numbers: Int[Array, "B 1"]) -> Int[Array, "B 1"]:
        return jnp.where(numbers < 0, numbers ^ ((1 << (bits - 1)) - 1), numbers)

    def float_at(numbers: Int[Array, "B 1"]) -> Float[Array, "B 1"]:
        return jax.lax.bitcast_convert_type(turn(numbers), exact.dtype)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        at_middle = stays(exact > float_at(middle))
        return jnp.where(at_middle, low, middle + 1), jnp.where(at_middle, middle, high)

    largest = jnp.max(exact, axis=-1, keepdims=True)
    ends = (jax.lax.bitcast_convert_type(end, whole) for end in (jnp.full_like(largest, -jnp.inf), largest))
    low, high = (turn(end) for end in ends)
    _, least = jax.lax.fori_loop(0, bits, halve, (low, high))
    return float_at(least)


def forbid(logits: Float[Array, "B V"], token_ids: Sequence[int]) -> Float[Array, "B V"]:
    """−inf for the given ids.

    Args:
      logits: Processed so far.
      token_ids: Ids in [0, V).
    Returns:
      Logits, the others as they were.
    Example:
      >>> forbid(jnp.array([[1.0, 3.0, 2.0]]), [1]).tolist()
      [[1.0, -inf, 2.0]]
    """
    ids = jnp.arange(logits.shape[-1])
    forbidden = jnp.any(ids[None, :] == jnp.asarray(token_ids)[:, None], axis=0)
    return jnp.where(forbidden[None, :], -jnp.inf, logits)


def forbid_transitions(
    logits: Float[Array, "B V"], last_tokens: Int[Array, "B"], forbidden: Bool[Array, "W W"]
) -> Float[Array, "B V"]:
    """−inf for tokens that may not follow the last token of each row.

    Args:
      logits: Over the vocabulary of W tokens and its padding, V >= W.
      last_tokens: Ids in [0, W).
      forbidden: True where the column's token may not follow the row's. A row that forbids all leaves nothing to draw:
        it is for tokens that end a completion.
    Returns:
      Logits, the others as they were.
    Raises:
      ValueError: If the mask is not square, or wider than the logits.
    Example:
      >>> forbidden = jnp.array([[False, True], [True, False]])
      >>> forbid_transitions(jnp.zeros((1, 2)), jnp.array([1]), forbidden).tolist()
      [[-inf, 0.0]]
    """
    width, size = forbidden.shape[0], logits.shape[-1]
    if forbidden.shape != (width, width) or width > size:
        raise ValueError(
            f"`forbidden` must be square and no wider than the logits, {size} columns, got {forbidden.shape}."
        )
    # Columns of a padded vocabulary are −inf already.
    rows = jnp.pad(forbidden[last_tokens], ((0, 0), (0, size - width)))
    return jnp.where(rows, -jnp.inf, logits)


def best_advantages(q_values: Float[Array, "N B V"], values: Float[Array, "B"]) -> Float[Array, "B V"]:
    """min_i Q_i(s, a) − V(s) of every action, which ILQL adds to the logits; 0 where the vocabulary is padding.

    Args:
      q_values: Of every head; −inf in columns of a padded vocabulary.
      values: V(s).
    Returns:
      Q − V, in units of the return.
    Reference: Snell et al. 2022, arXiv:2206.11871, section 4.
    Example:
      >>> best_advantages(jnp.array([[[3.0, 1.0]], [[2.0, 4.0]]]), jnp.array([1.0])).tolist()
      [[1.0, 0.0]]
    """
    q_values = jnp.min(q_values, axis=0)
    # A padded column would give 0·(−inf) = NaN at β = 0; its logit is −inf whatever is added.
    return jnp.where(jnp.isneginf(q_values), 0.0, q_values - values[:, None])


def steer(
    logits: Float[Array, "B V"], advantages: Float[Array, "B V"], beta: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Logits + β·(Q − V), the decoding rule of ILQL. At β = 0 they are what they were, to the bit.

    Deviates from the paper: the logits stay unnormalised. The constant by which that moves a row changes neither order
    nor distribution, whatever the temperature, so filters and draw do the same.

    Args:
      logits: Processed so far.
      advantages: Q − V of every action.
      beta: β >= 0.
    Returns:
      Logits, not normalised.
    Reference: Snell et al. 2022, arXiv:2206.11871, section 4.
    Example:
      >>> steer(jnp.array([[0.5, 0.5]]), jnp.array([[1.0, -1.0]]), jnp.array(2.0)).tolist()
      [[2.5, -1.5]]
    """
    return logits + beta * advantages


def penalize_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], *, penalty: float
) -> Float[Array, "B V"]:
    """Divides positive and multiplies negative logits of ids that occurred already.

    Args:
      logits: Processed so far.
      seen: True for ids that occur in the row so far.
      penalty: > 0; above 1 makes repetition less likely.
    Returns:
      Logits, the others as they were.
    Raises:
      ValueError: If the penalty is not positive.
    Reference: Keskar et al. 2019, arXiv:1909.05858, section 4.1, in the sign-aware form of transformers.
    Example:
      >>> logits, seen = jnp.array([[2.0, -2.0, 1.0]]), jnp.array([[True, True, False]])
      >>> penalize_repetition(logits, seen, penalty=2.0).tolist()
      [[1.0, -4.0, 1.0]]
    """
    check_positive("penalty", penalty)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def make_processors(
    *,
    eos_token_ids: Sequence[int] = (),
    top_k: int = 0,
    min_new_tokens: int = 0,
    repetition_penalty: float = 1.0,
    suppress_token_ids: Sequence[int] = (),
) -> tuple[Processor, ...]:
    """Builds the logit processors that the settings call for.

    Penalties and forbidden tokens come first, then the steering by Q − V, then the temperature, then filters.

    Args:
      eos_token_ids: Ids that end a completion; read with `min_new_tokens` alone.
      top_k: Most probable tokens that are kept; 0 keeps all.
      min_new_tokens: Tokens before which no completion ends; 0: none.
      repetition_penalty: > 0; 1 is off.
      suppress_token_ids: Ids that are never sampled.
    Returns:
      Processors, to be applied one after the other.
    Example:
      >>> context = SamplingContext(jnp.array(0), None, temperature=jnp.array(1.0), top_p=jnp.array(1.0))
      >>> logits = jnp.array([[5.0, 3.0, 2.0]])
      >>> for processor in make_processors(top_k=1, suppress_token_ids=(0,)):
      ...     logits = processor(logits, context)
      >>> logits.tolist()
      [[-inf, 3.0, -inf]]
    """
    processors: list[Processor] = []
    if repetition_penalty != 1.0:

        def repetition(logits: Float[Array, "B V"], context: SamplingContext) -> Float[Array, "B V"]:
            assert context.seen is not None
            return penalize_repetition(logits, context.seen, penalty=repetition_penalty)

        processors.append(repetition)
    if suppress_token_ids:
        processors.append(lambda logits, context: forbid(logits, suppress_token_ids))
    if min_new_tokens > 0 and eos_token_ids:
        processors.append(
            lambda logits, context: jnp.where(
                context.num_sampled < min_new_tokens, forbid(logits, eos_token_ids), logits
            )
        )
    processors += [_forbid_transitions, _steer]
    processors.append(lambda logits, context: apply_temperature(logits, context.temperature))
    if top_k > 0:
        processors.append(lambda logits, context: keep_top_k(logits, k=top_k))

    processors.append(_keep_top_p)
    return tuple(processors)


def _forbid_transitions(logits: Float[Array, "B V"], context: SamplingContext) -> Float[Array, "B V"]:
    if context.forbidden is None:
        return logits
    assert context.last_tokens is not None
    return forbid_transitions(logits, context.last_tokens, context.forbidden)


def _keep_top_p(logits: Float[Array, "B V"], context: SamplingContext) -> Float[Array, "B V"]:
    return logits if context.top_p is None else keep_top_p(logits, context.top_p)


def _steer(logits: Float[Array, "B V"], context: SamplingContext) -> Float[Array, "B V"]:
    if context.advantages is None:
        return logits
    assert context.beta is not None
    return steer(logits, context.advantages, context.beta)


def inverse_cdf(logits: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The id at which the distribution function passes `uniform`, for each row.

    Two levels: sums of about √V blocks find the block, a running sum inside it finds the id. A token without
    probability is never returned, whatever rounding does. Probabilities are met to about 2⁻²³, the spacing of
    float32 uniforms.

    Args:
      logits: At least one finite entry a row; −inf excludes.
      uniform: In [0, 1), one a row.
    Returns:
      Sampled ids, (B,) int32.
    Example:
      >>> inverse_cdf(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([0.6])).tolist()
      [1]
    """
    return _invert(logits, uniform)[0]


def _invert(
    logits: Float[Array, "B V"], uniform: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Ids of `inverse_cdf` with the log-probability of each: the sums hold its normaliser already."""
    rows, size = logits.shape
    width = _block_width(size)
    blocks = -(-size // width)
    logits = at_least_float32(logits)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    grid = jnp.pad(weights, ((0, 0), (0, blocks * width - size))).reshape(rows, blocks, width)
    outer = _pass(jnp.sum(grid, axis=-1), uniform)
    inside = jnp.take_along_axis(grid, outer.column[:, None, None], axis=1)[:, 0]
    inner = _pass(inside, outer.rest)
    tokens = (outer.column * width + inner.column).astype(jnp.int32)
    return tokens, jnp.log(inner.weight) - jnp.log(outer.total)


def _block_width(size: int) -> int:
    """About √size, and a divisor of it where there is one: then nothing is padded, which would copy all weights."""
    root = max(1, math.isqrt(size))
    return next((width for width in range(root, root // 2, -1) if size % width == 0), root)


class _Passed(NamedTuple):
    """Column in which a running sum of weights passes a share of their total.

    Attributes:
      column: The first that does.
      rest: How far into it, in [0, 1].
      weight: Its own.
      total: Of all.
    """

    column: Int[Array, "B"]
    rest: Float[Array, "B"]
    weight: Float[Array, "B"]
    total: Float[Array, "B"]


def _pass(weights: Float[Array, "B C"], uniform: Float[Array, "B"]) -> _Passed:
    """Finds the column where the running sum passes `uniform` of the total."""
    sums = jnp.cumsum(weights, axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    # A column without weight is never taken, though the rounding of a parallel sum may let it pass first.
    passed = (sums > target) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    column = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)
    here = jnp.take_along_axis(weights, column[:, None], axis=-1)[:, 0]
    before = jnp.take_along_axis(sums, column[:, None], axis=-1)[:, 0] - here
    return _Passed(column, jnp.clip((target[:, 0] - before) / here, 0.0, 1.0), here, sums[:, -1])


def draw(
    logits: Float[Array, "B V"], uniform: Float[Array, "B"] | None
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Samples an id, or takes the most probable one without random numbers, with its log-probability in nats.

    Args:
      logits: Processed: temperature and filters applied.
      uniform: One number in [0, 1) a row; None is greedy.
    Returns:
      Ids and their log-probabilities under the processed distribution.
    Example:
      >>> tokens, logprobs = draw(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), None)
      >>> tokens.tolist(), round(float(logprobs[0]), 4)
      ([0], -0.6931)
    """
    if uniform is not None:
        return _invert(logits, uniform)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, logprobs_from_logits(logits, tokens)
