# SPDX-License-Identifier: Apache-2.0
"""A decoder as `PolicyFns`: what trains, what is frozen, and the cut between trunk and branch.

With `num_layers_unfrozen = k > 0` the last k layers, the final norm and an untied head train, and all below
is a frozen trunk that the policy and its reference share: the reference is a copy of the trained part alone
(the "hydra" of trlX). −1 trains everything; 0 trains nothing but the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.attention import Cache, cached_context, empty_layer_cache, full_context, token_positions
from jrl.models.config import TransformerConfig
from jrl.models.heads import ValueHead, check_value_head
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
    value_start = config.num_layers - num_value_layers_unfrozen
    decoder = Decoder(config, compute_dtype, remat)

    def run(params: Params, *args: Any, method: str, dropout_key: PRNGKey | None = None) -> Any:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return decoder.apply({"params": params}, *args, method=method, rngs=rngs)

    def embed(params: Params, inputs: ModelInputs, positions: Array, key: PRNGKey | None = None) -> Array:
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        tokens = jnp.where(inputs.attention_mask, inputs.tokens, 0)
        return run(params, tokens, positions, method="embed_tokens", dropout_key=key)

    def trunk(frozen: Frozen, inputs: ModelInputs) -> Trunk:
        if cut is None:
            return None
        positions = token_positions(inputs.attention_mask, inputs.segment_ids)
        context = full_context(config, inputs.attention_mask, positions, inputs.segment_ids)
        x = embed(frozen, inputs, positions)
        return run(frozen, x, context, 0, cut, method="run_layers")[0]

    def branch(
        params: Params, frozen: Frozen, trunk: Trunk, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Features:
        positions = token_positions(inputs.attention_mask, inputs.segment_ids)
        context = full_context(config, inputs.attention_mask, positions, inputs.segment_ids)
        key, value_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        weights = _merged(params, frozen)
        x = embed(weights, inputs, positions, key) if cut is None else jax.lax.stop_gradient(trunk)
        shared, _ = run(weights, x, context, cut or 0, value_start, method="run_layers", dropout_key=key)
        x, _ = run(
            weights, shared, context, value_start, config.num_layers, method="run_layers", dropout_key=key
        )
        hidden = run(weights, x, method="norm")
        # A reference has no value branch: nobody asks it for values.
        if VALUE_BRANCH not in params:
            return Features(hidden, hidden)
        own = params[VALUE_BRANCH]
        x, _ = run(
            own, shared, context, value_start, config.num_layers, method="run_layers", dropout_key=value_key
        )
        return Features(hidden, run(own, x, method="norm"))

    def logits(params: Params, frozen: Frozen, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        return run(_merged(params, frozen), hidden, method="logits")

    def heads(params: Params, hidden: Float[Array, "*rows D"]) -> dict[str, Array]:
        if value_head is None:
            return {}
        values: Any = ValueHead(value_head).apply({"params": params["v_head"]}, hidden)
        return {"values": values}

    def init_cache(batch_size: int, length: int) -> Cache:
        def layers(count: int) -> tuple[Any, ...]:
            return tuple(empty_layer_cache(config, batch_size, length, compute_dtype) for _ in range(count))

        return Cache(
            layers=layers(config.num_layers),
            value_layers=layers(num_value_layers_unfrozen),
            mask=jnp.zeros((batch_size, length), bool),
            positions=jnp.zeros((batch_size,), jnp.int32),
            column=jnp.zeros((), jnp.int32),
        )

    def decode(params: Params, frozen: Frozen, inputs: ModelInputs, cache: Cache) -> tuple[Features, Cache]:
        mask = inputs.attention_mask
        counts = jnp.cumsum(mask.astype(jnp.int32), axis=1)
        positions = jnp.maximum(cache.positions[:, None] + counts - 1, 0)
        known = jax.lax.dynamic_update_slice(cache.mask, mask, (0, cache.column))
        context = cached_context(config, cache._replace(mask=known), positions)
        weights = _merged(params, frozen)
        x = embed(weights, inputs, positions)
        shared, lower = run(
            weights, x, context, 0, value_start, cache.layers[:value_start], method="run_layers"
        )
        x, upper = run(
            weights,
            shared,
            context,
            value_start,
            config.num_layers,
            cache.layers[value_start:],
            method="run_layers",
        )
        value = hidden = run(weights, x, method="norm")
        value_layers = cache.value_layers
        if VALUE_BRANCH in params:
            own = params[VALUE_BRANCH]
            x, value_layers = run(
                own, shared, context, value_start, config.num_layers, value_layers, method="run_layers"
            )
            value = run(own, x, method="norm")
        cache = Cache(
            layers=lower + upper,
            value_layers=value_layers,
            mask=known,
            positions=cache.positions + counts[:, -1],
            column=cache.column + mask.shape[1],
        )
        return Features(hidden, value), cache

    return PolicyFns(trunk, branch, logits, heads, init_cache, decode)


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
