# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1 and 3.2, and Ministral 3 (Mistral AI 2025): the text model of them."""

from __future__ import annotations

from typing import Any

from jrl.models.config import TransformerConfig
from jrl.models.families import ministral3, mistral
from jrl.models.families.multimodal import text_model

READERS = {"mistral": mistral.read_config, "ministral3": ministral3.read_config}


def read_text(hf: Any) -> TransformerConfig:
    """Maps a `MistralConfig` or a `Ministral3Config`.

    Raises:
      ValueError: If the text model is of another family, or as the family's.
    """
    if hf.model_type not in READERS:
        raise ValueError(
            f"mistral3: the text model must be one of {', '.join(READERS)}, got {hf.model_type!r}."
        )
    return READERS[hf.model_type](hf)


FAMILY = text_model("mistral3", "Mistral3ForConditionalGeneration", read_text)
