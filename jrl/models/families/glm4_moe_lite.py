# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7 Flash (Z.ai 2026): DeepSeek-V3 with a list of the layers that have experts."""

from __future__ import annotations

from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import deepseek_v3, llama_like
from jrl.models.families.base import Family


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `Glm4MoeLiteConfig`.

    Raises:
      ValueError: If a type of layer is unknown, sizes of heads or experts do not fit together, or the activation or the
        scaling of the rotary positions is not implemented.
    """
    return deepseek_v3.read_latent("glm4_moe_lite", hf, read_sparse("glm4_moe_lite", hf))


def read_sparse(model_type: str, hf: Any) -> list[bool]:
    """True for each layer with experts, from `mlp_layer_types`.

    Raises:
      ValueError: If there is not one type a layer, or one is unknown.
    """
    kinds = list(hf.mlp_layer_types)
    if len(kinds) != hf.num_hidden_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise ValueError(
            f"{model_type}: `mlp_layer_types` must have num_hidden_layers = {hf.num_hidden_layers} entries, each "
            f"dense or sparse; got {kinds}."
        )
    return [kind == "sparse" for kind in kinds]


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read_config=read_config,
    entries=deepseek_v3.entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
    has_prediction_layer=True,
)
