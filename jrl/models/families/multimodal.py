# SPDX-License-Identifier: Apache-2.0
"""Families of multimodal models: their text model is read as that of a text family, under other names.

How the rest of such a checkpoint is kept: `jrl.models.multimodal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import llama_like
from jrl.models.families.base import Entry, Family

PREFIXES = ("model.language_model.", "lm_head.")
"""Of the text model's body and of its head in memory of torch, and so in an adapter's file."""


def text_model(
    model_type: str,
    architecture: str,
    read_text: Callable[[Any], TransformerConfig],
    entries: Callable[[TransformerConfig], list[Entry]] = llama_like.entries,
    ignored: tuple[str, ...] = llama_like.IGNORED,
    prefixes: tuple[str, str] = PREFIXES,
    ignored_in: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: (),
) -> Family:
    """The family of a multimodal model.

    Args:
      model_type: As in config.json.
      architecture: Class of the whole model.
      read_text: Maps its `text_config`.
      entries: Every tensor of the text model alone.
      ignored: Patterns of tensors of the text model that nobody needs.
      prefixes: Of the text model's body and of its head in memory of torch.
      ignored_in: Patterns of tensors of the text model that nobody needs in models of a config.
    """

    def read_config(hf: Any) -> TransformerConfig:
        return replace(read_text(hf.text_config), tie_embeddings=hf.tie_word_embeddings)

    return Family(
        model_type=model_type,
        architecture=architecture,
        read_config=read_config,
        entries=lambda config: [_renamed(entry, *prefixes) for entry in entries(config)],
        base_prefix="model.",
        ignored=ignored,
        ignored_in=ignored_in,
        is_multimodal=True,
        text_prefixes=prefixes,
    )


def _renamed(entry: Entry, body: str, head: str) -> Entry:
    if entry.name.startswith("lm_head."):
        return replace(entry, name=head + entry.name.removeprefix("lm_head."))
    return replace(entry, name=body + entry.name.removeprefix("model."))
