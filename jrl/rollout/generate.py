# SPDX-License-Identifier: Apache-2.0
"""Sampling: prefill, then one compiled loop over tokens with a key/value cache and an early exit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain, constrain_rows_alone, gather_fsdp, rows_of_device
from jrl.ops.checks import check_positive
from jrl.ops.sampling import Processor, SamplingContext, best_advantages, draw, make_processors
from jrl.typing import (
    Cache,
    Completions,
    Features,
    Frozen,
    ModelInputs,
    Params,
    PolicyFns,
    PRNGKey,
    SamplingKnobs,
)

Tree = TypeVar("Tree")
PREFILL_TOKENS = 1 << 14
"""Most tokens of prompts that a device reads at once: enough for its matrix products to be large, and 0.4 GB for the
inside of an MLP of Llama-2 7B, of which 128 rows of 1,024 tokens would take 2.9."""


class Generate(Protocol):
    """A sampler."""

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        prompts: ModelInputs,
        row_ids: Int[Array, "B"],
        knobs: SamplingKnobs,
        key: PRNGKey,
    ) -> Completions:
        """Samples one completion for each of `row_ids`."""
        ...


class _Settings(NamedTuple):
    """Static settings of a sampler, the first five as `make_generate` takes them.

    Attributes:
      max_new_tokens: See there.
      eos_token_ids: Likewise.
      pad_token_id: Likewise.
      do_sample: Likewise.
      num_generations: Likewise.
      watches_seen: Whether a processor needs the ids that occurred.
      processors: Of the logits, in order.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    do_sample: bool
    num_generations: int
    watches_seen: bool
    processors: tuple[Processor, ...]


class _Loop(NamedTuple):
    """State of the sampling loop between two tokens.

    Attributes:
      step: Tokens sampled.
      cache: Keys and values of everything before.
      tokens: Sampled so far, pad behind.
      logprobs: Theirs.
      lengths: Theirs, the EOS included.
      done: True for rows that have sampled an EOS.
      last_tokens: What each row goes on from: the last token of its prompt, then the last one written.
      seen: Ids that occurred, where a processor needs them.
    """

    step: Int[Array, ""]
    cache: Cache
    tokens: Int[Array, "B T"]
    logprobs: Float[Array, "B T"]
    lengths: Int[Array, "B"]
    done: Bool[Array, "B"]
    last_tokens: Int[Array, "B"]
    seen: Bool[Array, "B V"] | None


def make_generate(
    policy: PolicyFns,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    do_sample: bool = True,
    top_k: int = 0,
    min_new_tokens: int = 0,
    repetition_penalty: float = 1.0,
    suppress_token_ids: Sequence[int] = (),
    num_generations: int = 1,
) -> Generate:
    """A sampler with these static settings; the caller jits it. Temperature, top-p and ILQL's beta are traced.
    Without a top-p no nucleus is looked for.

    With a `beta` among the knobs, Q − V of the model's heads steers the draw. What is read is `params["q_heads"]`: ILQL
    gives its target heads in their place.

    Token t of row i is drawn with `fold_in(fold_in(key, row_ids[i]), t)`: samples depend neither on the row's
    neighbours, nor on the order in which rows come, nor on the mesh.

    Args:
      policy: The model.
      max_new_tokens: Width of the result.
      eos_token_ids: Sampling one of these ends the row; it is part of the completion.
      pad_token_id: Fills what follows. It may equal an EOS: masks come from lengths.
      do_sample: False takes the most probable token.
      top_k: 0 keeps all tokens.
      min_new_tokens: No EOS before that many tokens.
      repetition_penalty: 1 is off.
      suppress_token_ids: Never sampled.
      num_generations: Samples of each prompt, which share one pass over it.
    Returns:
      `(params, frozen, prompts, row_ids, knobs, key) -> Completions` for left-padded prompts. There are
      `num_generations` rows in a row for each prompt: with 2, prompts (a, b) give samples (a, a, b, b).
    Raises:
      ValueError: If `max_new_tokens` is not positive; on a call, if there is a `beta` and no head that it weighs.
    """
    check_positive("max_new_tokens", max_new_tokens)
    check_positive("num_generations", num_generations)
    settings = _Settings(
        max_new_tokens=max_new_tokens,
        eos_token_ids=tuple(eos_token_ids),
        pad_token_id=pad_token_id,
        do_sample=do_sample,
        num_generations=num_generations,
        watches_seen=repetition_penalty != 1.0,
        processors=make_processors(
            eos_token_ids=eos_token_ids,
            top_k=top_k,
            min_new_tokens=min_new_tokens,
            repetition_penalty=repetition_penalty,
            suppress_token_ids=suppress_token_ids,
        ),
    )

    def generate(
        params: Params,
        frozen: Frozen,
        prompts: ModelInputs,
        row_ids: Int[Array, "B"],
        knobs: SamplingKnobs,
        key: PRNGKey,
    ) -> Completions:
        return _sampled(policy, settings, params, frozen, prompts, row_ids, knobs, key)

    return generate


def _sampled(
    policy: PolicyFns,
    settings: _Settings,
    params: Params,
    frozen: Frozen,
    prompts: ModelInputs,
    row_ids: Int[Array, "B"],
    knobs: SamplingKnobs,
    key: PRNGKey,
) -> Completions:
    """Prefill, and the loop over tokens."""
    rows, width = prompts.tokens.shape[0] * settings.num_generations, settings.max_new_tokens
    params, frozen = (gather_fsdp(policy.rounded(tree)) for tree in (params, frozen))
    loop_params, loop_frozen = (policy.loop_weights(tree, rows, width) for tree in (params, frozen))
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids)

    def sample(loop: _Loop, features: Features) -> _Loop:
        last = jax.tree.map(lambda hidden: hidden[:, -1], features)
        context = SamplingContext(
            num_sampled=loop.step,
            seen=loop.seen,
            temperature=knobs.temperature,
            top_p=knobs.top_p,
            last_tokens=loop.last_tokens,
            forbidden=knobs.forbidden,
            advantages=None if knobs.beta is None else steering_advantages(policy, params, last.value),
            beta=knobs.beta,
        )
        logits = policy.logits(loop_params, loop_frozen, last.policy)
        drawn = _draw(logits, context, settings.processors, row_keys if settings.do_sample else None)
        return _append(loop, drawn, _rests(loop, knobs), settings.eos_token_ids, settings.pad_token_id)

    def more(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < width) & ~jnp.all(_rests(loop, knobs))

    def next_token(loop: _Loop) -> _Loop:
        newest = loop.last_tokens[:, None]
        inputs = ModelInputs(newest, jnp.ones_like(newest, dtype=bool))
        features, cache = policy.decode(loop_params, loop_frozen, inputs, loop.cache)
        return sample(loop._replace(cache=cache), features)

    # What the cache begins with beside the prompts' own padding; see `prefill`.
    padding = -prompts.tokens.shape[1] % prefill_columns(*prompts.tokens.shape)
    last, cache = prefill(policy, params, frozen, prompts, width - 1)
    features, cache, prompts = repeat_rows((last, cache, prompts), settings.num_generations)
    seen = None
    if settings.watches_seen:
        seen = _seen(prompts, _vocab_size(policy, params, frozen, features))
    # The first token needs no decoding beyond the prompt, and the last one is never read.
    start = _nothing_sampled(cache, prompts, seen, settings)
    end = jax.lax.while_loop(more, next_token, sample(start, features))
    experts = policy.visited(end.cache)
    if experts is not None:
        # The cache may end with columns that nothing is written to.
        experts = experts[:, padding : padding + prompts.tokens.shape[1] + width - 1]
    return Completions(end.tokens, end.lengths, end.done, end.logprobs, experts=experts)


def prefill(
    policy: PolicyFns, params: Params, frozen: Frozen, prompts: ModelInputs, room: int
) -> tuple[Features, Cache]:
    """Reads prompts into a fresh cache, so many at a time that a device has at most `PREFILL_TOKENS` tokens at work.

    Args:
      policy: The model.
      params: Trainable parameters.
      frozen: The rest.
      prompts: Left-padded.
      room: Columns that follow them.
    Returns:
      Features of the last column (B 1 D), and the cache.
    """
    num_rows, width = prompts.tokens.shape
    columns = prefill_columns(num_rows, width)
    count = -(-width // columns)

    def read(inputs: ModelInputs, cache: Cache) -> tuple[Features, Cache]:
        features, cache = policy.decode(params, frozen, inputs, cache)
        return jax.tree.map(lambda hidden: hidden[:, -1:], features), cache

    def begin(inputs: ModelInputs) -> Cache:
        return policy.init_cache(params, frozen, inputs, columns * count + room)

    if count == 1:
        return _by_rows(policy, begin, read, prompts, prefill_rows(num_rows, width) or num_rows)
    # More padding on the left, so that all parts are of one width and share one body of the program.
    padding = ((0, 0), (columns * count - width, 0))
    tokens, mask = jnp.pad(prompts.tokens, padding), jnp.pad(prompts.attention_mask, padding)

    def read_part(number: Int[Array, ""], found: tuple[Features, Cache]) -> tuple[Features, Cache]:
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=number * columns, slice_size=columns, axis=1)
        return read(prompts._replace(tokens=cut(tokens), attention_mask=cut(mask)), found[1])

    cache = begin(prompts)
    features, _ = jax.eval_shape(read_part, jnp.int32(0), (None, cache))
    found: tuple[Features, Cache] = jax.lax.fori_loop(0, count, read_part, (_zeros(features), cache))
    return found


def _by_rows(
    policy: PolicyFns,
    begin: Callable[[ModelInputs], Cache],
    read: Callable[[ModelInputs, Cache], tuple[Features, Cache]],
    prompts: ModelInputs,
    most: int,
) -> tuple[Features, Cache]:
    """What is made of prompts and the cache that they begin with, so many rows of each device after the other."""
    num_rows = prompts.tokens.shape[0]
    own = rows_of_device(num_rows)
    if most >= own:
        return read(prompts, begin(prompts))
    devices, count = num_rows // own, own // most

    def cut(x: Array) -> Array:
        parts = x.reshape(devices, count, -1, *x.shape[1:]).swapaxes(0, 1)
        return constrain(parts.reshape(count, -1, *x.shape[1:]), None, "batch", *(None,) * (x.ndim - 1))

    def join(x: Array) -> Array:
        if x.ndim == 1:  # of the cache's columns, which all rows share
            return x[0]
        parts = x.reshape(count, devices, -1, *x.shape[2:]).swapaxes(0, 1)
        return constrain_rows_alone(parts.reshape(num_rows, *x.shape[2:]))

    def read_part(whole: Cache, part: tuple[Array, ModelInputs]) -> tuple[Cache, Features]:
        number, inputs = part

        def put(whole: Array, own: Array) -> Array:
            if whole.shape == jnp.shape(own):
                return own  # `decode` has put it
            if whole.shape[1:] != jnp.shape(own):
                raise ValueError(
                    f"`PolicyFns.decode` must return a cache of the shapes that it got: expected {whole.shape[1:]}, "
                    f"got {jnp.shape(own)}. Prompts are read some rows at a time, and the cache of all rows is one."
                )
            return jax.lax.dynamic_update_index_in_dim(whole, own, number, axis=0)

        features, cache = read(inputs, policy.within(begin(inputs), whole, number))
        return jax.tree.map(put, whole, cache), features

    parts = jax.tree.map(cut, prompts)
    shapes = jax.eval_shape(lambda: begin(jax.tree.map(lambda x: x[0], parts)))
    cache, features = jax.lax.scan(read_part, _zeros(shapes, count), (jnp.arange(count), parts))
    found: tuple[Features, Cache] = jax.tree.map(join, (features, cache))
    return found


def _zeros(shapes: Tree, *front: int) -> Tree:
    """Zeros of these shapes, with further axes in front."""
    found: Tree = jax.tree.map(lambda shape: jnp.zeros((*front, *shape.shape), shape.dtype), shapes)
    return found


def prefill_rows(num_rows: int, width: int) -> int:
    """Rows of a device that `prefill` reads at a time, of so many prompts of this width, on the mesh in force.

    0 where whole rows are too long for that, or too few of them divide the rows: then it reads some columns of all.
    """
    rows, most = rows_of_device(num_rows), PREFILL_TOKENS // width
    found = max((count for count in range(1, min(rows, most) + 1) if rows % count == 0), default=0)
    return found if 2 * found > min(rows, most) else 0


def prefill_columns(num_rows: int, width: int) -> int:
    """Columns that `prefill` reads at a time of so many prompts of this width, on the mesh in force."""
    if prefill_rows(num_rows, width):
        return width
    return -(-width // min(-(-rows_of_device(num_rows) * width // PREFILL_TOKENS), width))


def repeat_rows(tree: Tree, count: int) -> Tree:
    """Each row of every array `count` times in a row, on the devices where it lies; what has no rows stays.

    Args:
      tree: Arrays (B ...) and numbers.
      count: At least 1.
    """
    if count == 1:
        return tree

    def repeat(x: Array) -> Array:
        if x.ndim == 0:
            return x
        # As a broadcast, so that the compiler sees that no row leaves its device.
        repeated = jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:]))
        return repeated.reshape(-1, *x.shape[1:])

    found: Tree = jax.tree.map(repeat, tree)
    return found


def _nothing_sampled(
    cache: Cache, prompts: ModelInputs, seen: Bool[Array, "B V"] | None, settings: _Settings
) -> _Loop:
    """The loop's state before the first token."""
    rows, width = prompts.tokens.shape[0], settings.max_new_tokens
    return _Loop(
        step=jnp.zeros((), jnp.int32),
        cache=cache,
        tokens=jnp.full((rows, width), settings.pad_token_id, jnp.int32),
        logprobs=jnp.zeros((rows, width), jnp.float32),
        lengths=jnp.zeros((rows,), jnp.int32),
        done=jnp.zeros((rows,), bool),
        last_tokens=prompts.tokens[:, -1].astype(jnp.int32),
        seen=seen,
    )


def _draw(
    logits: Float[Array, "B V"],
    context: SamplingContext,
    processors: tuple[Processor, ...],
    row_keys: PRNGKey | None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The next id of every row and its processed log-probability; greedy without keys."""
    for process in processors:
        logits = process(logits, context)
    if row_keys is None:
        return draw(logits, None)
    step = context.num_sampled
    uniform = jax.vmap(lambda row_key: jax.random.uniform(jax.random.fold_in(row_key, step)))(row_keys)
    return draw(logits, uniform)


def steering_advantages(
    policy: PolicyFns, params: Params, hidden: Float[Array, "B D"]
) -> Float[Array, "B V"]:
    """Q − V of every next token.

    Args:
      policy: The model.
      params: With value and Q heads.
      hidden: What the heads read.
    Raises:
      ValueError: If a head is missing.
    """
    heads = policy.heads(params, hidden)
    missing = [name for name in ("values", "q_values") if name not in heads]
    if missing:
        raise ValueError(
            f"`knobs.beta` must be None for a model without {' and '.join(missing)}: it weighs Q − V, and `params` "
            "hold no such head. Was the model trained with ILQL?"
        )
    return best_advantages(heads["q_values"], heads["values"])


def _rests(loop: _Loop, knobs: SamplingKnobs) -> Bool[Array, "B"]:
    """True for rows that are over, by an EOS or by a limit of their own."""
    return loop.done if knobs.limits is None else loop.done | (loop.lengths >= knobs.limits)


def _append(
    loop: _Loop,
    drawn: tuple[Int[Array, "B"], Float[Array, "B"]],
    rests: Bool[Array, "B"],
    eos_token_ids: Sequence[int],
    pad_token_id: int,
) -> _Loop:
    """Writes the drawn ids into the rows that still run."""
    tokens, logprobs = drawn
    ended = jnp.zeros_like(loop.done)
    for eos in eos_token_ids:
        ended |= (tokens == eos) & ~rests
    tokens = jnp.where(rests, pad_token_id, tokens)
    seen = loop.seen
    if seen is not None:
        seen |= jnp.arange(seen.shape[1])[None, :] == tokens[:, None]
    return loop._replace(
        step=loop.step + 1,
        tokens=jax.lax.dynamic_update_slice_in_dim(loop.tokens, tokens[:, None], loop.step, axis=1),
        logprobs=jax.lax.dynamic_update_slice_in_dim(
            loop.logprobs, jnp.where(rests, 0.0, logprobs)[:, None], loop.step, axis=1
        ),
        lengths=loop.lengths + ~rests,
        done=loop.done | ended,
        last_tokens=tokens,
        seen=seen,
    )


def _vocab_size(policy: PolicyFns, params: Params, frozen: Frozen, features: Features) -> int:
    """Columns of the logits, padding included, without computing any."""
    return int(jax.eval_shape(policy.logits, params, frozen, features.policy[:, -1]).shape[-1])


def _seen(prompts: ModelInputs, vocab_size: int) -> Bool[Array, "B V"]:
    """Ids that occur in each prompt."""
    rows = jnp.arange(prompts.tokens.shape[0])[:, None]
    seen = jnp.zeros((prompts.tokens.shape[0], vocab_size), bool)
    return seen.at[rows, prompts.tokens].max(prompts.attention_mask)
