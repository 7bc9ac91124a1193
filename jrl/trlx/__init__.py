# SPDX-License-Identifier: Apache-2.0
"""trlX's names, signatures and defaults over jrl: a script changes its imports and runs.

Names that trlX keeps in modules of its own are all here: `from jrl.trlx import TRLConfig, default_ppo_config`.
Nothing is computed here; see `docs/migrating/trlx_surface.md` for what is accepted without effect.

The names are imported when the first of them is asked for: `jrl` itself needs one module of this package, the one that
reads trlX's older files.
"""

from __future__ import annotations

import importlib
from typing import Any

from jrl.interop import register_paths

_NEMO = {
    f"trainer.nemo_{name}_trainer": f"Accelerate{name.upper()}Trainer" for name in ("ilql", "ppo", "sft")
}
_PATHS = (
    "data.method_configs",
    "orchestrator.offline_orchestrator",
    "orchestrator.ppo_orchestrator",
    "pipeline.ppo_pipeline",
    "utils.loading",
    *_NEMO,
)
"""Modules of trlX that there is no file for."""


# The first releases called trainers models, and jrl calls a registered data pipeline a pipeline.
_OTHER_NAMES = {
    "AccelerateILQLModel": "AccelerateILQLTrainer",
    "AcceleratePPOModel": "AcceleratePPOTrainer",
    "AccelerateRLModel": "AccelerateRLTrainer",
    "BaseRLModel": "BaseRLTrainer",
    "ILQLModel": "AccelerateILQLTrainer",
    "register_pipeline": "register_datapipeline",
}
_HOMES = {
    "jrl.interop": ("DataLoader",),
    "jrl.trlx.api": ("train",),
    "jrl.trlx.data": (
        "BatchElement",
        "GeneralElement",
        "RLElement",
    ),
    "jrl.trlx.data.accelerate_base_datatypes": (
        "AccelerateRLBatchElement",
        "AccelerateRLElement",
        "PromptBatch",
        "PromptElement",
    ),
    "jrl.trlx.data.configs": (
        "ILQLConfig",
        "MethodConfig",
        "ModelConfig",
        "OptimizerConfig",
        "PPOConfig",
        "RFTConfig",
        "SchedulerConfig",
        "SFTConfig",
        "TokenizerConfig",
        "TrainConfig",
        "TRLConfig",
    ),
    "jrl.trlx.data.default_configs": (
        "default_ilql_config",
        "default_nemo_1_3b_config",
        "default_nemo_2b_config",
        "default_nemo_20b_config",
        "default_ppo_config",
        "default_sft_config",
    ),
    "jrl.trlx.data.ilql_types": (
        "ILQLBatch",
        "ILQLElement",
        "ILQLSeq2SeqBatch",
        "ILQLSeq2SeqElement",
    ),
    "jrl.trlx.data.ppo_types": (
        "PPORLBatch",
        "PPORLElement",
    ),
    "jrl.trlx.dialogue": (
        "make_experience",
        "tokenize_dialogue",
    ),
    "jrl.trlx.loader": ("MiniBatchIterator",),
    "jrl.trlx.nemo": (
        "NeMoILQLTrainer",
        "NeMoPPOTrainer",
        "NeMoSFTTrainer",
    ),
    "jrl.trlx.orchestrator": (
        "OfflineOrchestrator",
        "Orchestrator",
        "PPOOrchestrator",
    ),
    "jrl.trlx.pipeline": ("BasePipeline",),
    "jrl.trlx.pipeline.offline_pipeline": ("PromptPipeline",),
    "jrl.trlx.registry": (
        "get_method",
        "get_orchestrator",
        "get_pipeline",
        "get_trainer",
        "register_datapipeline",
        "register_method",
        "register_orchestrator",
        "register_trainer",
    ),
    "jrl.trlx.stores": (
        "BaseRolloutStore",
        "DialogMessage",
        "DialogStore",
        "ILQLRolloutStorage",
        "ILQLSeq2SeqRolloutStorage",
        "PPORolloutStorage",
    ),
    "jrl.trlx.trainer": ("BaseRLTrainer",),
    "jrl.trlx.trainer.accelerate_base_trainer": ("AccelerateRLTrainer",),
    "jrl.trlx.trainer.accelerate_ilql_trainer": ("AccelerateILQLTrainer",),
    "jrl.trlx.trainer.accelerate_ppo_trainer": ("AcceleratePPOTrainer",),
    "jrl.trlx.trainer.accelerate_rft_trainer": ("AccelerateRFTTrainer",),
    "jrl.trlx.trainer.accelerate_sft_trainer": ("AccelerateSFTTrainer",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted({*_MODULE_OF, *_OTHER_NAMES, "logging"})


def __getattr__(name: str) -> Any:
    """A public name, or a module that came along with them."""
    if name.startswith("__"):
        raise AttributeError(f"module 'jrl.trlx' has no attribute {name!r}")
    for module in (*_HOMES, "jrl.trlx.utils.logging"):  # all of them: the registries are to know every class
        importlib.import_module(module)
    if name == "logging":
        return importlib.import_module("jrl.trlx.utils.logging")
    name = _OTHER_NAMES.get(name, name)
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'jrl.trlx' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *__all__})


def _find(path: str, name: str) -> Any:
    """A name of a module without a file; what only NeMo has is refused, naming what to use instead."""
    if path in _NEMO and name in ("megatron_trainer", "ILQLGPT", "PPOGPT", "SFTGPT"):
        importlib.import_module("jrl.trlx.nemo").refuse(name, _NEMO[path])
    return __getattr__(name)


register_paths("jrl.trlx", _PATHS, _find)
