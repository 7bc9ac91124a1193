# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of two CLIPs that read a prompt side by side: their rows of ids have one length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jrl.models.diffusion.clip_config import ClipTextConfig
from jrl.models.diffusion.components import TOKENIZER
from jrl.models.diffusion.described import CONFIG
from jrl.models.diffusion.tokenizer import PaddedTokenizer, load_clip_tokenizer

SECOND_TOKENIZER = f"{TOKENIZER}_2"


def load_pair_tokenizers(folder: Path, encoders: Mapping[str, ClipTextConfig]) -> dict[str, PaddedTokenizer]:
    """Reads both tokenizers, by folder; both make rows as long as the first one's.

    Args:
      folder: Of the pipeline.
      encoders: Configs of the two text encoders, by folder, in their order.
    Raises:
      FileNotFoundError: If a folder holds no tokenizer.
      ValueError: If one is damaged, does not belong to its encoder, or the second encoder reads no rows so long.
    """
    first, second = (
        load_clip_tokenizer(
            folder / name, max_length=config.max_position_embeddings, vocab_size=config.vocab_size
        )
        for name, config in zip((TOKENIZER, SECOND_TOKENIZER), encoders.values(), strict=True)
    )
    name, config = list(encoders.items())[1]
    limit = config.max_position_embeddings
    if first.length > limit:
        raise ValueError(
            f"{folder / name / CONFIG}: `max_position_embeddings` must be at least {first.length}, the ids of a "
            f"prompt by {TOKENIZER}; got {limit}. Are all parts of one model?"
        )
    return {TOKENIZER: first, SECOND_TOKENIZER: replace(second, length=first.length)}
