# SPDX-License-Identifier: Apache-2.0
"""The seed pages of TRL, argument by argument: presence, order and defaults of everything that they name.

Sources: the trainer page of TRL 0.7.1 (`PPOTrainer`, `RewardTrainer`, `SFTTrainer`, `DPOTrainer`, `set_seed`), what
0.7.11 added, and the pages of `RewardConfig` and `TrlParser` of the present releases.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

import jrl.trl as trl
from tests.trlx.test_seed_surface import NONE, arguments, check

_SHARED_FIRST = {"model": None}
_REWARD_CLASSIC = _SHARED_FIRST | {
    "args": None,
    "data_collator": None,
    "train_dataset": None,
    "eval_dataset": None,
    "tokenizer": None,
    "model_init": None,
    "compute_metrics": None,
    "callbacks": None,
    "optimizers": (None, None),
    "preprocess_logits_for_metrics": None,
}
_BATCH = {"model": NONE, "batch": NONE}

SIGNATURES: dict[str, dict[str, Any]] = {
    "PPOTrainer": dict.fromkeys(
        (
            "config",
            "model",
            "ref_model",
            "tokenizer",
            "dataset",
            "optimizer",
            "data_collator",
            "num_shared_layers",
            "lr_scheduler",
        )
    ),
    "PPOTrainer.prepare_dataloader": {"dataset": NONE, "data_collator": None},
    "PPOTrainer.generate": {
        "query_tensor": NONE,
        "length_sampler": None,
        "batch_size": 4,
        "return_prompt": True,
    },
    "PPOTrainer.step": {"queries": NONE, "responses": NONE, "scores": NONE, "response_masks": None},
    "PPOTrainer.gather_stats": {"stats": NONE},
    "PPOTrainer.prepare_model_inputs": {"queries": NONE, "responses": NONE},
    "PPOTrainer.batched_forward_pass": {
        "model": NONE,
        "queries": NONE,
        "responses": NONE,
        "model_inputs": NONE,
        "return_logits": False,
        "response_masks": None,
    },
    "PPOTrainer.train_minibatch": dict.fromkeys(
        ("old_logprobs", "values", "logprobs", "logits", "vpreds", "mask", "advantages", "returns"), NONE
    ),
    "PPOTrainer.compute_rewards": dict.fromkeys(("scores", "logprobs", "ref_logprobs", "masks"), NONE),
    "PPOTrainer.compute_advantages": dict.fromkeys(("values", "rewards", "mask"), NONE),
    "PPOTrainer.loss": dict.fromkeys(
        ("old_logprobs", "values", "logits", "vpreds", "logprobs", "mask", "advantages", "returns"), NONE
    ),
    "PPOTrainer.record_step_stats": {"kl_coef": NONE},
    "PPOTrainer.log_stats": {
        "stats": NONE,
        "batch": NONE,
        "rewards": NONE,
        "columns_to_log": ("query", "response"),  # a list there
    },
    "PPOTrainer.create_model_card": {"path": NONE, "model_name": "TRL Model"},
    "create_reference_model": {"model": NONE, "num_shared_layers": None, "pattern": None},
    "set_seed": {"seed": NONE},
    "LengthSampler": {"min_value": NONE, "max_value": NONE},
    "AdaptiveKLController": {"init_kl_coef": NONE, "target": NONE, "horizon": NONE},
    "AdaptiveKLController.update": {"current": NONE, "n_steps": NONE},
    "FixedKLController": {"kl_coef": NONE},
    "FixedKLController.update": {"current": NONE, "n_steps": NONE},
    "RunningMoments.update": {"xs": NONE},
    "masked_mean": {"values": NONE, "mask": NONE, "axis": None},
    "masked_var": {"values": NONE, "mask": NONE, "unbiased": True},
    "masked_whiten": {"values": NONE, "mask": NONE, "shift_mean": True},
    "whiten": {"values": NONE, "shift_mean": True},
    "logprobs_from_logits": {"logits": NONE, "labels": NONE, "gather": True},
    "entropy_from_logits": {"logits": NONE},
    "clip_by_value": {"x": NONE, "tensor_min": NONE, "tensor_max": NONE},
    "flatten_dict": {"nested": NONE, "sep": "/"},
    "stack_dicts": {"stats_dicts": NONE},
    "stats_to_np": {"stats_dict": NONE},
    "convert_to_scalar": {"stats": NONE},
    "add_suffix": {"input_dict": NONE, "suffix": NONE},
    "average_torch_dicts": {"list_of_dicts": NONE},
    "pad_to_size": {"tensor": NONE, "size": NONE, "dim": 1, "padding": 50256},
    "respond_to_batch": {"model": NONE, "queries": NONE, "txt_len": 20, "top_k": 0, "top_p": 1.0},
    "RewardTrainer": _REWARD_CLASSIC | {"max_length": None, "peft_config": None},
    "RewardTrainer.train": {"resume_from_checkpoint": None},
    "RewardTrainer.evaluate": {"eval_dataset": None, "ignore_keys": None, "metric_key_prefix": "eval"},
    "RewardTrainer.predict": {"test_dataset": NONE, "ignore_keys": None, "metric_key_prefix": "test"},
    "RewardTrainer.log": {"logs": NONE, "start_time": None},
    "RewardTrainer.save_model": {"output_dir": None},
    "RewardTrainer.save_state": {},
    "RewardTrainer.push_to_hub": {"commit_message": "End of training", "blocking": True},
    "RewardTrainer.create_model_card": {"model_name": None, "dataset_name": None, "tags": None},
    "RewardTrainer.add_callback": {"callback": NONE},
    "RewardTrainer.get_train_dataloader": {},
    "RewardTrainer.get_eval_dataloader": {"eval_dataset": None},
    "RewardTrainer.get_test_dataloader": {"test_dataset": NONE},
    "SFTTrainer": _REWARD_CLASSIC
    | {
        "peft_config": None,
        "dataset_text_field": None,
        "packing": False,
        "formatting_func": None,
        "max_seq_length": None,
        "infinite": False,
        "num_of_sequences": 1024,
        "chars_per_token": 3.6,
        "dataset_num_proc": None,
        "dataset_batch_size": 1000,
        "neftune_noise_alpha": None,
        "model_init_kwargs": None,
        "dataset_kwargs": None,
    },
    "DPOTrainer": {
        "model": None,
        "ref_model": None,
        "beta": 0.1,
        "args": None,
        "data_collator": None,
        "label_pad_token_id": -100,
        "padding_value": 0,
        "truncation_mode": "keep_end",
        "train_dataset": None,
        "eval_dataset": None,
        "tokenizer": None,
        "model_init": None,
        "callbacks": None,
        "optimizers": (None, None),
        "preprocess_logits_for_metrics": None,
        "max_length": None,
        "max_prompt_length": None,
        "peft_config": None,
        "disable_dropout": True,
    },
    "DDPOTrainer": {
        "config": NONE,
        "reward_function": NONE,
        "prompt_function": NONE,
        "sd_pipeline": NONE,
        "image_samples_hook": None,
    },
    "DDPOTrainer.train": {"epochs": None},
    "DDPOTrainer.step": {"epoch": NONE, "global_step": NONE},
    "DDPOTrainer.compute_rewards": {"prompt_image_pairs": NONE, "is_async": False},
    "DDPOTrainer.calculate_loss": dict.fromkeys(
        ("latents", "timesteps", "next_latents", "log_probs", "advantages", "embeds"), NONE
    ),
    "DDPOTrainer.loss": {"advantages": NONE, "clip_range": NONE, "ratio": NONE},
    "DDPOTrainer._generate_samples": {"iterations": NONE, "batch_size": NONE},
    "DDPOTrainer._config_check": {},
    "DDPOTrainer.create_model_card": {"model_name": None, "dataset_name": None, "tags": None},
    "DefaultDDPOStableDiffusionPipeline": {
        "pretrained_model_name": NONE,
        "pretrained_model_revision": "main",
        "use_lora": True,
    },
    "DefaultDDPOStableDiffusionPipeline.get_trainable_layers": {},
    "DefaultDDPOStableDiffusionPipeline.save_pretrained": {"output_dir": NONE},
    "DefaultDDPOStableDiffusionPipeline.save_checkpoint": dict.fromkeys(
        ("models", "weights", "output_dir"), NONE
    ),
    "DefaultDDPOStableDiffusionPipeline.load_checkpoint": dict.fromkeys(("models", "input_dir"), NONE),
    "DPOTrainer.concatenated_inputs": {"batch": NONE},
    "DPOTrainer.concatenated_forward": _BATCH,
    "DPOTrainer.dpo_loss": dict.fromkeys(
        (
            "policy_chosen_logps",
            "policy_rejected_logps",
            "reference_chosen_logps",
            "reference_rejected_logps",
        ),
        NONE,
    ),
    "DPOTrainer.get_batch_metrics": _BATCH | {"train_eval": "train"},
    "DPOTrainer.get_batch_loss_metrics": _BATCH | {"train_eval": "train"},
    "DPOTrainer.get_batch_samples": _BATCH,
    "DPOTrainer.tokenize_row": {"feature": NONE, "model": None},
    "DPOTrainer.compute_reference_log_probs": {"padded_batch": NONE},
    "DPOTrainer.store_metrics": {"metrics": NONE, "train_eval": "train"},
    "DPOTrainer.log": {"logs": NONE},
    "RewardDataCollatorWithPadding": {
        "tokenizer": NONE,
        "padding": True,
        "max_length": None,
        "pad_to_multiple_of": None,
        "return_tensors": "pt",
    },
    "DPODataCollatorWithPadding": {
        "tokenizer": NONE,
        "padding": True,
        "max_length": None,
        "max_prompt_length": None,
        "label_pad_token_id": -100,
        "padding_value": 0,
        "truncation_mode": "keep_end",
    },
    "DataCollatorForCompletionOnlyLM": {
        "response_template": NONE,
        "instruction_template": None,
        "mlm": False,
        "ignore_index": -100,
    },
    "ConstantLengthDataset": {
        "tokenizer": NONE,
        "dataset": NONE,
        "dataset_text_field": None,
        "formatting_func": None,
        "infinite": False,
        "seq_length": 1024,
        "num_of_sequences": 1024,
        "chars_per_token": 3.6,
        "eos_token_id": 0,
        "shuffle": True,
        "append_concat_token": True,
        "add_special_tokens": True,
    },
    "TrlParser": {"dataclass_types": None},
    "TrlParser.parse_args_and_config": {
        "args": None,
        "return_remaining_strings": False,
        "fail_with_unknown_args": True,
    },
    "TrlParser.set_defaults_with_config": {},
}

# Arguments that later releases added; their place is behind those of the page.
NEWER = {
    "RewardTrainer": {"processing_class": None, "optimizer_cls_and_kwargs": None},
    "SFTTrainer": {"processing_class": None, "optimizer_cls_and_kwargs": None},
    "DPOTrainer": {
        "label_smoothing": 0,
        "loss_type": "sigmoid",
        "max_target_length": None,
        "is_encoder_decoder": None,
        "generate_during_eval": False,
        "compute_metrics": None,
        "precompute_ref_log_probs": False,
        "dataset_num_proc": None,
        "model_init_kwargs": None,
        "ref_model_init_kwargs": None,
        "model_adapter_name": None,
        "ref_adapter_name": None,
        "reference_free": False,
        "processing_class": None,
        "optimizer_cls_and_kwargs": None,
    },
}

_SHARED = {"logging_steps": 10, "gradient_checkpointing": True, "bf16": None, "lr_scheduler_kwargs": None}
# What is not transformers' own: fields in order, with their defaults.
OVERRIDDEN = {
    "RewardConfig": _SHARED | {"learning_rate": 1e-4},
    "SFTConfig": _SHARED | {"learning_rate": 2e-5},
    "DPOConfig": _SHARED | {"learning_rate": 1e-6},
}
OWN: dict[str, dict[str, Any]] = {
    "RewardConfig": {
        "model_init_kwargs": None,
        "chat_template_path": None,
        "disable_dropout": True,
        "dataset_num_proc": None,
        "eos_token": None,
        "pad_token": None,
        "max_length": 1024,
        "pad_to_multiple_of": None,
        "center_rewards_coefficient": None,
        "activation_offloading": False,
    },
    "SFTConfig": {
        "model_init_kwargs": None,
        "router_aux_loss_coef": 0.001,
        "trust_remote_code": False,
        "chat_template_path": None,
        "dataset_text_field": "text",
        "dataset_kwargs": None,
        "dataset_num_proc": None,
        "eos_token": None,
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "shuffle_dataset": False,
        "packing": False,
        "packing_strategy": "bfd",
        "padding_free": False,
        "pad_to_multiple_of": None,
        "eval_packing": None,
        "completion_only_loss": None,
        "assistant_only_loss": False,
        "loss_type": None,
        "activation_offloading": False,
        "pad_token": None,
    },
    "DPOConfig": {
        "model_init_kwargs": None,
        "trust_remote_code": False,
        "router_aux_loss_coef": 0.001,
        "disable_dropout": True,
        "dataset_num_proc": None,
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "padding_free": False,
        "pad_to_multiple_of": None,
        "precompute_ref_log_probs": False,
        "precompute_ref_batch_size": None,
        "loss_type": ["sigmoid"],
        "loss_weights": None,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "beta": 0.1,
        "use_weighting": False,
        "discopop_tau": 0.05,
        "activation_offloading": False,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "pad_token": None,
    },
}

# The page's order; other classes of the page are in their own modules' tests.
FIELDS: dict[str, dict[str, Any]] = {
    "DDPOConfig": {
        "exp_name": Path(sys.argv[0]).name.removesuffix(".py"),
        "run_name": "",
        "seed": 42,
        "log_with": None,
        "tracker_kwargs": {},
        "accelerator_kwargs": {},
        "project_kwargs": {},
        "tracker_project_name": "jrl",  # "trl" there
        "logdir": "logs",
        "num_epochs": 100,
        "save_freq": 1,
        "num_checkpoint_limit": 5,
        "mixed_precision": None,  # "fp16" there
        "allow_tf32": True,
        "resume_from": "",
        "sample_num_steps": 50,
        "sample_eta": 1.0,
        "sample_guidance_scale": 5.0,
        "sample_batch_size": 1,
        "sample_num_batches_per_epoch": 2,
        "train_batch_size": 1,
        "train_use_8bit_adam": False,
        "train_learning_rate": 3e-4,
        "train_adam_beta1": 0.9,
        "train_adam_beta2": 0.999,
        "train_adam_weight_decay": 1e-4,
        "train_adam_epsilon": 1e-8,
        "train_gradient_accumulation_steps": 1,
        "train_max_grad_norm": 1.0,
        "train_num_inner_epochs": 1,
        "train_cfg": True,
        "train_adv_clip_max": 5.0,
        "train_clip_range": 1e-4,
        "train_timestep_fraction": 1.0,
        "per_prompt_stat_tracking": False,
        "per_prompt_stat_tracking_buffer_size": 16,
        "per_prompt_stat_tracking_min_count": 16,
        "async_reward_computation": False,
        "max_workers": 2,
        "negative_prompts": "",
        "push_to_hub": False,
    },
    "PPOConfig": {
        "task_name": None,
        "model_name": None,
        "steps": 20000,
        "learning_rate": 1e-5,
        "adap_kl_ctrl": True,
        "init_kl_coef": 0.2,
        "kl_penalty": "kl",
        "target": 6,
        "horizon": 10000,
        "gamma": 1,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "batch_size": 256,
        "forward_batch_size": None,
        "mini_batch_size": 1,
        "backward_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "ppo_epochs": 4,
        "remove_unused_columns": True,
        "log_with": None,
        "tracker_kwargs": {},
        "accelerator_kwargs": {},
        "project_kwargs": {},
        "tracker_project_name": "trl",
        "max_grad_norm": None,
        "seed": 0,
        "optimize_cuda_cache": False,
        "early_stopping": False,
        "target_kl": 0.1,
        "push_to_hub_if_best_kwargs": {},
        "compare_steps": 1,
        "ratio_threshold": 10.0,
        "use_score_scaling": False,
        "use_score_norm": False,
        "score_clip": None,
    },
    "ScriptArguments": {
        "dataset_name": None,
        "dataset_config": None,
        "dataset_train_split": "train",
        "dataset_test_split": "test",
        "dataset_streaming": False,
        "ignore_bias_buffers": False,
    },
    "DatasetMixtureConfig": {"datasets": [], "streaming": False, "test_split_size": None},
    "ModelConfig": {
        "model_name_or_path": None,
        "model_revision": "main",
        "dtype": "float32",
        "trust_remote_code": False,
        "attn_implementation": None,
        "use_peft": False,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": None,
        "lora_target_parameters": None,
        "lora_modules_to_save": None,
        "lora_task_type": "CAUSAL_LM",
        "use_rslora": False,
        "use_dora": False,
        "load_in_8bit": False,
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": False,
        "bnb_4bit_quant_storage": None,
    },
}

# Names that a trainer has once it is made, by class; found in the source of its classes.
ATTRIBUTES = {
    "RewardTrainer": (
        "args",
        "model",
        "tokenizer",
        "processing_class",
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "model_init",
        "compute_metrics",
        "callbacks",
        "preprocess_logits_for_metrics",
        "state",
        "control",
    ),
    "SFTTrainer": (
        "formatting_func",
        "dataset_text_field",
        "infinite",
        "num_of_sequences",
        "chars_per_token",
        "dataset_batch_size",
    ),
    "DPOTrainer": (
        "ref_model",
        "beta",
        "loss_type",
        "label_pad_token_id",
        "padding_value",
        "max_length",
        "max_prompt_length",
        "truncation_mode",
    ),
}
MODELS = (
    "AutoModelForCausalLM",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSeq2SeqLMWithValueHead",
    "AutoModelForSequenceClassification",
)


def resolve(name: str) -> Any:
    """An object by its dotted name under `jrl.trl`."""
    found: Any = trl
    for part in name.split("."):
        found = getattr(found, part)
    return found


def field_defaults(cls: type) -> dict[str, Any]:
    """Field → default, in the order of the constructor."""
    found = {}
    for entry in dataclasses.fields(cls):
        made = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        found[entry.name] = NONE if made is dataclasses.MISSING else made
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    check(arguments(resolve(name)), SIGNATURES[name])


@pytest.mark.parametrize("name", NEWER)
def test_newer_arguments_come_behind_those_of_the_page(name):
    found = arguments(resolve(name))
    assert NEWER[name].items() <= found.items()
    last = max(list(found).index(argument) for argument in SIGNATURES[name])
    assert min(list(found).index(argument) for argument in NEWER[name]) > last


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    check(field_defaults(resolve(name)), FIELDS[name])


@pytest.mark.parametrize("name", OWN)
def test_a_flat_configuration_has_transformers_fields_and_its_own(name):
    found, of_transformers = field_defaults(resolve(name)), field_defaults(TrainingArguments)
    assert issubclass(resolve(name), TrainingArguments)
    assert list(found)[: len(of_transformers)] == list(of_transformers)
    changed = {key for key, value in of_transformers.items() if found[key] != value}
    assert {key: found[key] for key in OVERRIDDEN[name]} == OVERRIDDEN[name]
    assert changed <= OVERRIDDEN[name].keys()
    own = [key for key in found if key in OWN[name]]
    assert own == list(OWN[name]) and {key: found[key] for key in own} == OWN[name]


@pytest.mark.parametrize("name", OWN)
def test_a_flat_configuration_has_an_option_for_every_field(name):
    parser = HfArgumentParser((resolve(name),))
    (found,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--logging_steps", "3"])
    assert (found.output_dir, found.logging_steps) == ("out", 3)
    assert {entry.name for entry in dataclasses.fields(found)} <= {action.dest for action in parser._actions}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name):
    cls = resolve(name)
    assigned = set(dir(cls))
    for owner in cls.__mro__:
        if owner.__module__.startswith("jrl.trl"):
            tree = ast.parse(Path(inspect.getfile(owner)).read_text(encoding="utf-8"))
            assigned |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
    assert not set(ATTRIBUTES[name]) - assigned


@pytest.mark.parametrize("name", MODELS)
def test_models_are_named_by_from_pretrained(name):
    assert next(iter(arguments(resolve(name).from_pretrained))) == "pretrained_model_name_or_path"


def test_the_package_lists_what_its_modules_offer():
    package = Path(inspect.getfile(trl)).parent
    offered = set()
    for path in set(package.glob("*.py")) - {package / "__init__.py"}:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                offered |= set(ast.literal_eval(node.value))
    assert set(trl.__all__) == offered
    assert all(getattr(trl, name) is not None for name in trl.__all__)


def test_the_package_imports_what_is_asked_for_alone():
    code = "import sys, jrl.trl; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_flat_trainers_are_those_of_the_top_level():
    import jrl

    for name in (
        "DDPOConfig",
        "DDPOTrainer",
        "DPOConfig",
        "DPOTrainer",
        "DefaultDDPOStableDiffusionPipeline",
        "RewardConfig",
        "RewardTrainer",
    ):
        assert getattr(jrl, name) is getattr(trl, name)
