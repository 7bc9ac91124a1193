# SPDX-License-Identifier: Apache-2.0
"""A decoder as `PolicyFns`: what trains, what is frozen, and the cut between trunk and branch.

With `num_layers_unfrozen = k > 0` the last k layers, the final norm and an untied head train, and all below
is a frozen trunk that the policy and its reference share: the reference is a copy of the trained part alone
(the "hydra" of trlX). −1 trains everything; 0 trains nothing but the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.attention import (
    AttentionContext,
    Cache,
    LayerCache,
    cache_tokens,
    cached_context,
    empty_layer_cache,
    full_context,
    token_positions,
)
from jrl.models.config import TransformerConfig
from jrl.models.heads import check_value_head, value_heads
from jrl.models.transformer import Decoder
from jrl.typing import Features, Frozen, ModelInputs, Params, PolicyFns, PRNGKey, Trunk

HEADS = ("v_head",)
VALUE_BRANCH = "value_branch"


def make_policy(
    config: TransformerConfig,
    *,
    num_layers_unfrozen: int,
    value_head: str | None,
    num_value_layers_unfrozen: int = 0,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
) -> PolicyFns:
    """The functions by which algorithms know this decoder.

    Args:
      config: The architecture.
      num_layers_unfrozen: How many of the last layers train; −1 is everything, 0 only the heads.
      value_head: "mlp", "linear", or None for a model without values.
      num_value_layers_unfrozen: How many of the last layers the value function has its own copy of.
      compute_dtype: Of activations and matrix products.
      remat: Recompute each layer in the backward pass: less memory for about a third more compute.
    Raises:
      ValueError: If a count is out of range or the value head is unknown.
    """
    check_value_head(value_head)
    cut = branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen)
    policy = _DecoderPolicy(config, Decoder(config, compute_dtype, remat), cut, num_value_layers_unfrozen)
    return PolicyFns(
        policy.trunk,
        policy.branch,
        policy.logits,
        partial(value_heads, value_head),
        policy.init_cache,
        policy.decode,
    )


@dataclass(frozen=True)
class _DecoderPolicy:
    """The parts of `PolicyFns`, as methods without state.

    Attributes:
      config: The architecture.
      decoder: Its module.
      cut: First layer above the frozen trunk; None where there is no trunk.
      num_value_layers: Layers that the value function has its own copy of.
    """

    config: TransformerConfig
    decoder: Decoder
    cut: int | None
    num_value_layers: int

    def trunk(self, frozen: Frozen, inputs: ModelInputs) -> Trunk:
        """Hidden states before layer `cut`."""
        if self.cut is None:
            return None
        context, positions = self._context(inputs)
        x = self._embed(frozen, inputs, positions)
        return self._run(frozen, x, context, 0, self.cut, method="run_layers")[0]

    def branch(
        self, params: Params, frozen: Frozen, trunk: Trunk, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Features:
        """The layers above the trunk, and the value function's own copy of the last of them."""
        context, positions = self._context(inputs)
        key, value_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        weights = _merged(params, frozen)
        whole = self.cut is None
        x = self._embed(weights, inputs, positions, key) if whole else jax.lax.stop_gradient(trunk)
        start, stop = self.config.num_layers - self.num_value_layers, self.config.num_layers
        shared, _ = self._run(weights, x, context, self.cut or 0, start, method="run_layers", dropout_key=key)
        x, _ = self._run(weights, shared, context, start, stop, method="run_layers", dropout_key=key)
        hidden = self._run(weights, x, method="norm")
        # A reference has no value branch: nobody asks it for values.
        if VALUE_BRANCH not in params:
            return Features(hidden, hidden)
        own = params[VALUE_BRANCH]
        x, _ = self._run(own, shared, context, start, stop, method="run_layers", dropout_key=value_key)
        return Features(hidden, self._run(own, x, method="norm"))

    def logits(
        self, params: Params, frozen: Frozen, hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows V"]:
        """The language-model head."""
        return self._run(_merged(params, frozen), hidden, method="logits")

    def init_cache(self, params: Params, frozen: Frozen, prompts: ModelInputs, length: int) -> Cache:
        """Empty buffers: a decoder alone has nothing to remember before the first token."""
        del params, frozen
        batch_size = prompts.tokens.shape[0]

        def layers(count: int) -> tuple[LayerCache, ...]:
            dtype = self.decoder.dtype
            return tuple(empty_layer_cache(self.config, batch_size, length, dtype) for _ in range(count))

        return Cache(
            layers=layers(self.config.num_layers),
            value_layers=layers(self.num_value_layers),
            mask=jnp.zeros((batch_size, length), bool),
            key_positions=jnp.zeros((batch_size, length), jnp.int32),
            positions=jnp.zeros((batch_size,), jnp.int32),
            column=jnp.zeros((), jnp.int32),
        )

    def decode(
        self, params: Params, frozen: Frozen, inputs: ModelInputs, cache: Cache
    ) -> tuple[Features, Cache]:
        """Appends the inputs to the cache."""
        cache, positions, filled = cache_tokens(cache, inputs.attention_mask)
        context = cached_context(self.config, cache, positions)
        weights = _merged(params, frozen)
        start, stop = self.config.num_layers - self.num_value_layers, self.config.num_layers
        x = self._embed(weights, inputs, positions)
        shared, lower = self._run(weights, x, context, 0, start, cache.layers[:start], method="run_layers")
        x, upper = self._run(weights, shared, context, start, stop, cache.layers[start:], method="run_layers")
        value = hidden = self._run(weights, x, method="norm")
        value_layers = cache.value_layers
        if VALUE_BRANCH in params:
            own = params[VALUE_BRANCH]
            x, value_layers = self._run(own, shared, context, start, stop, value_layers, method="run_layers")
            value = self._run(own, x, method="norm")
        filled = filled._replace(layers=lower + upper, value_layers=value_layers)
        return Features(hidden, value), filled

    def _context(self, inputs: ModelInputs) -> tuple[AttentionContext, Array]:
        positions = token_positions(inputs.attention_mask, inputs.segment_ids)
        return full_context(self.config, inputs.attention_mask, positions, inputs.segment_ids), positions

    def _embed(
        self, weights: Params, inputs: ModelInputs, positions: Array, key: PRNGKey | None = None
    ) -> Array:
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        tokens = jnp.where(inputs.attention_mask, inputs.tokens, 0)
        return self._run(weights, tokens, positions, method="embed_tokens", dropout_key=key)

    def _run(self, weights: Params, *args: Any, method: str, dropout_key: PRNGKey | None = None) -> Any:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return self.decoder.apply({"params": weights}, *args, method=method, rngs=rngs)


def branch_start(
    config: TransformerConfig, num_layers_unfrozen: int, num_value_layers_unfrozen: int = 0
) -> int | None:
    """Index of the first layer above the frozen trunk; None where the embedding trains and there is no trunk.

    Raises:
      ValueError: If a count is out of range.
    """
    if not -1 <= num_layers_unfrozen <= config.num_layers:
        raise ValueError(
            f"`num_layers_unfrozen` must be -1 (all), 0 (only heads) or at most the "
            f"{config.num_layers} layers of the model, got {num_layers_unfrozen}."
        )
    if not 0 <= num_value_layers_unfrozen <= config.num_layers:
        raise ValueError(
            f"`num_value_layers_unfrozen` must be between 0 and the {config.num_layers} layers of the model, "
            f"got {num_value_layers_unfrozen}."
        )
    if num_layers_unfrozen == -1:
        return None
    return config.num_layers - max(num_layers_unfrozen, num_value_layers_unfrozen)


def split_params(
    params: Params,
    config: TransformerConfig,
    *,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a whole model into what trains and what is frozen.

    Args:
      params: The whole model, heads included.
      config: The architecture.
      num_layers_unfrozen: As in `make_policy`.
      num_value_layers_unfrozen: As in `make_policy`; the value branch starts as a copy of the last layers.
    Returns:
      (trainable, frozen), disjoint in their keys. No buffer is in both: the trainable tree may be donated.
    """
    branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen)

    def last(count: int) -> set[str]:
        return {f"layers_{index}" for index in range(config.num_layers - count, config.num_layers)}

    if num_layers_unfrozen == -1:
        trained = set(params)
    else:
        trained = last(num_layers_unfrozen) | set(HEADS) | {VALUE_BRANCH}
        if num_layers_unfrozen > 0:
            trained |= {"final_norm", "lm_head"}
    trainable = {name: value for name, value in params.items() if name in trained}
    frozen = {name: value for name, value in params.items() if name not in trained}
    if num_value_layers_unfrozen and VALUE_BRANCH not in params:
        own = last(num_value_layers_unfrozen) | {"final_norm"}
        trainable[VALUE_BRANCH] = _copy({name: params[name] for name in sorted(own)})
    return trainable, frozen


def init_reference(trainable: Params) -> dict[str, Any]:
    """The reference's own parameters: a copy of what trains, without heads and value branch.

    It is a copy because the training state is donated to every update, which deletes the buffers it came in.
    """
    return _copy({name: value for name, value in trainable.items() if name not in (*HEADS, VALUE_BRANCH)})


def merge_params(params: Params, frozen: Frozen) -> dict[str, Any]:
    """The whole model again, as `split_params` took it, for a checkpoint. The value branch is dropped."""
    return {name: value for name, value in {**frozen, **params}.items() if name != VALUE_BRANCH}


def _merged(params: Params, frozen: Frozen) -> Mapping[str, Any]:
    return {**jax.lax.stop_gradient(dict(frozen)), **params}


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
