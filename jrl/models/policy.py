# SPDX-License-Identifier: Apache-2.0
"""A decoder as `PolicyFns`: what trains, what is frozen, and the cut between trunk and branch.

With `num_layers_unfrozen = k > 0` the last k layers, the final norm and an untied head train, and all below
is a frozen trunk that the policy and its reference share: the reference is a copy of the trained part alone
(the "hydra" of trlX). −1 trains everything; 0 trains nothing but the heads. An adapter overrides the number: the
whole model is frozen, and is the reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jrl.models.adapters.lora import Lora
from jrl.models.adapters.virtual_tokens import PREFIX, PROMPT, VirtualTokens
from jrl.models.cache import forget, own_columns, within
from jrl.models.config import TransformerConfig
from jrl.models.decoder_policy import LORA, VALUE_BRANCH, DecoderPolicy
from jrl.models.fused_attention import AttnImplementation, choose_attention, require_einsum
from jrl.models.heads import HEADS, read_heads
from jrl.models.noise import EmbeddingNoise
from jrl.models.products import loop_weights
from jrl.models.quantize import QuantizedKernel
from jrl.models.rounding import round_kernels
from jrl.models.routing import expert_layers, no_load, record_shape
from jrl.models.transformer import Decoder
from jrl.typing import Frozen, Params, PolicyFns, PRNGKey

ADAPTERS = (LORA, PREFIX, PROMPT)


def make_policy(
    config: TransformerConfig,
    *,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | VirtualTokens | None = None,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    noise: EmbeddingNoise | None = None,
    attn_implementation: AttnImplementation = "einsum",
    share_layers: bool | None = None,
    routing_replay: bool = False,
    counts_experts: bool = False,
) -> PolicyFns:
    """The functions by which algorithms know this decoder.

    Args:
      config: The architecture.
      num_layers_unfrozen: How many of the last layers train; −1 is everything, 0 only the heads.
      num_value_layers_unfrozen: How many of the last layers the value function has its own copy of.
      adapter: Trains in place of layers, whatever `num_layers_unfrozen` says; bound to this model.
      compute_dtype: Of activations and matrix products.
      remat: Recompute each layer in the backward pass: less memory for about a third more compute.
      noise: On the embeddings, where a dropout key is given. There is no frozen trunk then: the noise comes first.
      attn_implementation: How trunk, branch and the first tokens of a cache attend. By "xla" and "cudnn" they read rows
        padded on the right alone, prompts on either side: any other becomes NaN, and packed rows go through einsums. By
        "splash" they read all of these; where a layer has a window, a row with padding between its tokens becomes NaN.
        Attention dropout and virtual tokens go through einsums in any case. So do later tokens of a cache, but under
        "cudnn" where `jrl.models.decode_attention` serves.
      share_layers: Equal layers share one body of the programs, wherever whole rows are read; None: where that is the
        platform's form. See `jrl.models.layer_loop`.
      routing_replay: `decode` records which experts tokens visit; see `jrl.models.routing`. Whole rows visit the
        experts that they bring in any case.
      counts_experts: `branch` counts the load of the experts in its layers, those of the frozen trunk left out.
    Raises:
      ValueError: If a count is out of range, a value branch is to follow virtual tokens, the implementation does not
        serve this model on these devices, or there are no experts to record, or none that train to count.
    """
    for name, is_on, check in (
        ("routing_replay", routing_replay, partial(record_shape, config)),
        ("router_aux_loss_coef", counts_experts, partial(no_load, config, 1)),
    ):
        if is_on:
            check()
        if is_on and isinstance(adapter, VirtualTokens):
            raise ValueError(
                f"`{name}` must be off under {adapter.name} tuning: virtual tokens visit experts too, and neither "
                "records nor loads are kept of them."
            )
    if isinstance(adapter, VirtualTokens):
        # The reference too, so that it differs from the fresh policy by the tokens alone and not by rounding.
        require_einsum(attn_implementation, "virtual tokens are read from a cache")
        attn_implementation = "einsum"
    chosen = choose_attention(attn_implementation, config, compute_dtype)
    attention = None if chosen == "einsum" else chosen
    cut = branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen, adapter)
    num_trained = 0 if adapter is not None else num_layers_unfrozen
    first_trained = 0 if num_trained == -1 else config.num_layers - num_trained
    if isinstance(adapter, Lora):
        first_trained = min(first_trained, adapter.first_whole_layer)
    decoder = Decoder(config, compute_dtype, remat, share_layers, first_trained)
    if counts_experts:
        _check_counted(config, cut or 0, noise)
    cut = cut if noise is None else None
    policy = DecoderPolicy(
        config,
        decoder,
        cut,
        num_value_layers_unfrozen,
        adapter,
        noise,
        attention,
        routing_replay,
        counts_experts,
    )
    return PolicyFns(
        policy.trunk,
        policy.branch,
        policy.logits,
        partial(read_heads, config.vocab_size, config.padded_vocab_size),
        policy.init_cache,
        policy.decode,
        partial(adapter.loop_weights, dtype=compute_dtype) if isinstance(adapter, Lora) else loop_weights,
        partial(adapter.rounded if isinstance(adapter, Lora) else round_kernels, dtype=compute_dtype),
        own_columns,
        forget,
        not config.is_recurrent,
        policy.visited,
        within,
    )


def _check_counted(config: TransformerConfig, start: int, noise: EmbeddingNoise | None) -> None:
    """Refuses to count experts where the branch, which begins at a layer, has none, or noise lets it begin below."""
    if max(expert_layers(config)) < start:
        raise ValueError(
            f"`router_aux_loss_coef` must be 0 where no layer with experts trains: those that train begin at {start}, "
            f"and experts are in {list(expert_layers(config))}. Raise `num_layers_unfrozen`, or leave the loss out."
        )
    if noise is not None and start:
        raise ValueError(
            "`router_aux_loss_coef` must be 0 beside `neftune_noise_alpha` where layers are frozen: their experts "
            "would be counted, too. Set `num_layers_unfrozen: -1`, or leave one of the two out."
        )


def branch_start(
    config: TransformerConfig,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | VirtualTokens | None = None,
) -> int | None:
    """Index of the first layer above the frozen trunk; None where there is no trunk.

    There is none where the embedding trains, where the lowest layer has an adapter, and after virtual tokens, which
    every layer reads.

    Raises:
      ValueError: If a count is out of range, or a value branch is to follow virtual tokens.
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
    if isinstance(adapter, VirtualTokens):
        if not all(layer.has_keys_alone for layer in config.layers) or config.layer_input_width is not None:
            raise ValueError(
                f"`peft_config` must not ask for {adapter.name} tuning of this model: virtual tokens are keys and "
                "values, or stand before a row's first token, and some of its layers have a cache of another kind, or "
                "read more of a token than its embedding. Take LoRA."
            )
        if num_value_layers_unfrozen:
            raise ValueError(
                f"`num_value_layers_unfrozen` must be 0 under prefix and prompt tuning, got "
                f"{num_value_layers_unfrozen}: the value function's own layers know no virtual tokens."
            )
        return None
    if adapter is not None:
        return min(adapter.first_layer, config.num_layers - num_value_layers_unfrozen) or None
    if num_layers_unfrozen == -1:
        return None
    return config.num_layers - max(num_layers_unfrozen, num_value_layers_unfrozen)


def split_params(
    params: Params,
    config: TransformerConfig,
    *,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | VirtualTokens | None = None,
    key: PRNGKey | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a whole model into what trains and what is frozen.

    Args:
      params: The whole model, heads included, and perhaps an adapter that was loaded.
      config: The architecture.
      num_layers_unfrozen: As in `make_policy`.
      num_value_layers_unfrozen: As in `make_policy`; the value branch starts as a copy of the last layers.
      adapter: As in `make_policy`.
      key: For a fresh adapter, where `params` holds none.
    Returns:
      (trainable, frozen), disjoint in their keys. No buffer is in both: the trainable tree may be donated.
    """
    branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen, adapter)

    def last(count: int) -> set[str]:
        return {f"layers_{index}" for index in range(config.num_layers - count, config.num_layers)}

    trained = {*HEADS, VALUE_BRANCH, *ADAPTERS}
    if adapter is None and num_layers_unfrozen == -1:
        trained = set(params)
    elif adapter is None and num_layers_unfrozen > 0:
        trained |= last(num_layers_unfrozen) | {"final_norm", "embed_out", "lm_head"}
    trainable = {name: value for name, value in params.items() if name in trained}
    frozen = {name: value for name, value in params.items() if name not in trained}
    if num_value_layers_unfrozen and VALUE_BRANCH not in params:
        own = last(num_value_layers_unfrozen) | ({"final_norm", "embed_out"} & params.keys())
        trainable[VALUE_BRANCH] = _float32_copy({name: params[name] for name in sorted(own)})
    if adapter is not None and adapter.name not in params:
        if key is None:
            raise ValueError("`key` must be given to start a fresh adapter.")
        trainable[adapter.name] = jax.jit(adapter.init)(key, frozen)
    return trainable, frozen


def init_reference(trainable: Params) -> dict[str, Any]:
    """The reference's own parameters: a copy of what trains, without heads, value branch and adapter.

    It is a copy because the training state is donated to every update, which deletes the buffers it came in. Under an
    adapter it is empty: the frozen model alone is the reference.
    """
    unread = (*HEADS, VALUE_BRANCH, *ADAPTERS)
    return _copy({name: value for name, value in trainable.items() if name not in unread})


def merge_params(params: Params, frozen: Frozen) -> dict[str, Any]:
    """The whole model again, as `split_params` took it, for a checkpoint. Value branch and adapter are dropped."""
    dropped = (VALUE_BRANCH, *ADAPTERS)
    return {name: value for name, value in {**frozen, **params}.items() if name not in dropped}


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def _float32_copy(tree: Any) -> Any:
    """Trainable weights, whatever the frozen ones they start as are kept in."""
    expanded = jax.tree.map(
        lambda x: x.astype(jnp.float32), tree, is_leaf=lambda x: isinstance(x, QuantizedKernel)
    )
    return _copy(expanded)
