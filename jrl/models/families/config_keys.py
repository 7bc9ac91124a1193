# SPDX-License-Identifier: Apache-2.0
"""Keys of a transformers config: each is read, or has its usual value, or is known to change nothing that is computed.

A key that nobody reads may ask for something that is not implemented, in a version of transformers to come too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from jrl.models.families.base import Family

SILENT = MappingProxyType(
    {
        **dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id"),
            "ids of tokens, of which no layer knows",
        ),
        **dict.fromkeys(
            (
                "use_cache",
                "pretraining_tp",
                "slow_but_exact",
                "is_encoder_decoder",
                "moe_shared_expert_overlap",
            ),
            "how torch computes the same numbers",
        ),
        **dict.fromkeys(
            (
                "chunk_size",
                "mamba_chunk_size",
                "mamba_ssm_cache_dtype",
                "num_logits_to_keep",
                "use_associative_scan",
                "use_mamba_kernels",
                "use_mambapy",
            ),
            "how torch computes a recurrence and keeps its state; here it is float32 always",
        ),
        **dict.fromkeys(
            ("rescale_prenorm_residual", "time_step_floor", "time_step_max"),
            "how fresh weights begin; the checkpoint holds them",
        ),
        **dict.fromkeys(
            ("expand", "time_step_limit"),
            "torch does not read it where jrl does not: other keys say the same",
        ),
        **dict.fromkeys(
            ("mtp_layers_block_type", "num_nextn_predict_layers"),
            "multi-token prediction, which serves speculative decoding alone",
        ),
        **dict.fromkeys(
            (
                "attention_softmax_in_fp32",
                "scale_attention_softmax_in_fp32",
                "reorder_and_upcast_attn",
            ),
            "precision of torch's softmax; here it is float32 always",
        ),
        **dict.fromkeys(
            ("output_router_logits", "router_aux_loss_coef"),
            "the balancing loss, whose weight the method sets",
        ),
        "z_loss_coefficient": "a part of torch's own loss, which no method here has",
        **dict.fromkeys(
            (
                "attention_types",
                "feed_forward_proj",
                "full_attn_idxs",
                "interleave_moe_layer_step",
                "max_window_layers",
                "no_rope_layer_interval",
                "sliding_window_pattern",
                "use_sliding_window",
            ),
            "transformers makes another key of it, which is read",
        ),
        **dict.fromkeys(
            (
                "classifier_dropout",
                "qa_dropout",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
            "of heads that this model does not have",
        ),
        "sinusoidal_pos_embds": "how a fresh table of positions begins; the checkpoint holds it",
    }
)
"""Keys that change nothing here, each with the reason."""


class _Recorder:
    """A transformers config that notes the keys that are read; `parts` stand in for those of its own."""

    def __init__(self, hf: Any, parts: Mapping[str, _Recorder] | None = None):
        self._hf, self._parts = hf, parts or {}
        self.keys_read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        found = getattr(self._hf, name)  # what stands in for an object has to ask it by name
        self.keys_read.add(type(self._hf).attribute_map.get(name, name))
        return found

    def to_dict(self) -> _RecordedKeys:
        """The content, of which it is noted what is looked up."""
        return _RecordedKeys(self._hf.to_dict(), self.keys_read)


class _RecordedKeys(dict[str, Any]):
    def __init__(self, content: Mapping[str, Any], keys_read: set[str]):
        super().__init__(content)
        self._keys_read = keys_read

    def __getitem__(self, key: str) -> Any:
        self._keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, noted as read."""
        self._keys_read.add(key)
        return super().get(key, default)


def read_all_keys(family: Family, hf: Any) -> Any:
    """The config that models of a family are built from; nothing of the transformers config is passed over.

    Args:
      family: Reads it.
      hf: A transformers config; of a multimodal model the text model's part is checked.
    Raises:
      ValueError: If the family refuses it; or it does not know a key, whose value is not the usual one.
    """
    inner = family.text_config(hf)
    text = _Recorder(inner)
    config = family.read_config(_Recorder(hf, {"text_config": text}) if family.is_multimodal else text)
    found = inner.to_dict()
    for field, usual in usual_values(type(inner)).items():
        # Some classes call a key of the file by another name.
        key = type(inner).attribute_map.get(field, field)
        value = found.get(key, usual)
        if key not in text.keys_read and key not in SILENT and value != usual:
            raise ValueError(
                f"{family.model_type}: `{key}` must be {usual!r}, got {value!r}: nothing here reads this key, and what "
                "it asks for may not be implemented."
            )
    return config


def usual_values(config_class: Any) -> dict[str, Any]:
    """Default of every key that a transformers config class declares beyond those of all configs."""
    from transformers import PreTrainedConfig  # only here: importing jrl does not import transformers

    common = {field.name for field in fields(PreTrainedConfig)}
    return {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(config_class)
        if field.name not in common
    }
