# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with its eyes and ears (Google 2026): the text model of it."""

from __future__ import annotations

from jrl.models.families import gemma4_text
from jrl.models.families.multimodal import text_model

FAMILY = text_model(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    gemma4_text.read_config,
    gemma4_text.entries,
    ignored_in=gemma4_text.unread_keys,
)
