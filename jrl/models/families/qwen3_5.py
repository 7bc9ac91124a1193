# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5 (Qwen team 2026): the text model of it; see `jrl.models.families.qwen2_5_vl` for its positions."""

from __future__ import annotations

from jrl.models.families import qwen3_5_text
from jrl.models.families.multimodal import text_model

FAMILY = text_model(
    "qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5_text.read_config, qwen3_5_text.entries
)
