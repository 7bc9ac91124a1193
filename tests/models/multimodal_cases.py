# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of multimodal models, whose text models jrl reads: width 32, vocabulary 97, one layer of vision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from transformers import (
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

from jrl.models.model import make_model
from jrl.models.multimodal import TextLayout
from tests.models.case_fields import MODERN
from tests.models.family_cases_b import GEMMA3, WIDE_HEADS, WINDOW
from tests.models.family_cases_c import GROWTH, LLAMA4
from tests.models.family_cases_gemma4 import GEMMA4
from tests.models.family_cases_mixers import DELTA, MOE

PROCESSOR = json.dumps({"image_processor_type": "Gemma3ImageProcessor"})
EYES: dict[str, Any] = dict(hidden_size=16, intermediate_size=16)
TOWER = EYES | dict(num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
QWEN_EYES = EYES | dict(depth=1, num_heads=2, out_hidden_size=32)
IMAGE = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)


def sections(*sizes: int, **others: Any) -> dict[str, Any]:
    """Rotary positions of three parts."""
    return dict(rope_type="default", rope_theta=1e4, mrope_section=list(sizes), **others)


CASES: dict[str, Any] = {
    "gemma3": Gemma3Config(
        text_config=GEMMA3 | dict(num_hidden_layers=3),
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    "gemma4": Gemma4Config(
        text_config=GEMMA4
        | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        vision_config=EYES
        | dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
        | dict(position_embedding_size=16),
        audio_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16)
        | dict(subsampling_conv_channels=[4, 2]),
    ),
    "llama4": Llama4Config(
        text_config=LLAMA4,
        vision_config=TOWER | dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16),
        image_token_index=90,
    ),
    "mistral3": Mistral3Config(
        text_config=MODERN | WIDE_HEADS | dict(model_type="mistral"),
        vision_config=TOWER | dict(model_type="pixtral", head_dim=8),
        image_token_index=90,
    ),
    "mistral3-ministral3": Mistral3Config(
        text_config=MODERN | WIDE_HEADS | dict(model_type="ministral3", rope_parameters=dict(GROWTH)),
        vision_config=TOWER | dict(model_type="pixtral", head_dim=8),
        image_token_index=90,
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=MODERN | dict(rope_parameters=sections(1, 1, 2)),
        vision_config=QWEN_EYES | dict(fullatt_block_indexes=[0]),
        **IMAGE,
    ),
    "qwen2_5_vl-windows": Qwen2_5_VLConfig(
        text_config=MODERN
        | WINDOW
        | dict(use_sliding_window=True, max_window_layers=1, rope_parameters=sections(1, 1, 2)),
        vision_config=QWEN_EYES | dict(fullatt_block_indexes=[0]),
        tie_word_embeddings=True,
        **IMAGE,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config=MODERN | WIDE_HEADS | dict(rope_parameters=sections(4, 2, 2, mrope_interleaved=True)),
        vision_config=QWEN_EYES | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
        **IMAGE,
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=DELTA
        | dict(rope_parameters=sections(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)),
        vision_config=QWEN_EYES | dict(num_position_embeddings=16),
        **IMAGE,
    ),
    "qwen3_5-tied": Qwen3_5Config(
        text_config=DELTA,
        vision_config=QWEN_EYES | dict(num_position_embeddings=16),
        tie_word_embeddings=True,
        **IMAGE,
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config=MOE, vision_config=QWEN_EYES | dict(num_position_embeddings=16), **IMAGE
    ),
}


def write_checkpoint(
    folder: Path, case: str, layout: TextLayout, others: dict[str, Any], scale: float = 1.0
) -> dict[str, Any]:
    """Writes a checkpoint with random text tensors in a layout, beside other ones; returns the text tensors."""
    model = make_model(CASES[case])
    table = TextLayout(*model.family.text_prefixes)
    rng = np.random.default_rng(1)
    text = {
        layout.file_name(entry.name, table): scale * rng.normal(size=entry.shape).astype(np.float32)
        for entry in model.entries()
    }
    folder.mkdir()
    model.hf_config.save_pretrained(folder)
    save_file(text | others, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    return text
