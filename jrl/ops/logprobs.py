# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of a categorical policy over a large vocabulary.

Everything is float32. The target is selected by comparing with an iota, not by a gather: under a vocabulary
sharded over devices a gather would fetch whole rows, and its transpose is a scatter, which is slow on
accelerators and not deterministic on GPUs. Columns of −inf (padded vocabulary, filtered tokens) carry neither
probability nor gradient.

Reference: none; textbook definitions, computed stably.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import (
    Scalar,
    check_float,
    check_integer,
    check_positive,
    check_same_floats,
    check_same_shape,
)
from jrl.ops.chunks import map_positions, positions_of
from jrl.ops.masking import at_least_float32

_LARGE_VOCABULARY = 2**13
"""Columns from which another form of the same number is worth it on a CPU."""
LogitsFn = Callable[[Float[Array, "*rows D"]], Float[Array, "*rows V"]]
"""The language-model head with its parameters bound: hidden states to float32 logits."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities, and entropies where asked for, of a window's targets.

    Attributes:
      logprobs: log π(a_t | s_t) of the targets, in nats.
      entropy: −Σ π log π over the whole vocabulary, in nats; None unless asked for.
    """

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"] | None


def _normalizer(logits: Float[Array, "*rows V"]) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """The largest logit m of a row and log Σ exp(logit − m): their sum is the row's log-sum-exp."""
    largest = jnp.max(logits, axis=-1)
    exponentials = jnp.exp(logits - largest[..., None])
    return largest, jnp.log(_sum_exponentials(exponentials))


def _sum_exponentials(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    if x.shape[-1] < _LARGE_VOCABULARY:
        return _sum_last(x)
    total: Array = jax.lax.platform_dependent(x, cpu=_sum_by_product, default=_sum_last)
    return total


def _sum_last(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    return jnp.sum(x, axis=-1)


def _sum_by_product(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """The sum on a CPU: XLA fuses what is summed into a sum, where exponentials take four times as long as alone.

    GPT-2's head with its loss, 8 rows of 48: 480 ms a step, so 445. Elsewhere a product might round its factors.
    """
    return x @ jnp.ones(x.shape[-1:], x.dtype)


def take_targets(x: Float[Array, "*rows V"], targets: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The entry of each target; 0 for an id outside [0, V).

    Args:
      x: One entry for each id.
      targets: Ids.
    Returns:
      Of the dtype of the array that is read, one for each target.
    Raises:
      ValueError: If the rows differ in shape.
    Example:
      >>> take_targets(jnp.array([[5.0, 6.0], [7.0, 8.0]]), jnp.array([1, 0])).tolist()
      [6.0, 7.0]
    """
    check_float("x", x)
    check_integer("targets", targets)
    check_same_shape("targets", targets, "x[..., 0]", x[..., 0])
    return jnp.sum(where_or_zero(_is_target(targets, x), x), axis=-1)


# JAX takes what does not depend on a piece of the vocabulary out of the loop over pieces when it derives the loop, and
# every piece then reads it from memory. So no constant may be as wide as a piece. Zeros are made of the mask; ids are
# numbered in a call that JAX takes as a whole.
def _is_target(targets: Int[Array, "*rows"], x: Float[Array, "*rows V"]) -> Bool[Array, "*rows V"]:
    return _one_hot(x.shape[-1])(targets)


@cache
def _one_hot(vocab_size: int) -> Callable[[Int[Array, "*rows"]], Bool[Array, "*rows V"]]:
    @jax.custom_batching.custom_vmap
    def one_hot(targets: Int[Array, "*rows"]) -> Bool[Array, "*rows V"]:
        ids = jax.lax.broadcasted_iota(targets.dtype, (*targets.shape, vocab_size), targets.ndim)
        return ids == targets[..., None]

    one_hot.def_vmap(lambda _, is_batched, targets: (one_hot(targets), is_batched[0]))
    return one_hot


def where_or_zero(mask: Bool[Array, "*rows V"], x: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """`x` where the mask is True, else 0, without an array of zeros that a loop over positions would hold.

    Args:
      mask: True where a value counts. It must depend on the position.
      x: Values.
    Returns:
      Of the shape and dtype of `x`.
    Example:
      >>> where_or_zero(jnp.array([True, False]), jnp.array([5.0, jnp.inf])).tolist()
      [5.0, 0.0]
    """
    return jnp.where(mask, x, mask.astype(x.dtype))


def logprobs_from_logits(
    logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Log-probability of each target under the softmax of its logits, in nats.

    Args:
      logits: Any float dtype; computed in float32. −inf excludes a token.
      targets: Ids in [0, V); an id outside selects nothing and gives 0.
    Returns:
      log softmax(logits)[target] <= 0; −inf for an excluded target.
    Raises:
      ValueError: If the rows differ in shape.
      TypeError: If `logits` are not of a float dtype, or `targets` not of an integer's.
    Example:
      >>> round(float(logprobs_from_logits(jnp.array([1.0, 2.0, 3.0]), jnp.array(2))), 6)
      -0.407606
    """
    check_float("logits", logits)
    check_integer("targets", targets)
    check_same_shape("targets", targets, "logits[..., 0]", logits[..., 0])
    return _target_logprobs(at_least_float32(logits), targets)


# The tangents of log-probability and entropy are written by hand and computed under `jax.checkpoint`: derived ones keep
# two or three arrays as wide as the vocabulary, these keep the logits alone, and read them once more.
@jax.custom_jvp
def _target_logprobs(logits: Float[Array, "*rows V"], targets: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    return _read_targets(logits, targets, *_normalizer(logits))


def _read_targets(logits: Array, targets: Array, largest: Array, log_sum: Array) -> Array:
    # Subtracted one after the other: their sum would round away what tells two likely tokens apart.
    logprobs = _below_largest(logits, targets, largest) - log_sum
    return jnp.where(_is_inside(targets, logits), logprobs, 0.0)


def _below_largest(logits: Array, targets: Array, largest: Array) -> Array:
    """The target's logit less the largest one: the same bits in either order, not the same speed.

    The largest comes off first for XLA for GPUs, which then reads the target in the pass that adds up exponentials.
    A CPU does not join the passes, and pays for the subtraction of every column (GPT-2's vocabulary, width 256, head
    included: 10 % more).
    """
    if logits.shape[-1] < _LARGE_VOCABULARY:
        return _shift_and_take(logits, targets, largest)
    below: Array = jax.lax.platform_dependent(
        logits, targets, largest, cpu=_take_and_shift, default=_shift_and_take
    )
    return below


def _take_and_shift(logits: Array, targets: Array, largest: Array) -> Array:
    return take_targets(logits, targets) - largest


def _shift_and_take(logits: Array, targets: Array, largest: Array) -> Array:
    return take_targets(logits - largest[..., None], targets)


@_target_logprobs.defjvp
def _target_tangents(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (logits, targets), (logits_dot, _) = primals, tangents
    largest, log_sum = _normalizer(logits)

    def tangent(logits: Array, largest: Array, log_sum: Array, logits_dot: Array) -> Array:
        probs = jnp.exp(logits - largest[..., None] - log_sum[..., None])
        change = (_is_target(targets, logits).astype(logits.dtype) - probs) * logits_dot
        return jnp.where(_is_inside(targets, logits), jnp.sum(change, axis=-1), 0.0)

    return (
        _read_targets(logits, targets, largest, log_sum),
        _recomputed(tangent)(logits, largest, log_sum, logits_dot),
    )


def _is_inside(targets: Array, logits: Array) -> Array:
    """True where a target is a column of the logits; the −100 of ignored labels is not, and selects nothing."""
    return (targets >= 0) & (targets < logits.shape[-1])


# Nothing of the forward pass could be mistaken for what is computed anew, so no barrier is needed.
_recomputed = partial(jax.checkpoint, prevent_cse=False)


def entropy_from_logits(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Entropy −Σ π log π of the softmax over the last axis, in nats, in [0, log V].

    Args:
      logits: Any float dtype; computed in float32. −inf excludes a token.
    Returns:
      In [0, log V], one for each row of logits; float32 or better, not reduced.
    Raises:
      TypeError: If `logits` are not of a float dtype.
    Example:
      >>> round(float(entropy_from_logits(jnp.array([1.0, 2.0, 3.0]))), 6)
      0.832396
    """
    check_float("logits", logits)
    return _entropy(at_least_float32(logits))


@jax.custom_jvp
def _entropy(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    return _read_entropy(logits, *_normalizer(logits))


def _read_entropy(logits: Array, largest: Array, log_sum: Array) -> Array:
    # With s = logit − m and Z = Σ exp s: H = log Z − Σ s·exp(s) / Z, from the exponentials that Z is made of.
    shifted = logits - largest[..., None]
    mean = jnp.sum(jnp.exp(shifted) * _finite_or_zero(shifted), axis=-1) * jnp.exp(-log_sum)
    return log_sum - mean


@_entropy.defjvp
def _entropy_tangents(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (logits,), (logits_dot,) = primals, tangents
    largest, log_sum = _normalizer(logits)
    entropy = _read_entropy(logits, largest, log_sum)

    def tangent(logits: Array, largest: Array, log_sum: Array, entropy: Array, logits_dot: Array) -> Array:
        logprobs = logits - largest[..., None] - log_sum[..., None]
        # ∂H/∂logit = −π·(log π + H)
        slope = -jnp.exp(logprobs) * (_finite_or_zero(logprobs) + entropy[..., None])
        return jnp.sum(slope * logits_dot, axis=-1)

    return entropy, _recomputed(tangent)(logits, largest, log_sum, entropy, logits_dot)


def _finite_or_zero(x: Array) -> Array:
    """0·log 0 = 0, but 0·(−inf) is NaN: an excluded token enters as 0·0."""
    return where_or_zero(x > -jnp.inf, x)


def kl_from_logits(
    logits: Float[Array, "*rows V"], ref_logits: Float[Array, "*rows V"]
) -> Float[Array, "*rows"]:
    """KL(π ‖ π_ref) = Σ π·(log π − log π_ref) of the two softmax distributions over the last axis, in nats, >= 0.

    A token excluded from both (−inf, as in a padded vocabulary) adds nothing. Where the two are equal, so that the
    divergence is at its least, the gradient is exactly 0.

    Args:
      logits: Of π; any float dtype, computed in float32.
      ref_logits: Of π_ref.
    Returns:
      At least 0 but for rounding, one for each row of logits, in nats; not reduced.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not of a float dtype.
    Example:
      >>> kl = kl_from_logits(jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.log(jnp.array([0.5, 0.3, 0.2])))
      >>> round(float(kl), 6)
      0.085123
    """
    check_same_floats("ref_logits", ref_logits, "logits", logits)
    return _kl(at_least_float32(logits), at_least_float32(ref_logits))


# By hand, too: a derived tangent subtracts π·(KL + 1) from π·(difference + 1), and leaves rounding where the two are
# equal, of which Adam makes whole steps.
@jax.custom_jvp
def _kl(logits: Float[Array, "*rows V"], ref_logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    return _read_kl(logits, ref_logits)[0]


def _read_kl(logits: Array, ref_logits: Array) -> tuple[Array, Array, Array, Array]:
    """(KL, π, π_ref, log π − log π_ref)."""
    logprobs, ref_logprobs = (jax.nn.log_softmax(each, axis=-1) for each in (logits, ref_logits))
    # As in the entropy: an excluded token enters as 0·0, never as 0·(inf − inf).
    difference = where_or_zero(logprobs > -jnp.inf, logprobs - ref_logprobs)
    probs = jnp.exp(logprobs)
    return jnp.sum(probs * difference, axis=-1), probs, jnp.exp(ref_logprobs), difference


@partial(_kl.defjvp, symbolic_zeros=True)
def _kl_tangents(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    def tangent(logits: Array, ref_logits: Array, *moving: Array) -> Array:
        kl, probs, ref_probs, difference = _read_kl(logits, ref_logits)
        # ∂KL/∂logit = π·(log π − log π_ref − KL), ∂KL/∂ref_logit = π_ref − π
        slopes = probs * (difference - kl[..., None]), ref_probs - probs
        pairs = zip([slopes[which] for which in moves], moving, strict=True)
        return sum((jnp.sum(slope * dot, axis=-1) for slope, dot in pairs), jnp.zeros_like(kl))

    # A fixed reference is the rule: nothing as wide as the vocabulary is made for its zeros.
    moves = [which for which, dot in enumerate(tangents) if not isinstance(dot, SymbolicZero)]
    return _kl(*primals), _recomputed(tangent)(*primals, *(tangents[which] for which in moves))


def token_logprobs(
    logits_fn: LogitsFn,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    temperature: Scalar,
    chunk_bytes: int,
    vocab_size: int,
    num_parts: int = 1,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the targets without ever holding all logits, where those would be large.

    Below `chunk_bytes` the logits (B T V) are computed at once, which is faster. Above, chunks of positions
    run one after the other, and the backward pass computes each chunk's logits again instead of storing them.

    Args:
      logits_fn: Hidden states (..., D) to logits (..., V).
      hidden: States from which the targets are predicted.
      targets: The actions a_t.
      temperature: Divides the logits, as the sampler does; > 0.
      chunk_bytes: Most bytes of float32 logits held at a time on one device. At least one position is.
      vocab_size: V, columns of padding included.
      num_parts: Devices over which a mesh splits the logits; see `jrl.mesh.logits_parts`.
      with_entropy: Whether to return the entropy as well.
    Returns:
      Log-probabilities (and entropies) in float32, unmasked. Both paths agree to rounding.
    Raises:
      ValueError: If `temperature`, `chunk_bytes`, `vocab_size` or `num_parts` is not positive.
    Example:
      >>> hidden = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))  # the head is the identity: logits = hidden
      >>> sizes = {"chunk_bytes": 1000, "vocab_size": 3}
      >>> found = token_logprobs(lambda x: x, hidden, jnp.array([[1]]), temperature=1.0, **sizes)
      >>> round(float(found.logprobs[0, 0]), 4)
      -1.3863
    """
    check_float("hidden", hidden)
    check_positive("temperature", temperature)

    def read(hidden: Float[Array, "b t D"], targets: Int[Array, "b t"]) -> TokenLogprobs:
        logits = at_least_float32(logits_fn(hidden)) / temperature
        entropy = entropy_from_logits(logits) if with_entropy else None
        return TokenLogprobs(logprobs_from_logits(logits, targets), entropy)

    positions = positions_of(chunk_bytes, vocab_size=vocab_size, num_parts=num_parts)
    return map_positions(read, (hidden, targets), positions=positions)
