# SPDX-License-Identifier: Apache-2.0
"""The one tiny decoder, tokenizer and batch of the tests. Results are cached: treat them as constants."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, T5Config

from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.model import make_model
from jrl.models.policy import init_reference
from jrl.typing import ModelInputs, PolicyFns

VOCAB_SIZE = 97
PAD_ID, EOS_ID = 0, 1


def tiny_hf_config(family: str = "gpt2", num_layers: int = 2, **overrides: Any) -> Any:
    """A transformers config: width 32, vocabulary 97 (which no mesh divides), dropout off."""
    if family == "gpt2":
        fields = dict(n_embd=32, n_layer=num_layers, n_head=4, n_positions=128, n_inner=64)
        fields |= dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
        config_class = GPT2Config
    elif family == "llama":
        fields = dict(hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4)
        fields |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=128)
        config_class = LlamaConfig
    elif family == "qwen3_5_text":
        fields = dict(hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4, head_dim=8)
        fields |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=128)
        fields |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8)
        # A recurrence below attention, and again above it.
        fields |= dict(linear_value_head_dim=8, full_attention_interval=2, rms_norm_eps=1e-2)
        config_class = Qwen3_5TextConfig
    elif family == "t5":
        fields = dict(d_model=32, num_layers=num_layers, num_heads=4, d_kv=8, d_ff=64)
        # Few buckets: rows of tests reach the last one.
        fields |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)
        fields |= dict(dropout_rate=0.0, decoder_start_token_id=PAD_ID, feed_forward_proj="gated-gelu")
        fields |= dict(tie_word_embeddings=False)
        config_class = T5Config
    else:
        raise ValueError(f"`family` must be gpt2, llama, qwen3_5_text or t5, got {family!r}.")
    # A large initialiser: logits of a fresh model then differ enough to tell right from wrong.
    fields |= dict(vocab_size=VOCAB_SIZE, bos_token_id=EOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    spread = {} if family == "t5" else dict(initializer_range=0.1)
    return config_class(**(fields | spread | overrides))


@functools.cache
def tiny_lm(family: str = "gpt2", num_layers: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """A tiny model and its whole parameter tree, without a value head. Do not donate these buffers."""
    lm = make_model(tiny_hf_config(family, num_layers))
    return lm, lm.init(jax.random.key(seed))


@functools.cache
def tiny_policy(
    family: str = "gpt2",
    num_layers_unfrozen: int = -1,
    value_head: str | None = "mlp",
    num_layers: int = 2,
    num_value_layers_unfrozen: int = 0,
    num_q_heads: int = 0,
) -> tuple[PolicyFns, Any, Any, Any]:
    """(policy, params, frozen, ref_params) of the tiny model. Copy `params` before donating them."""
    lm, params = tiny_lm(family, num_layers)
    if value_head is not None:
        params = {**params, "v_head": init_value_head(value_head, lm.feature_width, jax.random.key(1))}
    if num_q_heads:
        sizes = lm.feature_width, lm.vocab_size, lm.config.padded_vocab_size
        params = {**params, **init_q_heads(num_q_heads, *sizes, jax.random.key(2))}
    split = dict(num_layers_unfrozen=num_layers_unfrozen, num_value_layers_unfrozen=num_value_layers_unfrozen)
    trainable, frozen = lm.split_params(params, **split)
    return lm.policy(**split), trainable, frozen, init_reference(trainable)


def loud_heads(params: Any) -> Any:
    """The same parameters with value and Q heads that say something of their own: fresh ones say 0."""
    rng = np.random.default_rng(0)

    def loud(head: Any) -> Any:
        return {**head, "out": jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), head["out"])}

    heads = {
        name: {index: loud(head) for index, head in params[name].items()}
        for name in ("q_heads", "target_q_heads")
    }
    return {**params, "v_head": loud(params["v_head"]), **heads}


def tiny_prompts(B: int = 4, P: int = 8, seed: int = 0) -> ModelInputs:
    """Left-padded prompts of ragged lengths; the first row is full, no real token is pad or EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, P + 1, size=B)
    lengths[0] = P
    mask = np.arange(P)[None, :] >= P - lengths[:, None]
    tokens = np.where(mask, rng.integers(2, VOCAB_SIZE, size=(B, P)), PAD_ID)
    return ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


def tiny_contexts(B: int = 4, C: int = 8, L: int = 1, seed: int = 0) -> ModelInputs:
    """Seq2seq rows: contexts like `tiny_prompts`, and decoder rows of L real columns that begin with the start id."""
    context = tiny_prompts(B, C, seed)
    tokens = np.random.default_rng(seed + 1).integers(2, VOCAB_SIZE, size=(B, L)).astype(np.int32)
    tokens[:, 0] = PAD_ID
    return ModelInputs(jnp.asarray(tokens), jnp.ones((B, L), bool), None, *context[:2])


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A real fast tokenizer of 97 ids: printable ASCII but "~" by character, and one merge.

    Id 0 is "<pad>", 1 "<eos>", 96 the merged "th": encode(decode([t, h])) is ["th"], so ids → text → ids
    is not the identity. Each caller owns what it gets: a template or token set on it stays its own.
    """
    return copy.deepcopy(_first_tokenizer())


@functools.cache
def _first_tokenizer() -> PreTrainedTokenizerFast:
    printable = [chr(code) for code in range(32, 127)]
    # "~" gives up its place to the merge: 2 special + 94 characters + 1 merge = 97.
    vocabulary = {"<pad>": PAD_ID, "<eos>": EOS_ID}
    vocabulary |= {char: index + 2 for index, char in enumerate(printable[:-1])}
    vocabulary["th"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def tiny_t5_tokenizer() -> PreTrainedTokenizerFast:
    """The same for T5: no BOS, and EOS behind every text that is tokenised with special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS_ID)]
    )
    return tokenizer
