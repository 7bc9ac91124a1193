# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the families whose layers are not all plain attention. Sizes are odd on purpose."""

from __future__ import annotations

from typing import Any

from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.models.case_fields import MODERN

TYPES = ["linear_attention", "full_attention", "linear_attention"]
DELTA = MODERN | dict(num_hidden_layers=3, layer_types=TYPES, head_dim=16, linear_num_key_heads=2)
DELTA |= dict(linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
# What a recurrence reads is normalised, and may be nearly 0 before. With a small epsilon rounding is then seen in full:
# torch in float32 is as far from torch in float64 as jrl is.
DELTA |= dict(rms_norm_eps=1e-2)
EXPERTS = dict(
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16
)
MOE = {name: value for name, value in DELTA.items() if name != "intermediate_size"} | EXPERTS
GROUPS = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=2)
GROUPS |= dict(n_group=3, topk_group=2, routed_scaling_factor=1.7)
LATENT = MODERN | GROUPS | dict(num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=12)
LATENT |= dict(qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10, num_hidden_layers=3)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
YARN |= dict(mscale=0.7, mscale_all_dim=1.3, beta_fast=32.0, beta_slow=1.0)
CONV = MODERN | dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
CONV |= dict(block_multiple_of=20, block_ffn_dim_multiplier=1.3)
# A state space with sizes that are all different, two groups of three heads each.
STATE = MODERN | dict(mamba_d_ssm=42, mamba_n_heads=6, mamba_d_head=7, mamba_n_groups=2, mamba_d_state=5)
STATE |= dict(mamba_norm_before_gate=False, rms_norm_eps=1e-2)
MULTIPLIERS: dict[str, Any] = dict(
    embedding_multiplier=1.7, lm_head_multiplier=0.6, key_multiplier=1.3, mlp_multipliers=[0.8, 1.4]
)
MULTIPLIERS |= dict(attention_in_multiplier=0.7, attention_out_multiplier=1.2, ssm_in_multiplier=1.1)
MULTIPLIERS |= dict(ssm_out_multiplier=0.9, ssm_multipliers=[0.9, 1.2, 0.7, 1.3, 0.8])
# Bamba's names of a state space, whose inner width is twice the decoder's: four heads of 16 in two groups.
STATE_OF_BAMBA = MODERN | dict(mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=5, rms_norm_eps=1e-2)
GRANITE = STATE_OF_BAMBA | dict(num_hidden_layers=3, layer_types=TYPES, shared_intermediate_size=40)
GRANITE |= dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.1)
GRANITE |= dict(logits_scaling=2.5, num_local_experts=5, num_experts_per_tok=2)
# In the words of the class of transformers, and of the published files.
KIMI = MODERN | dict(num_hidden_layers=3, layer_types=TYPES, linear_num_heads=4, linear_head_dim=8)
KIMI |= dict(num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6)
KIMI |= dict(v_head_dim=10, num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=3)
KIMI |= dict(topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7, rms_norm_eps=1e-2)
KIMI_FILE = MODERN | dict(num_key_value_heads=4, num_hidden_layers=3, kv_lora_rank=12, q_lora_rank=None)
KIMI_FILE |= dict(qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, model_max_length=128, num_experts=6)
KIMI_FILE |= dict(num_experts_per_token=3, num_expert_group=1, topk_group=1, num_shared_experts=1)
KIMI_FILE |= dict(moe_intermediate_size=24, moe_renormalize=True, first_k_dense_replace=1, rms_norm_eps=1e-2)
KIMI_FILE |= dict(moe_router_activation_func="sigmoid", use_grouped_topk=True, mla_use_nope=True)
KIMI_FILE |= dict(moe_layer_freq=1, rope_theta=1e4, routed_scaling_factor=2.4)
KIMI_LINEAR = dict(kda_layers=[1, 3], full_attn_layers=[2], num_heads=3, head_dim=6, short_conv_kernel_size=3)
JAMBA = MODERN | dict(num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, rms_norm_eps=1e-2)
JAMBA |= dict(expert_layer_period=2, expert_layer_offset=0, num_experts=5, mamba_d_state=5, mamba_dt_rank=7)
NEMOTRON = {name: value for name, value in MODERN.items() if name != "num_hidden_layers"}
NEMOTRON |= dict(mamba_num_heads=6, mamba_head_dim=7, n_groups=2, ssm_state_size=5, head_dim=12)
# Torch's step of decoding knows no limit of the recurrence's steps, whole rows do: here it never acts.
NEMOTRON |= dict(layer_norm_epsilon=1e-2, time_step_min=1e-9)
NEMOTRON_MOE = {name: value for name, value in GROUPS.items() if name != "n_shared_experts"}
NEMOTRON_MOE |= dict(moe_shared_expert_intermediate_size=20)

CASES: dict[str, Any] = {
    "qwen3_next": Qwen3NextConfig(**DELTA, **EXPERTS),
    "qwen3_next-some-experts": Qwen3NextConfig(
        **DELTA | EXPERTS | dict(linear_num_key_heads=3, linear_num_value_heads=3, attention_bias=True),
        decoder_sparse_step=2,
        norm_topk_prob=False,
        linear_conv_kernel_dim=3,
    ),
    "qwen3_5_text": Qwen3_5TextConfig(**DELTA),
    "qwen3_5_text-tied": Qwen3_5TextConfig(
        **DELTA | dict(tie_word_embeddings=True, linear_num_value_heads=6, linear_conv_kernel_dim=2)
    ),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**MOE),
    "deepseek_v3": DeepseekV3Config(**LATENT, first_k_dense_replace=1),
    "deepseek_v3-whole-queries": DeepseekV3Config(
        **LATENT | dict(q_lora_rank=None, norm_topk_prob=False, rope_interleave=False),
        first_k_dense_replace=2,
    ),
    "deepseek_v3-yarn": DeepseekV3Config(
        **LATENT | dict(attention_bias=True, v_head_dim=5), first_k_dense_replace=0, rope_parameters=YARN
    ),
    "deepseek_v3-kimi-k2": DeepseekV3Config(
        **LATENT | dict(n_group=1, topk_group=1, n_shared_experts=1, num_experts_per_tok=3),
        first_k_dense_replace=1,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0),
    ),
    "glm4_moe": Glm4MoeConfig(**MODERN | GROUPS | dict(head_dim=12, num_hidden_layers=3)),
    "glm4_moe-qk-norm": Glm4MoeConfig(
        **MODERN | GROUPS, use_qk_norm=True, attention_bias=True, first_k_dense_replace=0
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT),
    "glm4_moe_lite-types": Glm4MoeLiteConfig(**LATENT, mlp_layer_types=["sparse", "dense", "sparse"]),
    "kimi_linear": KimiLinearConfig(**KIMI),
    "kimi_linear-file": KimiLinearConfig(
        **{key: value for key, value in KIMI_FILE.items() if key != "max_position_embeddings"},
        linear_attn_config=KIMI_LINEAR,
    ),
    "kimi_linear-odd": KimiLinearConfig(
        **KIMI
        | dict(linear_num_heads=3, linear_head_dim=5, linear_conv_kernel_dim=2, norm_topk_prob=False)
        | dict(layer_types=["full_attention", *TYPES[::2]], v_head_dim=5),
        mlp_layer_types=["sparse", "dense", "sparse"],
        attention_bias=True,
        hidden_act="gelu",
    ),
    "lfm2": Lfm2Config(**CONV),
    "lfm2-four-taps": Lfm2Config(
        **CONV | dict(conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False)
    ),
    "falcon_h1": FalconH1Config(**STATE, **MULTIPLIERS),
    "falcon_h1-norm": FalconH1Config(
        **STATE | dict(mamba_rms_norm=True, mamba_conv_bias=False, mamba_d_conv=3, mamba_n_groups=3),
        attention_bias=True,
        mlp_bias=True,
    ),
    "falcon_h1-norm-first": FalconH1Config(
        **STATE
        | MULTIPLIERS
        | dict(mamba_d_ssm=None, mamba_d_head="auto", mamba_n_heads=4)
        | dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
        tie_word_embeddings=True,
    ),
    "bamba": BambaConfig(**STATE_OF_BAMBA | dict(num_hidden_layers=3), attn_layer_indices=[1]),
    "bamba-odd": BambaConfig(
        **STATE_OF_BAMBA
        | dict(mamba_n_heads=6, mamba_n_groups=3, mamba_expand=3, mamba_d_conv=2, mamba_conv_bias=False),
        attn_layer_indices=[0],
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(**GRANITE | dict(intermediate_size=24)),
    "granitemoehybrid-rope": GraniteMoeHybridConfig(
        **GRANITE
        | dict(mamba_n_heads=6, mamba_n_groups=3, mamba_expand=3, mamba_d_conv=3, attention_bias=True),
        position_embedding_type="rope",
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid-no-experts": GraniteMoeHybridConfig(
        **GRANITE | dict(num_local_experts=0, layer_types=["full_attention", *TYPES[:2]])
    ),
    "jamba": JambaConfig(**JAMBA),
    "jamba-odd": JambaConfig(
        **JAMBA
        | dict(num_hidden_layers=4, expert_layer_period=3, num_experts_per_tok=3, num_key_value_heads=4),
        mamba_conv_bias=False,
        mamba_d_conv=2,
        mamba_expand=3,
        tie_word_embeddings=True,
    ),
    "jamba-no-experts": JambaConfig(**JAMBA | dict(num_experts=1, mamba_dt_rank="auto", mamba_d_state=4)),
    "nemotron_h": NemotronHConfig(**NEMOTRON | NEMOTRON_MOE, hybrid_override_pattern="MEM*-"),
    "nemotron_h-odd": NemotronHConfig(
        **NEMOTRON | dict(n_groups=3, conv_kernel=2, use_conv_bias=False, mlp_bias=True),
        hybrid_override_pattern="*MM-",
        mlp_hidden_act="silu",
    ),
    "nemotron_h-latent-experts": NemotronHConfig(
        **NEMOTRON | NEMOTRON_MOE | dict(norm_topk_prob=False, num_experts_per_tok=3),
        hybrid_override_pattern="E*M-",
        moe_latent_size=12,
        mlp_bias=True,
    ),
}
