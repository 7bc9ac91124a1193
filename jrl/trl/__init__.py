# SPDX-License-Identifier: Apache-2.0
"""TRL's names, signatures and defaults over jrl: a script changes its imports and runs.

Names that TRL keeps in modules of its own are all here: `from jrl.trl import DPOTrainer, set_seed`; its module paths
work too. Nothing is computed here. `docs/migrating/from_trl.md` says what differs, `docs/migrating/trl_surface.md` what
is accepted without effect.

A name is imported when it is asked for: transformers' arguments take seconds to import where torch is installed, and
the command line's help needs none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

from jrl.trl.module_paths import PATHS, register

_HOMES = {
    "best_of_n": ("BestOfNSampler",),
    "commands": ("ddpo_parser",),
    "collators": (
        "DPODataCollatorWithPadding",
        "DataCollatorForCompletionOnlyLM",
        "DataCollatorForLanguageModeling",
        "DataCollatorForPreference",
        "RewardDataCollatorForPreference",
        "RewardDataCollatorWithPadding",
    ),
    "configs": ("DPOConfig", "RewardConfig", "SFTConfig"),
    "constant_length": ("ConstantLengthDataset",),
    "core": (
        "AdaptiveKLController",
        "FixedKLController",
        "LengthSampler",
        "RunningMoments",
        "add_suffix",
        "average_torch_dicts",
        "clip_by_value",
        "convert_to_scalar",
        "disable_dropout_in_model",
        "entropy_from_logits",
        "exact_div",
        "flatten_dict",
        "get_global_statistics",
        "logprobs_from_logits",
        "masked_mean",
        "masked_var",
        "masked_whiten",
        "pad_to_length",
        "pad_to_size",
        "respond_to_batch",
        "set_seed",
        "stack_dicts",
        "stats_to_np",
        "whiten",
    ),
    "ddpo": ("DDPOTrainer",),
    "ddpo_config": ("DDPOConfig",),
    "ddpo_pipeline": (
        "DDPOPipelineOutput",
        "DDPOSchedulerOutput",
        "DDPOStableDiffusionPipeline",
        "DefaultDDPOStableDiffusionPipeline",
    ),
    "dpo": ("DPOTrainer",),
    "environment": ("TextEnvironment", "TextHistory"),
    "group_configs": ("GRPOConfig", "RLOOConfig"),
    "group_trainers": ("GRPOTrainer", "RLOOTrainer"),
    "handles": ("resolve_model",),
    "iterative_sft": ("IterativeSFTTrainer",),
    "models": (
        "AutoModelForCausalLM",
        "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSeq2SeqLMWithValueHead",
        "AutoModelForSequenceClassification",
        "ModelHandle",
        "PreTrainedModelWrapper",
        "create_reference_model",
    ),
    "parser": ("TrlParser",),
    "ppo": ("PPOConfig", "PPOTrainer"),
    "reward": ("RewardTrainer", "compute_accuracy"),
    "rewards": (
        "accuracy_reward",
        "get_soft_overlong_punishment",
        "reasoning_accuracy_reward",
        "think_format_reward",
    ),
    "scripts": (
        "DatasetConfig",
        "DatasetMixtureConfig",
        "ModelConfig",
        "ScriptArguments",
        "get_dataset",
        "get_kbit_device_map",
        "get_peft_config",
        "get_quantization_config",
    ),
    "sft": ("SFTTrainer",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """A public name, from the module that it lives in."""
    if name in PATHS:
        return importlib.import_module(f"jrl.trl.{name}")
    if name.startswith("is_") and name.endswith("_available"):
        return getattr(importlib.import_module("jrl.trl.import_utils"), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jrl.trl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jrl.trl.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return [*globals(), *_MODULE_OF]


register(__getattr__)
