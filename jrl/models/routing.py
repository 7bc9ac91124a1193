# SPDX-License-Identifier: Apache-2.0
"""Records of a mixture's routers: the experts that tokens visit, to visit them again, and their load.

Routing replay: a sampler that rounds otherwise than the learner sends some tokens to other experts, and the ratio of
the two policies is far from 1 before the first step. Replay fixes the choice and nothing else: the weights of the
chosen experts are the router's own, so that gradients pass through them.

Reference: Ma et al. 2025, arXiv:2510.11370 ("rollout routing replay").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jrl.models.config import TransformerConfig
from jrl.ops.experts import expert_load
from jrl.typing import ExpertLoad

REPLAYED, ROUTED = "replayed", "routed"
"""Collections of variables: choices that routers are given, and what they did."""
CHOSEN, SHARES = "chosen", "shares"
OWN_CHOICE = -1
"""In the place of every expert's number where a token has no record: its router chooses."""


def expert_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Numbers of the layers with a mixture of experts, ascending."""
    return tuple(index for index, layer in enumerate(config.layers) if layer.experts is not None)


def check_expert_axis(config: Any, parts: int) -> None:
    """Refuses to split the experts of a model that has none.

    Args:
      config: The architecture, of a decoder or an encoder and decoder.
      parts: Size of the mesh's axis `expert`.
    Raises:
      ValueError: If it is larger than 1, and there are none.
    """
    if parts > 1 and not (isinstance(config, TransformerConfig) and expert_layers(config)):
        raise ValueError(
            f"`mesh` must have no axis `expert` for a model without a mixture of experts, got expert={parts}: put the "
            "devices on `data`, `fsdp` or `tensor`."
        )


def record_shape(config: TransformerConfig) -> tuple[int, int]:
    """(M, k): layers with experts, and experts that a token visits in each.

    Raises:
      ValueError: If there are no experts, or layers differ in how many a token visits.
    """
    layers = expert_layers(config)
    visits = {experts.per_token for layer in config.layers if (experts := layer.experts) is not None}
    if len(visits) != 1:
        raise ValueError(
            "`routing_replay` must be False for a model without a mixture of experts, or whose layers differ in how "
            f"many experts a token visits; got a model with {sorted(visits) or 'none'}."
        )
    return len(layers), visits.pop()


def record_dtype(config: TransformerConfig) -> Any:
    """The smallest integers that hold every expert's number."""
    most = max(layer.experts.count for layer in config.layers if layer.experts is not None)
    return jnp.int8 if most <= np.iinfo(np.int8).max + 1 else jnp.int16


def replayed(config: TransformerConfig, record: Int[Array, "B L M k"] | None) -> Mapping[str, Any]:
    """Variables by which the decoder's routers take recorded choices, beside its parameters; {} without a record."""
    if record is None:
        return {}
    layers = {
        f"layers_{layer}": {"experts": {CHOSEN: record[:, :, index]}}
        for index, layer in enumerate(expert_layers(config))
    }
    return {REPLAYED: layers}


def load_of(routed: Mapping[str, Any], mask: Bool[Array, "B L"], config: TransformerConfig) -> ExpertLoad:
    """Load of one layer's experts, from the collection that it left; zeros of a layer without any."""
    if not routed:
        return no_load(config, mask.shape[0])
    noted = routed[ROUTED]["experts"]
    return expert_load(noted[SHARES], noted[CHOSEN], mask)


def no_load(config: TransformerConfig, num_rows: int) -> ExpertLoad:
    """Load of no token.

    Raises:
      ValueError: If there are no experts, or layers differ in how many.
    """
    counts = {experts.count for layer in config.layers if (experts := layer.experts) is not None}
    if len(counts) != 1:
        raise ValueError(
            "`router_aux_loss_coef` must be 0 for a model without a mixture of experts, or whose layers differ in how "
            f"many they have; got a model with {sorted(counts) or 'none'}."
        )
    zeros = jnp.zeros((num_rows, counts.pop()), jnp.float32)
    return ExpertLoad(zeros, zeros, zeros[:, 0])


def chosen_of(
    config: TransformerConfig, routed: Mapping[str, Any], layers: Sequence[int]
) -> Int[Array, "B Q m k"]:
    """The choices of some layers, from the collection that a pass through the decoder left.

    Args:
      config: The decoder.
      routed: The collection `ROUTED`.
      layers: Numbers of layers with experts, in the order of the result.
    """
    chosen = [routed[f"layers_{layer}"]["experts"][CHOSEN] for layer in layers]
    return jnp.stack(chosen, axis=2).astype(record_dtype(config))
