# SPDX-License-Identifier: Apache-2.0
"""trlX's names, signatures and defaults over jrl: a script changes its imports and runs.

Names that trlX keeps in modules of its own are all here: `from jrl.trlx import TRLConfig, default_ppo_config`.
Nothing is computed here; see `docs/trlx_surface.md` for what is accepted without effect.
"""

from jrl.trlx import logging
from jrl.trlx.accelerate import AccelerateRLTrainer
from jrl.trlx.api import train
from jrl.trlx.base import BaseRLTrainer
from jrl.trlx.configs import (
    ILQLConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RFTConfig,
    SchedulerConfig,
    SFTConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
    default_ilql_config,
    default_ppo_config,
    default_sft_config,
)
from jrl.trlx.dialogue import make_experience, tokenize_dialogue
from jrl.trlx.elements import (
    AccelerateRLBatchElement,
    AccelerateRLElement,
    BatchElement,
    DialogMessage,
    GeneralElement,
    ILQLBatch,
    ILQLElement,
    ILQLSeq2SeqBatch,
    ILQLSeq2SeqElement,
    PPORLBatch,
    PPORLElement,
    PromptBatch,
    PromptElement,
    RLElement,
)
from jrl.trlx.ilql import AccelerateILQLTrainer
from jrl.trlx.loader import DataLoader, MiniBatchIterator
from jrl.trlx.nemo import NeMoILQLTrainer, NeMoPPOTrainer, NeMoSFTTrainer
from jrl.trlx.orchestrators import OfflineOrchestrator, Orchestrator, PPOOrchestrator
from jrl.trlx.pipelines import BasePipeline, PromptPipeline
from jrl.trlx.ppo import AcceleratePPOTrainer
from jrl.trlx.registry import (
    get_method,
    get_orchestrator,
    get_pipeline,
    get_trainer,
    register_datapipeline,
    register_method,
    register_orchestrator,
    register_trainer,
)
from jrl.trlx.rft import AccelerateRFTTrainer
from jrl.trlx.sft import AccelerateSFTTrainer
from jrl.trlx.stores import (
    BaseRolloutStore,
    DialogStore,
    ILQLRolloutStorage,
    ILQLSeq2SeqRolloutStorage,
    PPORolloutStorage,
)

# The first releases called trainers models, and jrl calls a registered data pipeline a pipeline.
BaseRLModel = BaseRLTrainer
AccelerateRLModel = AccelerateRLTrainer
AcceleratePPOModel = AcceleratePPOTrainer
AccelerateILQLModel = ILQLModel = AccelerateILQLTrainer
register_pipeline = register_datapipeline

__all__ = [
    "AccelerateILQLModel",
    "AccelerateILQLTrainer",
    "AcceleratePPOModel",
    "AcceleratePPOTrainer",
    "AccelerateRFTTrainer",
    "AccelerateRLBatchElement",
    "AccelerateRLElement",
    "AccelerateRLModel",
    "AccelerateRLTrainer",
    "AccelerateSFTTrainer",
    "BasePipeline",
    "BaseRLModel",
    "BaseRLTrainer",
    "BaseRolloutStore",
    "BatchElement",
    "DataLoader",
    "DialogMessage",
    "DialogStore",
    "GeneralElement",
    "ILQLBatch",
    "ILQLConfig",
    "ILQLElement",
    "ILQLModel",
    "ILQLRolloutStorage",
    "ILQLSeq2SeqBatch",
    "ILQLSeq2SeqElement",
    "ILQLSeq2SeqRolloutStorage",
    "MethodConfig",
    "MiniBatchIterator",
    "ModelConfig",
    "NeMoILQLTrainer",
    "NeMoPPOTrainer",
    "NeMoSFTTrainer",
    "OfflineOrchestrator",
    "OptimizerConfig",
    "Orchestrator",
    "PPOConfig",
    "PPOOrchestrator",
    "PPORLBatch",
    "PPORLElement",
    "PPORolloutStorage",
    "PromptBatch",
    "PromptElement",
    "PromptPipeline",
    "RFTConfig",
    "RLElement",
    "SFTConfig",
    "SchedulerConfig",
    "TRLConfig",
    "TokenizerConfig",
    "TrainConfig",
    "default_ilql_config",
    "default_ppo_config",
    "default_sft_config",
    "get_method",
    "get_orchestrator",
    "get_pipeline",
    "get_trainer",
    "logging",
    "make_experience",
    "register_datapipeline",
    "register_method",
    "register_orchestrator",
    "register_pipeline",
    "register_trainer",
    "tokenize_dialogue",
    "train",
]
