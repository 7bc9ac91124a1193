# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5 with a mixture of experts (Qwen team 2026): the text model of it.

Memory of torch holds the experts of a layer in two tensors, and a checkpoint may too, or one a projection and expert.
"""

from __future__ import annotations

from jrl.models.families import qwen3_5_moe_text, qwen3_5_text
from jrl.models.families.multimodal import text_model

FAMILY = text_model(
    "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", qwen3_5_moe_text.read_config, qwen3_5_text.entries
)
