# SPDX-License-Identifier: Apache-2.0
"""trlX's module paths: a name stands where trlX has it, and is the one of `jrl.trlx`."""

import importlib

import pytest

from jrl import trlx

MODULES = {
    "data": ("GeneralElement", "RLElement", "BatchElement"),
    "data.accelerate_base_datatypes": (
        "PromptElement",
        "PromptBatch",
        "AccelerateRLElement",
        "AccelerateRLBatchElement",
    ),
    "data.configs": (
        "ModelConfig",
        "TokenizerConfig",
        "OptimizerConfig",
        "SchedulerConfig",
        "TrainConfig",
        "TRLConfig",
    ),
    "data.default_configs": (
        "ILQLConfig",
        "PPOConfig",
        "SFTConfig",
        "default_ppo_config",
        "default_ilql_config",
        "default_sft_config",
        "default_nemo_20b_config",
        "default_nemo_2b_config",
        "default_nemo_1_3b_config",
    ),
    "data.ilql_types": ("ILQLElement", "ILQLBatch", "ILQLSeq2SeqElement", "ILQLSeq2SeqBatch"),
    "data.method_configs": ("MethodConfig", "register_method", "get_method"),
    "data.ppo_types": ("PPORLElement", "PPORLBatch"),
    "models.modeling_ilql": ("ILQLConfig", "ILQLBatch"),
    "models.modeling_ppo": ("PPOConfig",),
    "orchestrator": ("Orchestrator", "register_orchestrator"),
    "orchestrator.offline_orchestrator": ("OfflineOrchestrator",),
    "orchestrator.ppo_orchestrator": ("PPOOrchestrator",),
    "pipeline": ("BasePipeline", "BaseRolloutStore", "MiniBatchIterator", "register_datapipeline"),
    "pipeline.offline_pipeline": (
        "DialogMessage",
        "DialogStore",
        "ILQLRolloutStorage",
        "ILQLSeq2SeqRolloutStorage",
        "PromptPipeline",
        "tokenize_dialogue",
    ),
    "pipeline.ppo_pipeline": ("PPORolloutStorage",),
    "trainer": ("BaseRLTrainer", "register_trainer"),
    "trainer.accelerate_base_trainer": ("AccelerateRLTrainer",),
    "trainer.accelerate_ilql_trainer": ("AccelerateILQLTrainer", "make_experience"),
    "trainer.accelerate_ppo_trainer": ("AcceleratePPOTrainer",),
    "trainer.accelerate_rft_trainer": ("AccelerateRFTTrainer", "RFTConfig"),
    "trainer.accelerate_sft_trainer": ("AccelerateSFTTrainer", "SFTConfig"),
    "trainer.nemo_ilql_trainer": ("NeMoILQLTrainer",),
    "trainer.nemo_ppo_trainer": ("NeMoPPOTrainer",),
    "trainer.nemo_sft_trainer": ("NeMoSFTTrainer",),
    "utils": ("logging",),
    "utils.loading": ("get_trainer", "get_pipeline"),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_name_of_trlx_stands_in_trlxs_module(module):
    found = importlib.import_module(f"jrl.trlx.{module}")
    for name in MODULES[module]:
        assert getattr(found, name) is getattr(trlx, name)


@pytest.mark.parametrize("algorithm", ["ppo", "ilql", "sft"])
def test_names_of_nemo_are_refused_with_what_to_use_instead(algorithm):
    module = importlib.import_module(f"jrl.trlx.trainer.nemo_{algorithm}_trainer")
    with pytest.raises(ImportError, match=r"megatron_trainer needs NeMo.*Accelerate\w+Trainer.*train\.mesh"):
        _ = module.megatron_trainer
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("size", ["20b", "2b", "1_3b"])
def test_a_default_configuration_of_nemo_is_refused_with_what_to_use_instead(size):
    name = f"default_nemo_{size}_config"
    with pytest.raises(ImportError, match=rf"{name} needs NeMo.*default_ppo_config.*train\.mesh"):
        getattr(trlx, name)()
