# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with its eyes, 4B to 27B (Kamath et al. 2025, arXiv:2503.19786): the text model of it."""

from __future__ import annotations

from jrl.models.families import gemma3_text
from jrl.models.families.multimodal import text_model

FAMILY = text_model("gemma3", "Gemma3ForConditionalGeneration", gemma3_text.read_config)
