# SPDX-License-Identifier: Apache-2.0
"""Names of tensors and modules in transformers' memory, where PEFT finds them: some files have older ones."""

from __future__ import annotations

from types import MappingProxyType

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Parameters that stack the experts of a layer there."""

_RENAMED = MappingProxyType(
    {
        # Granite 4
        ".block_sparse_moe.input_linear.weight": f".block_sparse_moe.experts.{GATE_UP}",
        ".block_sparse_moe.output_linear.weight": f".block_sparse_moe.experts.{DOWN}",
        ".block_sparse_moe.router.layer": ".block_sparse_moe.router",
        # Mixtral
        ".block_sparse_moe.gate": ".mlp.gate",
        ".block_sparse_moe.experts.": ".mlp.experts.",
        # Kimi Linear
        ".block_sparse_moe.shared_experts": ".mlp.shared_experts",
        **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in ("f_a_proj", "f_b_proj")},
        **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in ("A_log", "dt_bias")},
        **dict.fromkeys((f".self_attn.{part}_conv1d" for part in "qkv"), ".self_attn.conv1d"),
    }
)
"""Parts of older names that files have → those in transformers' memory."""


def name_in_memory(name: str) -> str:
    """The name of a tensor or module in transformers' memory, where PEFT finds it: some files have an older one."""
    for old, new in _RENAMED.items():
        if old in name:
            return name.replace(old, new)
    return name
