# SPDX-License-Identifier: Apache-2.0
"""A tiny CLIP in a folder as transformers has it, written by jrl without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.models.diffusion.clip_model import Clip, read_clip_model_config
from jrl.models.entries_io import entry_tensors
from jrl.models.safetensors_write import write_tensors
from tests.models.diffusion.toy_tokenizer import save_toy_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "clip",
    "projection_dim": 10,
    "text_config": {
        "model_type": "clip_text_model",
        "vocab_size": 600,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
        "projection_dim": 7,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 16,
        "patch_size": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-4,
        "num_channels": 3,
        "projection_dim": 5,
    },
}
PROCESSOR: dict[str, Any] = {
    "crop_size": {"height": 16, "width": 16},
    "size": {"shortest_edge": 16},
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def save_clip_extras(folder: Path) -> Path:
    """Writes what lies beside config and weights."""
    save_toy_tokenizer(folder, length=16)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def save_tiny_clip(folder: Path, seed: int = 0) -> Path:
    """Writes the folder."""
    clip = Clip(read_clip_model_config(CONFIG))
    generator = np.random.default_rng(seed)

    def make(path: Any, leaf: Any) -> np.ndarray:
        noise = 0.3 * generator.standard_normal(leaf.shape)
        return np.asarray(noise + (path[-1].key == "scale"), np.float32)

    params = jax.tree_util.tree_map_with_path(make, jax.eval_shape(clip.init, jax.random.key(0)))
    save_clip_extras(folder)
    (folder / "config.json").write_text(json.dumps(clip.stored_config()))
    tensors = entry_tensors(clip.entries(), params, vocab_size=0)
    write_tensors(folder, tensors, max_shard_bytes=10**9, stem="model")
    return folder
