# SPDX-License-Identifier: Apache-2.0
"""The decoder's side of `PolicyFns`: trunk, branch, cache and decoding, with or without an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain_rows
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.virtual_tokens import PREFIX, PROMPT, VirtualTokens
from jrl.models.attention import AttentionContext, cached_context, full_context, fused_context
from jrl.models.cache import Cache, LayerCache, LayerEntry, cache_tokens, record_experts, spread_kv_heads
from jrl.models.config import TransformerConfig
from jrl.models.decode_attention import decodes_by_kernel, whole_blocks
from jrl.models.fused_attention import KernelImplementation
from jrl.models.mixers import empty_entry
from jrl.models.noise import EmbeddingNoise
from jrl.models.positions import token_positions
from jrl.models.routing import (
    OWN_CHOICE,
    ROUTED,
    chosen_of,
    expert_layers,
    record_dtype,
    record_shape,
    replayed,
)
from jrl.models.transformer import Carried, Decoder
from jrl.typing import Features, Frozen, ModelInputs, Params, PRNGKey, Trunk

VALUE_BRANCH = "value_branch"
LORA = "lora"
NOISE_STREAM = 1
Variables = Mapping[str, Any]
"""What the decoder reads: the collection "params", and "lora" where adapters are at work."""


@dataclass(frozen=True)
class DecoderPolicy:
    """The parts of `PolicyFns`, as methods without state.

    An adapter is at work where `params` holds one: the frozen model alone is the base model, and the reference.

    Attributes:
      config: The architecture.
      decoder: Its module.
      cut: First layer above the frozen trunk; None where there is no trunk.
      num_value_layers: Layers that the value function has its own copy of.
      adapter: What trains beside the frozen model; None: parts of the model itself.
      noise: What a dropout key draws on the embeddings; None: nothing.
      attention: The kernel that whole rows go through; None: einsums.
      routing_replay: `decode` records which experts tokens visit.
      counts_experts: `branch` counts the load of the experts in its layers.
    """

    config: TransformerConfig
    decoder: Decoder
    cut: int | None
    num_value_layers: int
    adapter: Lora | VirtualTokens | None = None
    noise: EmbeddingNoise | None = None
    attention: KernelImplementation | None = None
    routing_replay: bool = False
    counts_experts: bool = False

    def trunk(self, frozen: Frozen, inputs: ModelInputs) -> Trunk:
        """Input of layer `cut`."""
        if self.cut is None:
            return None
        context, positions = self._context(inputs)
        variables = {**self._variables({}, frozen), **replayed(self.config, inputs.experts)}
        embedded = self._embed(variables, inputs, positions)
        return self._run(variables, embedded, context, 0, self.cut, method="run_layers")[0]

    def branch(
        self, params: Params, frozen: Frozen, trunk: Trunk, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Features:
        """The layers above the trunk, and the value function's own copy of the last of them."""
        if self._virtual(params) is not None:
            return self._branch_after_virtual_tokens(params, frozen, inputs, dropout_key)
        context, positions = self._context(inputs, dropout_key)
        key, value_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        variables = {**self._variables(params, frozen), **replayed(self.config, inputs.experts)}
        carried = jax.lax.stop_gradient(trunk)
        if self.cut is None:
            carried = self._embed(variables, inputs, positions, key)
        start, stop = self.config.num_layers - self.num_value_layers, self.config.num_layers

        def run(carried: Carried, start: int, stop: int) -> tuple[Carried, Any]:
            arguments: tuple[Any, ...] = (carried, context, start, stop)
            if not self.counts_experts:
                return self._run(variables, *arguments, method="run_layers", dropout_key=key)[0], None
            counted: tuple[Carried, Any] = self._run(
                variables, *arguments, inputs.attention_mask, method="run_layers_counted", dropout_key=key
            )
            return counted

        shared, lower = run(carried, self.cut or 0, start)
        last, upper = run(shared, start, stop)
        load = jax.tree.map(jnp.add, lower, upper)
        hidden = self._run(variables, last.x, method="norm")
        # A reference has no value branch: nobody asks it for values.
        if VALUE_BRANCH not in params:
            return Features(hidden, hidden, load)
        own = {"params": params[VALUE_BRANCH]}
        # Its layers train, whatever those that they are copies of do, and their routers choose for themselves.
        training = replace(self, decoder=self.decoder.clone(first_trained=0))
        last, _ = training._run(own, shared, context, start, stop, method="run_layers", dropout_key=value_key)
        return Features(hidden, self._run(own, last.x, method="norm"), load)

    def logits(
        self, params: Params, frozen: Frozen, hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows V"]:
        """The language-model head."""
        return self._run(self._variables(params, frozen), hidden, method="logits")

    def init_cache(self, params: Params, frozen: Frozen, prompts: ModelInputs, length: int) -> Cache:
        """Empty buffers, or buffers whose first columns are the virtual tokens of an adapter."""
        batch_size = prompts.tokens.shape[0]
        virtual = self._virtual(params)
        if virtual is None:
            return self._empty_cache(batch_size, length)
        cache = self._empty_cache(1, virtual.count + length)
        weights = params[virtual.name]
        if virtual.name == PREFIX:
            cache = self._cache_prefix(virtual, weights, cache)
        else:
            x = weights["embedding"][None]
            real = jnp.ones(x.shape[:2], bool)
            _, cache = self._decode(params, frozen, real, cache, vectors=x)

        def spread(leaf: Array) -> Array:
            return jnp.broadcast_to(leaf, (batch_size, *leaf.shape[1:])) if leaf.ndim else leaf

        return jax.tree.map(spread, cache)

    def decode(
        self, params: Params, frozen: Frozen, inputs: ModelInputs, cache: Cache
    ) -> tuple[Features, Cache]:
        """Appends the inputs to the cache."""
        return self._decode(params, frozen, inputs.attention_mask, cache, tokens=inputs.tokens)

    def visited(self, cache: Cache) -> Int[Array, "B S M k"] | None:
        """The record of experts that a cache keeps."""
        return cache.experts

    def _decode(
        self,
        params: Params,
        frozen: Frozen,
        mask: Array,
        cache: Cache,
        *,
        tokens: Array | None = None,
        vectors: Array | None = None,
        dropout_key: PRNGKey | None = None,
    ) -> tuple[Features, Cache]:
        """Appends columns of tokens, or of vectors in the place of their embeddings."""
        new = cache_tokens(cache, mask)
        # Virtual tokens, which alone come as vectors and under dropout, have no kernel.
        context = cached_context(self.config, new, by_kernel=self._by_kernel, attention=self.attention)
        turn, turn_back = context.turns
        positions = turn(new.positions)
        variables = self._variables(params, frozen)
        start, stop = self.config.num_layers - self.num_value_layers, self.config.num_layers
        if vectors is not None:
            arguments = vectors, positions, True
            x = self._run(variables, *arguments, method="embed_vectors", dropout_key=dropout_key)
            carried = Carried(x, {}, ())
        else:
            assert tokens is not None
            inputs = ModelInputs(turn(tokens), turn(mask))
            carried = self._embed(variables, inputs, positions, dropout_key, is_whole=True)

        def run(variables: Variables, carried: Carried, start: int, stop: int, caches: Any) -> Any:
            arguments = (carried, context, start, stop, caches)
            return self._run(variables, *arguments, method="run_layers", dropout_key=dropout_key)

        def run_recorded(carried: Carried, start: int, stop: int) -> Any:
            """The stream, the entries, and one array of choices for all layers that have some."""
            layers, caches = [index for index in recorded if start <= index < stop], cache.layers[start:stop]
            if not layers:
                return *run(variables, carried, start, stop, caches), []
            (carried, entries), routed = self.decoder.apply(
                variables,
                *(carried, context, start, stop, caches),
                method="run_layers",
                rngs=self._rngs(dropout_key),
                mutable=[ROUTED],
            )
            return carried, entries, [chosen_of(self.config, routed[ROUTED], layers)]

        recorded = () if cache.experts is None else expert_layers(self.config)
        shared, lower, lower_chosen = run_recorded(carried, 0, start)
        last, upper, upper_chosen = run_recorded(shared, start, stop)
        value = hidden = self._run(variables, last.x, method="norm")
        value_layers = cache.value_layers
        if VALUE_BRANCH in params:
            own = {"params": params[VALUE_BRANCH]}
            last, value_layers = run(own, shared, start, stop, value_layers)
            value = self._run(own, last.x, method="norm")
        after = new.after._replace(layers=lower + upper, value_layers=value_layers)
        if recorded:
            chosen = jnp.concatenate([*lower_chosen, *upper_chosen], axis=2)
            after = after._replace(experts=record_experts(new, turn_back(chosen)))
        return Features(turn_back(hidden), turn_back(value)), after

    def _branch_after_virtual_tokens(
        self, params: Params, frozen: Frozen, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Features:
        """Decodes whole rows in one call after the virtual tokens."""
        if inputs.segment_ids is not None:
            raise ValueError(
                "`segment_ids` must be None under prefix and prompt tuning: the segments of a packed row would share "
                "one set of virtual tokens."
            )
        cache = self.init_cache(params, frozen, inputs, inputs.tokens.shape[1])
        mask, tokens = inputs.attention_mask, inputs.tokens
        return self._decode(params, frozen, mask, cache, tokens=tokens, dropout_key=dropout_key)[0]

    def _cache_prefix(self, virtual: VirtualTokens, weights: Params, cache: Cache) -> Cache:
        filled = cache_tokens(cache, jnp.ones((1, virtual.count), bool)).after
        heads = self.config.num_heads

        def with_prefix(entry: LayerEntry, k: Array, v: Array) -> LayerCache:
            assert isinstance(entry, LayerCache)
            new = LayerCache((spread_kv_heads(heads, k),), (spread_kv_heads(heads, v),))
            return entry.append(new, cache.column)

        pairs = zip(cache.layers, virtual.keys_and_values(weights), strict=True)
        return filled._replace(layers=tuple(with_prefix(entry, k, v) for entry, (k, v) in pairs))

    @property
    def _by_kernel(self) -> bool:
        """True where a single token of each row reads the cache by a kernel."""
        return decodes_by_kernel(self.attention, self.config, self.decoder.dtype)

    def _empty_cache(self, batch_size: int, length: int) -> Cache:
        in_one = self._by_kernel
        length = whole_blocks(length) if in_one else length

        def entries(start: int) -> tuple[LayerEntry, ...]:
            config, dtype = self.config, self.decoder.dtype
            return tuple(
                empty_entry(config, layer, batch_size, length, dtype, in_one=in_one)
                for layer in config.layers[start:]
            )

        record = None
        if self.routing_replay:
            shape = (batch_size, length, *record_shape(self.config))
            record = constrain_rows(jnp.full(shape, OWN_CHOICE, record_dtype(self.config)))
        return Cache(
            layers=entries(0),
            value_layers=entries(self.config.num_layers - self.num_value_layers),
            mask=jnp.zeros((batch_size, length), bool),
            key_positions=jnp.zeros((batch_size, length), jnp.int32),
            positions=jnp.zeros((batch_size,), jnp.int32),
            column=np.int32(0),
            experts=record,
        )

    def _virtual(self, params: Params) -> VirtualTokens | None:
        adapter = self.adapter
        return adapter if isinstance(adapter, VirtualTokens) and adapter.name in params else None

    def _variables(self, params: Params, frozen: Frozen) -> Variables:
        """The whole model, of which the frozen part is constant, and the adapters that `params` holds."""
        own = {name: value for name, value in params.items() if name not in (LORA, PREFIX, PROMPT)}
        variables = {"params": {**jax.lax.stop_gradient(dict(frozen)), **own}}
        if LORA in params:
            assert isinstance(self.adapter, Lora)
            variables[LORA] = self.adapter.variables(params[LORA])
            variables["params"] = self.adapter.overlay(variables["params"], params[LORA])
        return variables

    def _context(
        self, inputs: ModelInputs, dropout_key: PRNGKey | None = None
    ) -> tuple[AttentionContext, Array]:
        mask, segment_ids = inputs.attention_mask, inputs.segment_ids
        positions = token_positions(mask, segment_ids)
        # By the interfaces they are called through the kernels drop no weights, and one alone knows segments.
        drops = self._rngs(dropout_key) is not None and self.config.attention_dropout > 0
        is_served = not drops and (segment_ids is None or self.attention == "splash")
        if self.attention is None or not is_served:
            return full_context(self.config, mask, positions, segment_ids), positions
        return fused_context(self.config, mask, positions, segment_ids, self.attention), positions

    def _embed(
        self,
        variables: Variables,
        inputs: ModelInputs,
        positions: Array,
        key: PRNGKey | None = None,
        *,
        is_whole: bool = False,
    ) -> Carried:
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        tokens = jnp.where(inputs.attention_mask, inputs.tokens, 0)
        noise = None
        if self.noise is not None and key is not None:
            width = self.config.embedding_width or self.config.width
            noise = self.noise(jax.random.fold_in(key, NOISE_STREAM), tokens, width)
        arguments = tokens, positions, noise, is_whole
        found: Carried = self._run(variables, *arguments, method="embed_tokens", dropout_key=key)
        return found

    def _run(self, variables: Variables, *args: Any, method: str, dropout_key: PRNGKey | None = None) -> Any:
        return self.decoder.apply(variables, *args, method=method, rngs=self._rngs(dropout_key))

    def _rngs(self, dropout_key: PRNGKey | None) -> dict[str, PRNGKey] | None:
        if dropout_key is None or (self.noise is not None and self.noise.alone):
            return None
        return {"dropout": dropout_key}
