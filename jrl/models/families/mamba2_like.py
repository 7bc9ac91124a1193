# SPDX-License-Identifier: Apache-2.0
"""Tensors of a layer of Mamba-2, under the names that all families have for them."""

from __future__ import annotations

from jrl.models.config import Mamba2, TransformerConfig
from jrl.models.families.base import Entry, channels, linear, vector
from jrl.models.families.tables import linear_entries, norm_entries


def check_groups(model_type: str, option: str, groups: int, heads: int) -> None:
    """Refuses groups that do not share the heads evenly.

    Raises:
      ValueError: If `groups`, which the config calls `option`, does not divide `heads`.
    """
    if heads % groups:
        raise ValueError(f"{model_type}: `{option}` must divide the {heads} heads of Mamba-2, got {groups}.")


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
