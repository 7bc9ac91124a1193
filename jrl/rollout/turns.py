# SPDX-License-Identifier: Apache-2.0
"""Sampling that goes on: rows of one cache read what came between two turns, and write from there.

A row is a *slot*. Between two calls the host may let some slots read tokens (what an environment said), take back the
newest tokens of others (those behind a stop string), and begin another row in a slot whose row is over, by its prompt
or by a copy of a slot that holds the same one. Then all slots that have something to say write together, for a while,
in one compiled loop. Token t behind the prompt of row i is drawn with `fold_in(fold_in(key, i), t)`: as in
`jrl.rollout.generate`, and whichever slot and call it falls to.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jrl.compilation import COMPILER_OPTIONS
from jrl.mesh import gather_fsdp, replicated, rows_parts
from jrl.ops.sampling import SamplingContext, draw, make_processors
from jrl.rollout.generate import PREFILL_TOKENS, steering_advantages
from jrl.rollout.sampler import GenerationSettings
from jrl.typing import Cache, Frozen, ModelInputs, Params, PolicyFns, PRNGKey, SamplingKnobs

READ_WIDTH = 256
"""Most columns of tokens that a call of `read` brings: longer texts come in several calls of this width."""


LEAST_WIDTH = 16
"""Fewest columns, most of them padding: widths and numbers of rows are powers of four, and few shapes are compiled."""
BEGUN_SHARE = 8
"""One slot of so many begins a row in a call of `begin`. Fewer at a time would cost more calls, more would let slots
rest until there are as many: on two CPU cores both together were least at 4 of 32 slots."""


class Weights(NamedTuple):
    """A model's weights as the calls of one collection read them.

    Attributes:
      params: Trainable parameters, gathered over fsdp and rounded.
      frozen: The rest, likewise.
      loop_params: The same, as a loop over tokens reads them fastest.
      loop_frozen: Likewise.
    """

    params: Params
    frozen: Frozen
    loop_params: Params
    loop_frozen: Frozen


class Plan(NamedTuple):
    """One call of `write`, by slot.

    Attributes:
      last_tokens: The newest token of each row, which the cache does not hold yet.
      row_ids: Number of the row in each slot.
      offsets: Tokens behind the row's prompt so far.
      written: Tokens of the turn at hand so far.
      limits: Most tokens to write; 0: the slot rests.
    """

    last_tokens: Int[Array, "B"]
    row_ids: Int[Array, "B"]
    offsets: Int[Array, "B"]
    written: Int[Array, "B"]
    limits: Int[Array, "B"]


class Written(NamedTuple):
    """Tokens of one call of `write`.

    Attributes:
      tokens: Pad behind the end.
      logprobs: Of the distribution that they were drawn from; 0 behind the end.
      lengths: How many each slot wrote; where it had not reached its limit nor an end, it goes on in another call.
    """

    tokens: Int[Array, "B T"]
    logprobs: Float[Array, "B T"]
    lengths: Int[Array, "B"]


class _Loop(NamedTuple):
    step: Int[Array, ""]
    cache: Cache
    done: Bool[Array, "B"]
    last_tokens: Int[Array, "B"]
    written: Written


class TurnPrograms:
    """The compiled programs of a number of slots.

    Args:
      policy: A causal model.
      mesh: Of the model; slots are split over it where they divide.
      settings: How to sample; `max_new_tokens` is not read, nor is what knobs say.
      num_slots: Rows that write together.
      length: Columns of the cache: most tokens of a row, its prompt included.
      num_tokens: Most tokens of one call of `write`.
      end_token_ids: Each ends a slot's turn: the EOS, and whatever shows the host a stop string.
    Raises:
      ValueError: If the settings ask for what needs all tokens of a row at every step.
    """

    def __init__(
        self,
        policy: PolicyFns,
        mesh: Mesh,
        settings: GenerationSettings,
        *,
        num_slots: int,
        length: int,
        num_tokens: int,
        end_token_ids: tuple[int, ...],
    ) -> None:
        if settings.repetition_penalty != 1.0:
            raise ValueError(
                f"gen_kwargs: `repetition_penalty` must be 1 with an environment and with `method.rollout_slots`, got "
                f"{settings.repetition_penalty}: what an environment said would be penalised too, and slots do not "
                "keep which tokens a row has."
            )
        self.num_slots, self.length, self.num_tokens = num_slots, length, num_tokens
        # Where slots lie on several devices, all read together: picking some would send a cache between devices.
        self.is_split = rows_parts(mesh) > 1 and num_slots % rows_parts(mesh) == 0
        self.forgets_some = policy.forgets_some
        self.most_begun = max(1, num_slots // BEGUN_SHARE)
        # Nothing is said of shardings: the cache stays as the model splits it, heads included, from call to call.
        compiled = partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self._arrange = compiled(partial(_arranged, policy, num_slots, num_tokens))
        self._start = compiled(partial(_empty, policy, num_slots, length))
        self._forget = compiled(policy.forget, donate_argnums=0)
        self._begin = compiled(partial(_begun, policy, length), donate_argnums=1)
        self._copy = compiled(partial(_copied, policy), donate_argnums=0)
        self._take = compiled(_taken)
        self._read_all = compiled(partial(_read, policy, True), donate_argnums=1)
        self._read_some = compiled(partial(_read, policy, False), donate_argnums=1)
        processors = make_processors(
            eos_token_ids=settings.eos_token_id,
            top_k=settings.top_k,
            min_new_tokens=settings.min_new_tokens,
            suppress_token_ids=settings.suppress_tokens,
        )
        write = partial(
            _write, policy, processors, settings, end_token_ids=end_token_ids, num_tokens=num_tokens
        )
        # What is written is whole on every device: each process does the same with it.
        places = (None, replicated(mesh)) if mesh.size > 1 else None
        self._write = compiled(write, donate_argnums=1, out_shardings=places)

    def weights(self, params: Params, frozen: Frozen) -> Weights:
        """The weights as the other programs read them: made once for many calls."""
        found: Weights = self._arrange(params, frozen)
        return found

    def start(self, weights: Weights) -> Cache:
        """A cache that holds nothing."""
        return self._start(weights.params, weights.frozen)

    def forget(self, cache: Cache, counts: np.ndarray) -> Cache:
        """Takes the newest tokens of each slot back; `cache` is donated."""
        return self._forget(cache, jnp.asarray(counts, jnp.int32))

    def begin(self, weights: Weights, cache: Cache, prompts: dict[int, list[int]], width: int) -> Cache:
        """Lets slots forget all that they hold, and read a prompt; `cache` is donated.

        Prompts go into a small cache of their own, whose rows then replace those of the slots: no more than
        `most_begun` at a time, so that little lies beside the slots.

        Args:
          weights: From `weights`.
          cache: The slots; they must not be split over devices.
          prompts: Ids by slot; may be empty.
          width: Of the longest prompt there is.
        """
        slots = sorted(prompts)
        columns = min(max(_power(max(map(len, prompts.values()), default=0)), LEAST_WIDTH), width)
        most = max(1, min(self.most_begun, PREFILL_TOKENS // columns))
        for start in range(0, len(slots), most):
            inputs, rows = _padded(prompts, slots[start : start + most], most, columns, self.num_slots)
            cache = self._begin(weights, cache, inputs, rows)
        return cache

    def copy(self, cache: Cache, sources: dict[int, tuple[int, int]]) -> Cache:
        """Lets slots hold what other slots hold but for their newest tokens; `cache` is donated.

        Args:
          cache: The slots; they must not be split over devices.
          sources: By slot, the other slot and how many of its tokens are left out. No slot is both.
        """
        items = sorted(sources.items())
        for start in range(0, len(items), self.most_begun):
            found = np.full((3, self.most_begun), self.num_slots, np.int32)
            for place, (slot, (source, count)) in enumerate(items[start : start + self.most_begun]):
                found[:, place] = slot, source, count
            cache = self._copy(cache, *(jnp.asarray(row) for row in found))
        return cache

    def take(self, cache: Cache, slots: list[int]) -> Cache:
        """Some of the slots as a cache of their own, for the programs of as many slots."""
        return self._take(cache, jnp.asarray(slots, jnp.int32))

    def read(self, weights: Weights, cache: Cache, texts: dict[int, list[int]]) -> Cache:
        """Lets slots read tokens; `cache` is donated.

        Args:
          weights: From `weights`.
          cache: The slots.
          texts: Ids by slot, any number of them.
        """
        while texts:
            now = {slot: ids[:READ_WIDTH] for slot, ids in texts.items()}
            texts = {slot: ids[READ_WIDTH:] for slot, ids in texts.items() if len(ids) > READ_WIDTH}
            width = max(_power(max(map(len, now.values()))), LEAST_WIDTH)
            count = min(_power(len(now)), self.num_slots)
            # Picked slots are copies: of all of them there would be the cache twice.
            is_whole = self.is_split or count == self.num_slots
            slots = list(range(self.num_slots)) if is_whole else sorted(now)
            inputs, rows = _padded(now, slots, max(count, len(slots)), width, self.num_slots)
            cache = (self._read_all if is_whole else self._read_some)(weights, cache, inputs, rows)
        return cache

    def write(
        self,
        weights: Weights,
        cache: Cache,
        plan: Plan,
        knobs: SamplingKnobs,
        key: PRNGKey,
        *,
        least_running: int = 1,
    ) -> tuple[Cache, Written]:
        """Lets slots write until all have ended or reached their limits; `cache` is donated.

        Args:
          weights: From `weights`.
          cache: The slots.
          plan: What each is to do.
          knobs: Temperature and what else is traced.
          key: Of the collection.
          least_running: The call ends, too, as soon as fewer slots write than that.
        """
        found: tuple[Cache, Written] = self._write(weights, cache, plan, knobs, key, jnp.int32(least_running))
        return found


def _padded(
    texts: dict[int, list[int]], slots: list[int], count: int, width: int, num_slots: int
) -> tuple[ModelInputs, Int[Array, "R"]]:
    """Texts of some slots as left-padded rows, filled up to `count` with slots behind the last one."""
    tokens, mask = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    for row, slot in enumerate(slots):
        ids = texts.get(slot, [])
        tokens[row, width - len(ids) :], mask[row, width - len(ids) :] = ids, bool(ids)
    filled = np.asarray(slots + [num_slots] * (count - len(slots)), np.int32)
    return ModelInputs(jnp.asarray(tokens), jnp.asarray(mask)), jnp.asarray(filled)


def _power(count: int) -> int:
    """The smallest power of four that is at least `count`."""
    return 1 << 2 * -(-max(count - 1, 0).bit_length() // 2)


def _arranged(policy: PolicyFns, rows: int, tokens: int, params: Params, frozen: Frozen) -> Weights:
    params, frozen = (gather_fsdp(policy.rounded(tree)) for tree in (params, frozen))
    loop_params, loop_frozen = (policy.loop_weights(tree, rows, tokens) for tree in (params, frozen))
    return Weights(params, frozen, loop_params, loop_frozen)


def _empty(policy: PolicyFns, rows: int, length: int, params: Params, frozen: Frozen) -> Cache:
    nothing = ModelInputs(jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1), bool))
    return policy.own_columns(policy.init_cache(params, frozen, nothing, length))


def _begun(
    policy: PolicyFns,
    length: int,
    weights: Weights,
    cache: Cache,
    inputs: ModelInputs,
    slots: Int[Array, "R"],
) -> Cache:
    """The cache once some slots have read a prompt, and nothing else."""
    params, frozen = weights.params, weights.frozen
    # As in `prefill`, rows share columns: padding is cached, masked, and attention reads these columns alone.
    fresh = policy.init_cache(params, frozen, inputs, length)
    fresh = policy.own_columns(policy.decode(params, frozen, inputs, fresh)[1])
    return jax.tree.map(lambda x, rows: x.at[slots].set(rows, mode="drop"), cache, fresh)


def _copied(
    policy: PolicyFns,
    cache: Cache,
    slots: Int[Array, "R"],
    sources: Int[Array, "R"],
    counts: Int[Array, "R"],
) -> Cache:
    """The cache with slots that hold what others do, but for so many of the newest tokens."""
    picked = policy.forget(jax.tree.map(lambda x: x.at[sources].get(mode="clip"), cache), counts)
    return jax.tree.map(lambda x, rows: x.at[slots].set(rows, mode="drop"), cache, picked)


def _taken(cache: Cache, slots: Int[Array, "R"]) -> Cache:
    """The cache of some slots."""
    return jax.tree.map(lambda x: x[slots], cache)


def _read(
    policy: PolicyFns,
    is_whole: bool,
    weights: Weights,
    cache: Cache,
    inputs: ModelInputs,
    slots: Int[Array, "R"],
) -> Cache:
    """The cache once some slots have read, or all of them, of which some may bring nothing."""
    params, frozen = weights.params, weights.frozen
    if is_whole:
        return policy.decode(params, frozen, inputs, cache)[1]
    picked = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), cache)
    _, picked = policy.decode(params, frozen, inputs, picked)
    return jax.tree.map(lambda x, rows: x.at[slots].set(rows, mode="drop"), cache, picked)


def _write(
    policy: PolicyFns,
    processors: tuple,
    settings: GenerationSettings,
    weights: Weights,
    cache: Cache,
    plan: Plan,
    knobs: SamplingKnobs,
    key: PRNGKey,
    least_running: Int[Array, ""],
    *,
    end_token_ids: tuple[int, ...],
    num_tokens: int,
) -> tuple[Cache, Written]:
    """The loop over tokens."""
    rows = plan.limits.shape[0]
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(plan.row_ids)

    def more(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < num_tokens) & (jnp.sum(~loop.done) >= least_running)

    def next_token(loop: _Loop) -> _Loop:
        inputs = ModelInputs(loop.last_tokens[:, None], ~loop.done[:, None])
        features, cache = policy.decode(weights.loop_params, weights.loop_frozen, inputs, loop.cache)
        policy_features, value_features = (hidden[:, -1] for hidden in (features.policy, features.value))
        steering = knobs.beta is not None
        context = SamplingContext(
            num_sampled=(plan.written + loop.step)[:, None],
            seen=None,
            temperature=knobs.temperature,
            top_p=knobs.top_p,
            last_tokens=loop.last_tokens,
            forbidden=knobs.forbidden,
            advantages=steering_advantages(policy, weights.params, value_features) if steering else None,
            beta=knobs.beta,
        )
        logits = policy.logits(weights.loop_params, weights.loop_frozen, policy_features)
        for process in processors:
            logits = process(logits, context)
        places = plan.offsets + loop.step

        def uniform(row_key: PRNGKey, place: Int[Array, ""]) -> Float[Array, ""]:
            return jax.random.uniform(jax.random.fold_in(row_key, place))

        numbers = jax.vmap(uniform)(row_keys, places) if settings.do_sample else None
        return _append(loop._replace(cache=cache), *draw(logits, numbers))

    def _append(loop: _Loop, tokens: Int[Array, "B"], logprobs: Float[Array, "B"]) -> _Loop:
        tokens = jnp.where(loop.done, settings.pad_token_id, tokens)
        logprobs = jnp.where(loop.done, 0.0, logprobs)
        lengths = loop.written.lengths + ~loop.done
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=loop.step, axis=1)
        written = Written(
            put(loop.written.tokens, tokens[:, None]), put(loop.written.logprobs, logprobs[:, None]), lengths
        )
        ended = jnp.isin(tokens, jnp.asarray(end_token_ids, jnp.int32)) if end_token_ids else False
        done = loop.done | ended | (lengths >= plan.limits)
        last = jnp.where(loop.done, loop.last_tokens, tokens)
        return _Loop(loop.step + 1, loop.cache, done, last, written)

    nothing = Written(
        jnp.full((rows, num_tokens), settings.pad_token_id, jnp.int32),
        jnp.zeros((rows, num_tokens), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
    )
    start = _Loop(jnp.zeros((), jnp.int32), cache, plan.limits <= 0, plan.last_tokens, nothing)
    end = jax.lax.while_loop(more, next_token, start)
    return end.cache, end.written
