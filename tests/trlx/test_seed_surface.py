# SPDX-License-Identifier: Apache-2.0
"""The seeds' published pages, argument by argument: presence, order and defaults of everything they name.

Sources: the pages Trainers, Pipelines, Data, Configs and API of trlX at trlx.readthedocs.io (`latest`), the pages
Pipelines, Orchestrators and Data of its first release (`stable`), and the configuration classes of its source.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import jrl.trlx as trlx

NONE: Any = object()
"""The page gives no default."""

# Function or class → arguments in order, with their defaults. Where jrl has a default more, a script does not notice.
SIGNATURES: dict[str, dict[str, Any]] = {
    "train": dict.fromkeys(
        (
            "model_path",
            "reward_fn",
            "dataset",
            "samples",
            "rewards",
            "prompts",
            "eval_prompts",
            "metric_fn",
            "config",
        )
    )
    | {"stop_sequences": NONE},
    "BaseRLTrainer": {
        "config": NONE,
        "reward_fn": None,
        "metric_fn": None,
        "logit_mask": None,
        "stop_sequences": None,
        "train_mode": False,
    },
    "BaseRLTrainer.push_to_store": {"data": NONE},
    "BaseRLTrainer.add_eval_pipeline": {"eval_pipeline": NONE},
    "BaseRLTrainer.sample": {"prompts": NONE, "length": NONE, "n_samples": NONE},
    "BaseRLTrainer.learn": {"log_fn": None, "save_fn": None, "eval_fn": None},
    "BaseRLTrainer.save": {"directory": None},
    "BaseRLTrainer.load": {"directory": None},
    "AccelerateRLTrainer": {"config": NONE},
    "AccelerateRLTrainer.setup_model": {},
    "AccelerateRLTrainer.setup_optimizer": {},
    "AccelerateRLTrainer.setup_scheduler": {},
    "AccelerateRLTrainer.decode": {
        "prompts": NONE,
        "samples": NONE,
        "prompt_sizes": None,
        "append_eos_token": False,
    },
    "AccelerateRLTrainer.generate": {"input_ids": NONE, "attention_mask": None},
    "AccelerateRLTrainer.generate_eval": {"input_ids": NONE, "attention_mask": None},
    "AccelerateRLTrainer.save_pretrained": {"directory": None},
    "AccelerateRLTrainer.save": {"directory": None},
    "AccelerateRLTrainer.load": {"directory": None},
    "AccelerateRLTrainer.add_eval_pipeline": {"eval_pipeline": NONE},
    "AccelerateRLTrainer.evaluate": {},
    "AccelerateRLTrainer.learn": {"log_fn": None, "save_fn": None, "eval_fn": None},
    "AccelerateRLTrainer.get_arch": {"config": NONE},
    "AccelerateRLTrainer.loss": {"batch": NONE},
    "AccelerateRLTrainer.prepare_learning": {},
    "AccelerateRLTrainer.create_train_dataloader": {},
    "AccelerateRLTrainer.post_backward_callback": {},
    "AccelerateRLTrainer.post_epoch_callback": {},
    "AcceleratePPOTrainer": {"config": NONE},
    "AcceleratePPOTrainer.get_arch": {"config": NONE},
    "AcceleratePPOTrainer.loss": {"batch": NONE},
    "AcceleratePPOTrainer.setup_rollout_logging": {"config": NONE},
    "AcceleratePPOTrainer.post_epoch_callback": {},
    "AcceleratePPOTrainer.post_backward_callback": {},
    "AcceleratePPOTrainer.create_train_dataloader": {},
    "AcceleratePPOTrainer.prepare_learning": {},
    "AcceleratePPOTrainer.add_prompt_pipeline": {"pipeline": NONE},
    "AcceleratePPOTrainer.make_experience": {"num_rollouts": 1024, "iter_count": 0},
    "AccelerateILQLTrainer": {"config": NONE},
    "AccelerateILQLTrainer.get_arch": {"config": NONE},
    "AccelerateILQLTrainer.post_backward_callback": {},
    "AccelerateILQLTrainer.loss": {"batch": NONE},
    "AccelerateILQLTrainer.create_train_dataloader": {},
    "AccelerateILQLTrainer.prepare_learning": {},
    "AccelerateILQLTrainer.make_experience": {"samples": NONE, "rewards": NONE, "max_length": 2048},
    "AccelerateILQLTrainer.make_experience_seq2seq": {"samples": NONE, "rewards": NONE, "max_length": 2048},
    "AccelerateSFTTrainer": {"config": NONE},
    "AccelerateSFTTrainer.get_arch": {"config": NONE},
    "AccelerateSFTTrainer.loss": {"batch": NONE},
    "AccelerateSFTTrainer.create_train_dataloader": {},
    "AccelerateSFTTrainer.prepare_learning": {},
    "AccelerateSFTTrainer.make_experience": {"samples": NONE, "seq_length": NONE},
    "AccelerateRFTTrainer": {"config": NONE},
    "AccelerateRFTTrainer.get_arch": {"config": NONE},
    "AccelerateRFTTrainer.loss": {"batch": NONE},
    "AccelerateRFTTrainer.create_train_dataloader": {},
    "AccelerateRFTTrainer.prepare_learning": {},
    "AccelerateRFTTrainer.make_experience": {},
    "AccelerateRFTTrainer.add_prompt_pipeline": {"pipeline": NONE},
    "NeMoPPOTrainer": {"config": NONE},
    "NeMoILQLTrainer": {"config": NONE},
    "NeMoSFTTrainer": {"config": NONE},
    "make_experience": {
        "samples": NONE,
        "rewards": NONE,
        "tokenizer": None,
        "max_length": 2048,
        "verbose": True,
    },
    "BasePipeline": {"path": "dataset"},
    "BasePipeline.create_loader": {"batch_size": NONE, "shuffle": NONE, "prep_fn": None, "num_workers": 0},
    "BaseRolloutStore": {"capacity": -1},
    "BaseRolloutStore.push": {"exps": NONE},
    "BaseRolloutStore.create_loader": {
        "batch_size": NONE,
        "shuffle": NONE,
        "prep_fn": None,
        "num_workers": 0,
    },
    "PromptPipeline": {
        "prompts": NONE,
        "max_prompt_length": NONE,
        "tokenizer": NONE,
        "add_special_tokens": False,
    },
    "PromptPipeline.create_loader": {
        "batch_size": NONE,
        "shuffle": False,
        "sampler": None,
        "drop_last": False,
    },
    "DialogStore": {"dialogs": NONE, "tokenizer": NONE},
    "DialogStore.create_loader": {"batch_size": NONE, "shuffle": False},
    "tokenize_dialogue": {"dialogue": NONE, "tokenizer": NONE, "max_length": 2048},
    "PPORolloutStorage": {"pad_token_id": NONE, "padding_side": NONE},
    "PPORolloutStorage.push": {"exps": NONE},
    "PPORolloutStorage.clear_history": {},
    "PPORolloutStorage.export_history": {"location": NONE, "only_text": True},
    "PPORolloutStorage.create_loader": {"batch_size": NONE, "shuffle": NONE},
    "ILQLRolloutStorage": dict.fromkeys(
        ("input_ids", "attention_mask", "rewards", "states_ixs", "actions_ixs", "dones"), NONE
    ),
    "ILQLRolloutStorage.create_loader": {"batch_size": NONE},
    "ILQLSeq2SeqRolloutStorage": dict.fromkeys(
        (
            "input_ids",
            "attention_mask",
            "decoder_input_ids",
            "rewards",
            "states_ixs",
            "actions_ixs",
            "dones",
        ),
        NONE,
    ),
    "ILQLSeq2SeqRolloutStorage.create_loader": {"batch_size": NONE},
    "MiniBatchIterator": {"data_loader": NONE, "mb_size": NONE, "num_mb": NONE},
    "Orchestrator": {"pipeline": NONE, "rl_model": NONE},
    "Orchestrator.make_experience": {},
    "PPOOrchestrator": {
        "model": NONE,
        "pipeline": NONE,
        "reward_fn": NONE,
        "metric_fn": None,
        "chunk_size": 512,
    },
    "PPOOrchestrator.make_experience": {"num_rollouts": 1024, "iter_count": 0},
    "PPOOrchestrator.score": {"samples": NONE},
    "OfflineOrchestrator": {"model": NONE, "split_token": None},
    "OfflineOrchestrator.make_experience": {"samples": NONE, "rewards": NONE},
    "register_trainer": {"name": NONE},
    "register_datapipeline": {"name": NONE},
    "register_orchestrator": {"name": NONE},
    "get_trainer": {"name": NONE},
    "get_pipeline": {"name": NONE},
    "get_method": {"name": NONE},
    "get_orchestrator": {"name": NONE},
    "logging.get_logger": {"name": None},
    "logging.set_verbosity": {"verbosity": NONE},
    "logging.add_handler": {"handler": NONE},
    "logging.remove_handler": {"handler": NONE},
} | {
    f"logging.{name}": {}
    for name in (
        "get_verbosity",
        "get_log_levels_dict",
        "disable_progress_bar",
        "enable_progress_bar",
        "is_progress_bar_enabled",
        "enable_explicit_format",
        "reset_format",
        "enable_default_handler",
        "disable_default_handler",
        "enable_propagation",
        "disable_propagation",
    )
}

# Data class → fields in order, with their defaults.
FIELDS: dict[str, dict[str, Any]] = {
    "GeneralElement": {},
    "RLElement": {"state": None, "action": None, "reward": None},
    "BatchElement": {"tokens": NONE, "masks": NONE},
    "PromptElement": {"text": NONE, "tokens": NONE},
    "PromptBatch": {"text": NONE, "tokens": NONE},
    "AccelerateRLElement": {"output_tokens": NONE, "rewards": NONE},
    "AccelerateRLBatchElement": {"output_tokens": NONE, "rewards": NONE},
    "DialogMessage": {"is_output": NONE, "tokens": NONE},
    "PPORLElement": dict.fromkeys(("query_tensor", "response_tensor", "logprobs", "values", "rewards"), NONE),
    "PPORLBatch": dict.fromkeys(("query_tensors", "response_tensors", "logprobs", "values", "rewards"), NONE),
    "ILQLElement": SIGNATURES["ILQLRolloutStorage"],
    "ILQLBatch": SIGNATURES["ILQLRolloutStorage"],
    "ILQLSeq2SeqElement": SIGNATURES["ILQLSeq2SeqRolloutStorage"],
    "ILQLSeq2SeqBatch": SIGNATURES["ILQLSeq2SeqRolloutStorage"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "TRLConfig": dict.fromkeys(("method", "model", "optimizer", "scheduler", "tokenizer", "train"), NONE),
    "ModelConfig": {
        "model_path": NONE,
        "model_arch_type": "causal",
        "num_layers_unfrozen": -1,
        "peft_config": None,
        "model_extra_configs": {},
    },
    "TokenizerConfig": {
        "tokenizer_path": NONE,
        "padding_side": "left",
        "truncation_side": "right",
        "tokenizer_extra_configs": {},
    },
    "OptimizerConfig": {"name": NONE, "kwargs": {}},
    "SchedulerConfig": {"name": NONE, "kwargs": {}},
    "TrainConfig": dict.fromkeys(
        (
            "total_steps",
            "seq_length",
            "epochs",
            "batch_size",
            "checkpoint_interval",
            "eval_interval",
            "pipeline",
            "trainer",
        ),
        NONE,
    )
    | {
        "trainer_kwargs": {},
        "project_name": "trlx",
        "run_name": None,
        "entity_name": None,
        "group_name": None,
        "checkpoint_dir": "ckpts",
        "rollout_logging_dir": None,
        "save_best": True,
        "save_optimizer": True,
        "resume_from_checkpoint": None,
        "tracker": "wandb",
        "logging_dir": None,
        "tags": [],
        "seed": 1000,
        "minibatch_size": None,
    },
    "MethodConfig": {"name": NONE},
    "PPOConfig": dict.fromkeys(
        (
            "name",
            "ppo_epochs",
            "num_rollouts",
            "chunk_size",
            "init_kl_coef",
            "target",
            "horizon",
            "gamma",
            "lam",
            "cliprange",
            "cliprange_value",
            "vf_coef",
            "scale_reward",
            "ref_mean",
            "ref_std",
            "cliprange_reward",
            "gen_kwargs",
        ),
        NONE,
    )
    | {"gen_experience_kwargs": None, "num_value_layers_unfrozen": 0},
    "ILQLConfig": dict.fromkeys(
        (
            "name",
            "tau",
            "gamma",
            "cql_scale",
            "awac_scale",
            "alpha",
            "beta",
            "steps_for_target_q_sync",
            "two_qs",
            "gen_kwargs",
        ),
        NONE,
    ),
    "SFTConfig": {"name": NONE, "gen_kwargs": NONE},
    "RFTConfig": {
        "name": NONE,
        "gen_kwargs": NONE,
        "start_percentile": 0.7,
        "end_percentile": 0.95,
        "n_improve_steps": 4,
        "n_generations_per_prompt": 32,
    },
}
CONFIG_METHODS: dict[str, dict[str, Any]] = {
    "TRLConfig.load_yaml": {"yml_fp": NONE},
    "TRLConfig.from_dict": {"config": NONE},
    "TRLConfig.to_dict": {},
    "TRLConfig.evolve": {},
    "TRLConfig.update": {"baseconfig": NONE, "config": NONE},
} | {
    f"{section}Config.from_dict": {"config": NONE} for section in ("Model", "Train", "Method", "PPO", "ILQL")
}

# Names of the first release that later ones renamed.
RENAMED = {
    "BaseRLModel": "BaseRLTrainer",
    "AccelerateRLModel": "AccelerateRLTrainer",
    "AcceleratePPOModel": "AcceleratePPOTrainer",
    "AccelerateILQLModel": "AccelerateILQLTrainer",
    "ILQLModel": "AccelerateILQLTrainer",
    "register_pipeline": "register_datapipeline",
}

ATTRIBUTES = {
    "AccelerateRLTrainer": (
        "model",
        "tokenizer",
        "opt",
        "scheduler",
        "accelerator",
        "store",
        "iter_count",
        "total_steps",
        "n_inner_epochs",
        "nth_evaluation",
        "generate_kwargs",
        "mb_size",
        "num_mb",
        "config",
        "reward_fn",
        "metric_fn",
        "stop_sequences",
        "logit_mask",
        "max_length",
    ),
}


def resolve(name: str) -> Any:
    """An object by its dotted name under `jrl.trlx`."""
    found: Any = trlx
    for part in name.split("."):
        found = getattr(found, part)
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same order from the first on, no required argument more, and each default that the page gives."""
    assert list(found)[: len(expected)] == list(expected)
    for name, default in expected.items():
        if default is not NONE:
            assert found[name] == default, name
    more = {name: default for name, default in found.items() if name not in expected}
    assert NONE not in more.values(), f"required and not on the page: {more}"


def arguments(obj: Any) -> dict[str, Any]:
    """Name → default, NONE where there is none; without `self` and without `**kwargs`."""
    parameters = inspect.signature(obj).parameters.values()
    return {
        p.name: NONE if p.default is p.empty else p.default
        for p in parameters
        if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


@pytest.mark.parametrize("name", [*SIGNATURES, *CONFIG_METHODS])
def test_signature(name):
    check(arguments(resolve(name)), {**SIGNATURES, **CONFIG_METHODS}[name])


@pytest.mark.parametrize("name", FIELDS)
def test_data_class(name):
    cls = resolve(name)
    found = {}
    for field in dataclasses.fields(cls):
        found[field.name] = NONE if field.default is dataclasses.MISSING else field.default
    check(found, FIELDS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_class(name):
    check(arguments(resolve(name)), CONFIGS[name])


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_the_first_release_is_the_present_one(old):
    assert resolve(old) is resolve(RENAMED[old])


@pytest.mark.parametrize(
    "level", ["CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING"]
)
def test_logging_has_the_levels(level):
    assert isinstance(resolve(f"logging.{level}"), int)


def test_a_trainer_has_the_seeds_attributes():
    documented = inspect.getdoc(trlx.AccelerateRLTrainer) or ""
    described = {line.strip().split(":")[0] for line in documented.splitlines()}
    of_base = {"reward_fn", "metric_fn", "stop_sequences", "logit_mask"}
    for name in ATTRIBUTES["AccelerateRLTrainer"]:
        assert name in described | of_base or hasattr(trlx.AccelerateRLTrainer, name), name


@pytest.mark.parametrize("method", ["PPO", "ILQL", "SFT"])
def test_the_default_config_of(method):
    config = resolve(f"default_{method.lower()}_config")()
    assert isinstance(config, trlx.TRLConfig)
    assert config.train.trainer == f"Accelerate{method}Trainer" and config.train.tracker == "wandb"


@pytest.mark.parametrize(
    ("look_up", "names"),
    [
        (
            "get_trainer",
            (
                "BaseRLTrainer",
                "AccelerateRLTrainer",
                "AcceleratePPOTrainer",
                "AccelerateILQLTrainer",
                "AccelerateSFTTrainer",
                "AccelerateRFTTrainer",
                "NeMoPPOTrainer",
                "NeMoILQLTrainer",
                "NeMoSFTTrainer",
            ),
        ),
        ("get_pipeline", ("BasePipeline", "PromptPipeline")),
        ("get_orchestrator", ("Orchestrator", "PPOOrchestrator", "OfflineOrchestrator")),
    ],
)
def test_registered_names_are_found_in_any_case(look_up, names):
    for name in names:
        assert resolve(look_up)(name.lower()) is resolve(look_up)(name.upper()) is resolve(name)


def test_every_public_name_is_there():
    assert all(hasattr(trlx, name) for name in trlx.__all__)
    assert len(set(trlx.__all__)) == len(trlx.__all__)
