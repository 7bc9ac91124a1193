# SPDX-License-Identifier: Apache-2.0
"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, tied head, one qkv matrix stored (in, out)."""

from __future__ import annotations

from typing import Any

from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.families.base import Entry, Family, conv1d, read_activation, table, vector, vocabulary


def read_config(hf: Any) -> TransformerConfig:
    """Maps a `GPT2Config`.

    Raises:
      ValueError: If the config asks for cross-attention.
    """
    if hf.add_cross_attention:
        raise ValueError(
            "gpt2: `add_cross_attention` must be False: a decoder alone has nothing to attend to."
        )
    scale = (hf.n_embd // hf.n_head) ** -0.5 if hf.scale_attn_weights else 1.0
    by_layer = hf.scale_attn_by_inverse_layer_idx
    return TransformerConfig(
        vocab_size=hf.vocab_size,
        width=hf.n_embd,
        layers=tuple(LayerConfig(scale / (index + 1 if by_layer else 1)) for index in range(hf.n_layer)),
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=hf.n_embd // hf.n_head,
        mlp_width=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        max_positions=hf.n_positions,
        activation=read_activation("gpt2", hf.activation_function),
        gated_mlp=False,
        norm="layer",
        norm_epsilon=hf.layer_norm_epsilon,
        learned_positions=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
        embedding_dropout=hf.embd_pdrop,
        attention_dropout=hf.attn_pdrop,
        residual_dropout=hf.resid_pdrop,
        init_range=hf.initializer_range,
        scale_residual_init=True,
    )


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of a GPT-2 checkpoint."""
    width, inner, vocab = config.width, config.mlp_width, config.vocab_size
    found = [
        Entry("transformer.wte.weight", ("embed/embedding",), vocabulary(transposed=False), (vocab, width)),
        Entry("transformer.wpe.weight", ("position/embedding",), table(), (config.max_positions, width)),
        Entry("transformer.ln_f.weight", ("final_norm/scale",), vector(), (width,)),
        Entry("transformer.ln_f.bias", ("final_norm/bias",), vector(), (width,)),
    ]
    if not config.tie_embeddings:
        found.append(
            Entry("lm_head.weight", ("lm_head/kernel",), vocabulary(transposed=True), (vocab, width))
        )
    for index in range(config.num_layers):
        name, path = f"transformer.h.{index}", f"layers_{index}"
        for hf_norm, norm in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
            found.append(Entry(f"{name}.{hf_norm}.weight", (f"{path}/{norm}/scale",), vector(), (width,)))
            found.append(Entry(f"{name}.{hf_norm}.bias", (f"{path}/{norm}/bias",), vector(), (width,)))
        qkv = [f"{path}/attn/{part}" for part in ("q", "k", "v")]
        for hf_part, parts, input_axes, (size_in, size_out) in (
            ("attn.c_attn", qkv, 1, (width, 3 * width)),
            ("attn.c_proj", [f"{path}/attn/o"], 2, (width, width)),
            ("mlp.c_fc", [f"{path}/mlp/up"], 1, (width, inner)),
            ("mlp.c_proj", [f"{path}/mlp/down"], 1, (inner, width)),
        ):
            kernels = tuple(f"{part}/kernel" for part in parts)
            biases = tuple(f"{part}/bias" for part in parts)
            found.append(Entry(f"{name}.{hf_part}.weight", kernels, conv1d(input_axes), (size_in, size_out)))
            found.append(Entry(f"{name}.{hf_part}.bias", biases, vector(), (size_out,)))
    return found


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read_config=read_config,
    entries=entries,
    base_prefix="transformer.",
    ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
)
