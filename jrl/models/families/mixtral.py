# SPDX-License-Identifier: Apache-2.0
"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with a mixture of experts for the MLP of every layer.

In a checkpoint every expert has tensors of its own; jrl stacks them. Transformers stacks them in memory too, but reads
and writes the separate tensors. Its balancing loss (`output_router_logits`) belongs to no algorithm here and is left
out.
"""

from __future__ import annotations

from typing import Any

from jrl.models.config import Experts, LayerConfig, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family, linear, vector
from jrl.models.families.rope import read_rope


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `MixtralConfig`.

    Raises:
      ValueError: If there are too few experts, or the router is noisy, or the activation or the scaling of the rotary
        positions is not implemented.
    """
    if hf.router_jitter_noise:
        raise ValueError(
            f"mixtral: `router_jitter_noise` must be 0, got {hf.router_jitter_noise}: noise in the router is not "
            "implemented."
        )
    head_dim = llama_like.read_head_dim(hf)
    layer = LayerConfig(
        head_dim**-0.5,
        hf.sliding_window,
        read_rope("mixtral", hf.rope_parameters, head_dim),
        read_experts("mixtral", hf, hf.intermediate_size, renormalize=True),
    )
    return llama_like.read_config("mixtral", hf, (layer,) * hf.num_hidden_layers, hf.hidden_act)


def read_experts(
    model_type: str, hf: Any, width: int, *, renormalize: bool, count: int | None = None
) -> Experts:
    """The mixture of experts of a config.

    Args:
      model_type: Of the config.
      hf: A transformers config with Mixtral's names, or Qwen's.
      width: Inner width of one expert.
      renormalize: The weights of the chosen experts add up to 1.
      count: Of the experts; None: `num_local_experts` or `num_experts`.
    Raises:
      ValueError: If a token cannot visit as many experts as it should.
    """
    if count is None:
        fields = hf.to_dict()
        count = fields["num_local_experts" if "num_local_experts" in fields else "num_experts"]
    if not 1 <= hf.num_experts_per_tok <= count:
        raise ValueError(
            f"{model_type}: `num_experts_per_tok` must be between 1 and the number of experts, "
            f"{count}; got {hf.num_experts_per_tok}."
        )
    return Experts(count, hf.num_experts_per_tok, width, renormalize)


def expert_entries(
    config: TransformerConfig,
    experts: Experts,
    name: str,
    path: str,
    *,
    gate: str | None,
    up: str,
    down: str,
    router: str = "gate",
) -> list[Entry]:
    """Router and experts of one layer.

    Args:
      config: Of the decoder.
      experts: Of this layer.
      name: Of the module in the checkpoint, "model.layers.0.mlp".
      path: Of its parameters, "layers_0/experts".
      gate: Name of an expert's gate there; None: it has none.
      up: Name of its up.
      down: Name of its down.
      router: Name of the router there.
    """
    routed = (experts.count, config.width)
    read_width = experts.latent_width or config.width
    wide, narrow = (experts.width, read_width), (read_width, experts.width)
    found = [Entry(f"{name}.{router}.weight", (f"{path}/router/kernel",), linear(), routed)]
    if experts.scoring == "sigmoid":
        bias = f"{name}.gate.e_score_correction_bias"
        found.append(Entry(bias, (f"{path}/choice_bias",), vector(), (experts.count,)))
    for index in range(experts.count):
        for hf_part, part, shape in ((gate, "gate", wide), (up, "up", wide), (down, "down", narrow)):
            if hf_part is not None:
                tensor = f"{name}.experts.{index}.{hf_part}.weight"
                found.append(Entry(tensor, (f"{path}/{part}",), linear(), shape, index))
    return found


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a Mixtral checkpoint."""
    found = llama_like.outer_entries(config)
    for index, layer in enumerate(config.layers):
        assert layer.experts is not None
        found += llama_like.attention_block_entries(config, index)
        name, path = f"model.layers.{index}.block_sparse_moe", f"layers_{index}/experts"
        found += expert_entries(config, layer.experts, name, path, gate="w1", up="w3", down="w2")
    return found


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read_config=read_config,
    entries=entries,
    base_prefix="model.",
    ignored=llama_like.IGNORED,
)
