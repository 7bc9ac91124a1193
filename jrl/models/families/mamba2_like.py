# SPDX-License-Identifier: Apache-2.0
"""Options and tensors of a layer of Mamba-2, under the names that families have for them."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, Mamba2, TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, channels, linear, require, vector
from jrl.models.families.tables import attention_entries, linear_entries, norm_entries

NAMES = llama_like.Names(
    final_norm="final_layernorm",
    norms=(("input_layernorm", "attn_norm"), ("pre_ff_layernorm", "mlp_norm")),
)
"""Tensors around the mixers of Falcon-H1, Bamba and Jamba."""


def check_groups(model_type: str, option: str, groups: int, heads: int) -> None:
    """Refuses groups that do not share the heads evenly.

    Raises:
      ValueError: If `groups`, which the config calls `option`, does not divide `heads`.
    """
    if heads % groups:
        raise ValueError(f"{model_type}: `{option}` must divide the {heads} heads of Mamba-2, got {groups}.")


def read_mamba(model_type: str, hf: Any, inner: int | None = None) -> Mamba2:
    """The state space of a config with Bamba's names, `mamba_n_heads` and so on.

    Args:
      model_type: Of the config.
      hf: A transformers config.
      inner: Width of all heads together; None: `mamba_expand` times the decoder's.
    Raises:
      ValueError: If projections have biases, the groups do not divide the heads, or the activation is not SiLU.
    """
    require(model_type, "hidden_act", "silu", hf.hidden_act, "the state space computes with SiLU")
    # No published model has them, and with them torch lets padding into a row's convolutions.
    because = "projections of the state space with biases are not implemented"
    require(model_type, "mamba_proj_bias", False, hf.mamba_proj_bias, because)
    check_groups(model_type, "mamba_n_groups", hf.mamba_n_groups, hf.mamba_n_heads)
    inner = int(hf.mamba_expand * hf.hidden_size) if inner is None else inner
    head_dim = inner // hf.mamba_n_heads
    require(model_type, "mamba_d_head", head_dim, hf.mamba_d_head, "all heads together have the inner width")
    return Mamba2(
        heads=hf.mamba_n_heads,
        head_dim=head_dim,
        groups=hf.mamba_n_groups,
        state_dim=hf.mamba_d_state,
        taps=hf.mamba_d_conv,
        taps_bias=hf.mamba_conv_bias,
        step_limits=tuple(hf.time_step_limit),
    )


def mixer_entries(config: TransformerConfig, layer: LayerConfig, name: str, path: str) -> list[Entry]:
    """Tensors of what mixes tokens in a layer of Mamba-2 or of attention, "model.layers.0" and "layers_0"."""
    if isinstance(layer.mixer, Mamba2):
        return entries(config, layer.mixer, f"{name}.mamba", f"{path}/attn")
    return attention_entries(config, f"{name}.self_attn", f"{path}/attn")


def entries(config: TransformerConfig, sizes: Mamba2, name: str, path: str) -> list[Entry]:
    """Every tensor of a layer.

    Args:
      config: Of the decoder.
      sizes: Of the layer.
      name: Of the module in the checkpoint, "model.layers.0.mamba".
      path: Of its parameters, "layers_0/attn/mamba".
    """
    inner, heads = sizes.heads * sizes.head_dim, (sizes.heads,)
    channel_count = inner + 2 * sizes.groups * sizes.state_dim
    into = tuple(f"{path}/{part}" for part in ("gate", "v", "k", "q", "step"))
    taps = tuple(f"{path}/{part}_taps" for part in "vkq")
    found = [
        *linear_entries(
            f"{name}.in_proj", into, config.width, inner + channel_count + sizes.heads, bias=False
        ),
        Entry(f"{name}.conv1d.weight", taps, channels(), (channel_count, 1, sizes.taps)),
        Entry(f"{name}.A_log", (f"{path}/log_rates",), vector(), heads),
        Entry(f"{name}.D", (f"{path}/skip",), vector(), heads),
        Entry(f"{name}.dt_bias", (f"{path}/step_bias",), vector(), heads),
        *linear_entries(
            f"{name}.out_proj", (f"{path}/o",), inner, config.width, bias=False, weight=linear(2)
        ),
    ]
    if sizes.taps_bias:
        biases = tuple(f"{tap}_bias" for tap in taps)
        found.append(Entry(f"{name}.conv1d.bias", biases, vector(), (channel_count,)))
    if sizes.norm is not None:
        found += norm_entries(config, f"{name}.norm", f"{path}/norm", inner)
    return found
