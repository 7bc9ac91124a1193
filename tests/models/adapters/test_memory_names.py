# SPDX-License-Identifier: Apache-2.0
"""Adapters name modules as transformers holds them in memory, whatever files call their tensors."""

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.memory_names import name_in_memory
from jrl.models.model import CausalLM
from tests.models.family_cases import CASES


def test_modules_of_kimi_linear_bear_the_names_of_memory():
    bound = CausalLM.from_config(CASES["kimi_linear"]).bind(LoraConfig(target_modules="all-linear"))
    names = [module.name for module in bound.modules]
    assert "model.layers.0.self_attn.forget_gate.f_a_proj" in names
    assert "model.layers.1.mlp.shared_experts.gate_proj" in names
    assert not [name for name in names if "block_sparse_moe" in name or name.endswith("mlp.gate")]


def test_names_that_are_the_same_stay():
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.linear_attn.A_log"):
        assert name_in_memory(name) == name
    assert name_in_memory("model.layers.0.self_attn.q_conv1d.weight").endswith("self_attn.conv1d.weight")
