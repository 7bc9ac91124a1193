# SPDX-License-Identifier: Apache-2.0
"""A tiny model that chats in Qwen's format, and may write nothing but a few whole calls and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

import jrl

TEMPLATE = """{%- macro turn(role, content) %}<|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro -%}
{%- if tools %}{{ turn('system', 'Tools: ' + tools | tojson + ' Call one as <tool_call>{"name": ...}</tool_call>.') }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' -%}
{{ turn('user', '<tool_response>\n' + m.content + '\n</tool_response>') }}
{%- else -%}
{{ turn(m.role, m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BRACKETS = ("<tool_call>", "</tool_call>")


def chat_tokenizer(written: Sequence[str], template: str = TEMPLATE) -> Any:
    """Bytes as tokens, the special ones of Qwen, and whole texts that the model may write.

    Args:
      written: Each becomes one token.
      template: Of chats.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*BRACKETS, *written)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = template
    return fast


def save_chat_model(folder: Path, tokenizer: Any, positions: int = 2048) -> str:
    """A Qwen2 of width 32 with random weights, and its tokenizer."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model, params = jrl.load_model(config, key=jax.random.key(0))
    jrl.save_model(folder, model, params, tokenizer)
    return str(folder)


def only(tokenizer: Any, calls: Sequence[str], answers: Sequence[str]) -> np.ndarray:
    """A transition mask: a turn is an answer, or one or two calls between their brackets; then it ends.

    Args:
      tokenizer: Of `chat_tokenizer`.
      calls: Tokens.
      answers: Tokens.
    """
    (begin, end), eos = tokenizer.convert_tokens_to_ids(list(BRACKETS)), tokenizer.eos_token_id
    called, said = (
        tokenizer.convert_tokens_to_ids(list(calls)),
        tokenizer.convert_tokens_to_ids(list(answers)),
    )
    (line,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    may = {line: [begin, *said], begin: called, end: [eos, begin]}
    may |= {token: [end] for token in called} | {token: [eos] for token in said}
    mask = np.ones((len(tokenizer), len(tokenizer)), bool)
    mask[:, eos] = False
    for token, followers in may.items():
        mask[token] = True
        mask[token, followers] = False
    return mask
