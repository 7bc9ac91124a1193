# SPDX-License-Identifier: Apache-2.0
"""Llama 4 with its eyes (Meta 2025): the text model of it, which in torch is a whole model within the other."""

from __future__ import annotations

from dataclasses import replace

from jrl.models.families import llama4_text
from jrl.models.families.multimodal import text_model

FAMILY = replace(
    text_model(
        "llama4",
        "Llama4ForConditionalGeneration",
        llama4_text.read_config,
        llama4_text.entries,
        prefixes=("language_model.model.", "language_model.lm_head."),
    ),
    # Whether its head is tied is up to the text model's config alone.
    read_config=lambda hf: llama4_text.read_config(hf.text_config),
)
