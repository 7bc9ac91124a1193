# SPDX-License-Identifier: Apache-2.0
"""T5 (Raffel et al. 2020, arXiv:1910.10683): 1.0 with relu and a tied, scaled head; 1.1 and Flan gated, with their own.

`tie_word_embeddings: false` in config.json is what tells 1.1 from 1.0. transformers 5 turns it into
`scale_decoder_outputs` and calls every head tied, until a file brings one.
"""

from __future__ import annotations

from typing import Any

from jrl.models.families.base import Entry, Family, linear, read_activation, table, vector, vocabulary
from jrl.models.seq2seq_config import Seq2SeqConfig


def read_config(hf: Any) -> Seq2SeqConfig:
    """Maps a `T5Config`."""
    return read_t5(hf, ties_head=hf.tie_word_embeddings, scales_head=hf.scale_decoder_outputs)


def read_t5(
    hf: Any, *, ties_head: bool, scales_head: bool, bias_in_every_layer: bool = False
) -> Seq2SeqConfig:
    """Maps a config with the keys of `T5Config`, for every family that has them.

    Args:
      hf: The transformers config.
      ties_head: The head is the transposed embedding, if it is scaled too.
      scales_head: What the head reads is divided by the root of the width.
      bias_in_every_layer: Every layer has a table of relative positions.
    Raises:
      ValueError: If the config describes an encoder or a decoder alone.
    """
    if hf.is_decoder or not hf.is_encoder_decoder:
        raise ValueError(
            f"{hf.model_type}: `is_encoder_decoder` must be true and `is_decoder` false: only the whole model is "
            f"supported, got {hf.is_encoder_decoder} and {hf.is_decoder}."
        )
    start = hf.to_dict().get("decoder_start_token_id")
    return Seq2SeqConfig(
        vocab_size=hf.vocab_size,
        width=hf.d_model,
        num_encoder_layers=hf.num_layers,
        num_layers=hf.num_decoder_layers,
        num_heads=hf.num_heads,
        head_dim=hf.d_kv,
        mlp_width=hf.d_ff,
        activation=read_activation(hf.model_type, hf.dense_act_fn),
        gated_mlp=hf.is_gated_act,
        norm_epsilon=hf.layer_norm_epsilon,
        tie_embeddings=ties_head and scales_head,
        logit_scale=hf.d_model**-0.5 if scales_head else None,
        num_buckets=hf.relative_attention_num_buckets,
        max_distance=hf.relative_attention_max_distance,
        bias_in_every_layer=bias_in_every_layer,
        # T5 starts with padding where nothing is said.
        decoder_start_token_id=hf.pad_token_id or 0 if start is None else start,
        dropout=hf.dropout_rate,
        init_factor=hf.initializer_factor,
    )


def entries(config: Seq2SeqConfig) -> list[Entry]:
    """Every tensor of a checkpoint."""
    width, vocab = config.width, config.vocab_size
    found = [Entry("shared.weight", ("embed/embedding",), vocabulary(transposed=False), (vocab, width))]
    if not config.tie_embeddings:
        found.append(
            Entry("lm_head.weight", ("lm_head/kernel",), vocabulary(transposed=True), (vocab, width))
        )
    for stack, path in (("encoder", "encoder_"), ("decoder", "")):
        found.append(
            Entry(f"{stack}.final_layer_norm.weight", (f"{path}final_norm/scale",), vector(), (width,))
        )
        if not config.bias_in_every_layer:
            found.append(_relative_bias(config, f"{stack}.block.0.layer.0", f"{stack}_relative_bias"))
    for index in range(config.num_encoder_layers):
        name, path = f"encoder.block.{index}.layer", f"encoder_layers_{index}"
        found += _attention(config, f"{name}.0", "SelfAttention", path, "attn") + _mlp(
            config, f"{name}.1", path
        )
    for index in range(config.num_layers):
        name, path = f"decoder.block.{index}.layer", f"layers_{index}"
        found += _attention(config, f"{name}.0", "SelfAttention", path, "attn")
        found += _attention(config, f"{name}.1", "EncDecAttention", path, "cross")
        found += _mlp(config, f"{name}.2", path)
    return found


def _relative_bias(config: Seq2SeqConfig, name: str, path: str) -> Entry:
    shape = config.num_buckets, config.num_heads
    return Entry(
        f"{name}.SelfAttention.relative_attention_bias.weight", (f"{path}/embedding",), table(), shape
    )


def _attention(config: Seq2SeqConfig, name: str, hf_part: str, path: str, part: str) -> list[Entry]:
    width, heads = config.width, config.num_heads * config.head_dim
    found = [Entry(f"{name}.layer_norm.weight", (f"{path}/{part}_norm/scale",), vector(), (width,))]
    if config.bias_in_every_layer and part == "attn":
        found.append(_relative_bias(config, name, f"{path}/relative_bias"))
    for projection in "qkvo":
        out = projection == "o"
        found.append(
            Entry(
                f"{name}.{hf_part}.{projection}.weight",
                (f"{path}/{part}/{projection}/kernel",),
                linear(2 if out else 1),
                (width, heads) if out else (heads, width),
            )
        )
    return found


def _mlp(config: Seq2SeqConfig, name: str, path: str) -> list[Entry]:
    width, inner = config.width, config.mlp_width
    wide = (("wi_0", "gate"), ("wi_1", "up")) if config.gated_mlp else (("wi", "up"),)
    found = [Entry(f"{name}.layer_norm.weight", (f"{path}/mlp_norm/scale",), vector(), (width,))]
    for hf_part, part, shape in (
        *((hf_part, part, (inner, width)) for hf_part, part in wide),
        ("wo", "down", (width, inner)),
    ):
        kernel = (f"{path}/mlp/{part}/kernel",)
        found.append(Entry(f"{name}.DenseReluDense.{hf_part}.weight", kernel, linear(), shape))
    return found


IGNORED = (
    r"^(encoder|decoder)\.embed_tokens\.weight$",
    r"\.EncDecAttention\.relative_attention_bias\.weight$",
)
"""The embedding a second and third time, and a table of the first cross-attention that nothing reads."""
FAMILY = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    read_config=read_config,
    entries=entries,
    base_prefix="",
    ignored=IGNORED,
    kind="seq2seq",
)
