# SPDX-License-Identifier: Apache-2.0
"""What each field of the flat configurations means in jrl: mapped, accepted without effect, or refused.

Every field of transformers' `TrainingArguments` and of `RewardConfig`, `SFTConfig` and `DPOConfig` has an entry here;
`docs/trl_surface.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Meaning(NamedTuple):
    """What becomes of one field.

    Attributes:
      kind: "mapped": it does what it says. "ignored": another value than the default warns once and changes nothing.
        "refused": another value than the default is an error.
      text: Where it goes, or why it means nothing here.
    """

    kind: Literal["mapped", "ignored", "refused"]
    text: str


def _mapped(text: str) -> Meaning:
    return Meaning("mapped", text)


def _ignored(text: str) -> Meaning:
    return Meaning("ignored", text)


def _refused(text: str) -> Meaning:
    return Meaning("refused", text)


_XLA = "XLA compiles the whole step, and there is nothing to choose"
_LOADER = "batches are made on the host between two steps, without worker processes"
_ONE_PROGRAM = "one program runs on all devices of the mesh; there are no replicas to keep in step"
_TORCH_MEMORY = "it speaks of torch's memory"
_TRACKER = "trackers are wandb, tensorboard and metrics.jsonl"
_MESH = "parameters are placed by the mesh: give `mesh`, such as {'fsdp': 4}"
_HUB = "training uploads nothing by itself: `trainer.push_to_hub(repo_id=...)` does so when asked"

TRAINING_ARGUMENTS: Mapping[str, Meaning] = {
    "output_dir": _mapped("`train.checkpoint_dir`: checkpoints, metrics.jsonl and the model"),
    "per_device_train_batch_size": _mapped("times the devices: `train.minibatch_size`"),
    "num_train_epochs": _mapped("passes over the data: `train.epochs` and `train.total_steps`"),
    "max_steps": _mapped("`train.total_steps` where positive"),
    "learning_rate": _mapped("`optimizer.kwargs.lr`"),
    "lr_scheduler_type": _mapped("`scheduler.name`; `jrl.trl.optimization.SCHEDULES` lists the names"),
    "lr_scheduler_kwargs": _mapped("arguments of the schedule"),
    "warmup_steps": _mapped("steps of the schedule's warm-up; below 1 a share of all steps"),
    "optim": _mapped("`optimizer.name`; 8-bit and other optimizers of torch packages are refused by name"),
    "optim_args": _mapped("`name=value, ...`: further arguments of the optimizer"),
    "weight_decay": _mapped("`optimizer.kwargs.weight_decay`; not on norms and biases"),
    "adam_beta1": _mapped("`optimizer.kwargs.betas`"),
    "adam_beta2": _mapped("`optimizer.kwargs.betas`"),
    "adam_epsilon": _mapped("`optimizer.kwargs.eps`"),
    "optim_target_modules": _refused(
        "it belongs to GaLore and Apollo, which jrl has not; train LoRA adapters"
    ),
    "gradient_accumulation_steps": _mapped("`train.batch_size` = this × `train.minibatch_size`"),
    "average_tokens_across_devices": _ignored(
        "sums and token counts are always taken over all devices and microbatches"
    ),
    "max_grad_norm": _mapped("`train.max_grad_norm`; 0 is no clipping"),
    "label_smoothing_factor": _refused(
        "no loss here smooths labels over the vocabulary; DPO's is `label_smoothing`"
    ),
    "bf16": _mapped("`train.compute_dtype`: bfloat16, or float32; None: bfloat16 on an accelerator"),
    "fp16": _mapped("bfloat16, with a warning: without loss scaling half precision is not safe"),
    "bf16_full_eval": _ignored("evaluation computes as training does"),
    "fp16_full_eval": _ignored("evaluation computes as training does"),
    "tf32": _ignored("JAX_DEFAULT_MATMUL_PRECISION sets the precision of matrix products"),
    "activation_checkpointing": _mapped("`train.remat`"),
    "activation_checkpointing_kwargs": _ignored("`train.remat` recomputes every layer, and has no variants"),
    "gradient_checkpointing": _mapped("`train.remat`"),
    "gradient_checkpointing_kwargs": _ignored("`train.remat` recomputes every layer, and has no variants"),
    "torch_compile": _ignored(_XLA),
    "torch_compile_backend": _ignored(_XLA),
    "torch_compile_mode": _ignored(_XLA),
    "use_liger_kernel": _ignored("logits are computed in pieces wherever they are large"),
    "liger_kernel_config": _ignored("logits are computed in pieces wherever they are large"),
    "use_cache": _ignored("sampling always uses its cache, training never"),
    "neftune_noise_alpha": _refused("only supervised fine-tuning has noise on the embeddings"),
    "torch_empty_cache_steps": _ignored(_TORCH_MEMORY),
    "auto_find_batch_size": _ignored("a step that does not fit fails; take fewer rows or more accumulation"),
    "logging_strategy": _mapped("steps, epoch or no: the windows of `state.log_history`"),
    "logging_steps": _mapped("length of a window; below 1 a share of all steps"),
    "logging_first_step": _mapped("whether the first step is a window of its own"),
    "log_on_each_node": _ignored("the first process logs"),
    "logging_nan_inf_filter": _ignored(
        "a step that is not finite is skipped and counted, and its figures are shown"
    ),
    "include_num_input_tokens_seen": _ignored("`num_tokens` is always counted"),
    "log_level": _ignored("jrl does not write to transformers' log"),
    "log_level_replica": _ignored("jrl does not write to transformers' log"),
    "disable_tqdm": _ignored("a run draws its bar only where the output is a terminal"),
    "report_to": _mapped("`train.tracker`: wandb, tensorboard or none; others are refused by name"),
    "run_name": _mapped("`train.run_name`"),
    "project": _mapped("`train.project_name`"),
    "trackio_space_id": _ignored(_TRACKER),
    "trackio_bucket_id": _ignored(_TRACKER),
    "trackio_static_space_id": _ignored(_TRACKER),
    "eval_strategy": _mapped("no: a run does not evaluate; steps or epoch: `train.eval_interval`"),
    "eval_steps": _mapped("`train.eval_interval`; below 1 a share of all steps"),
    "eval_delay": _mapped("epochs or steps before the first evaluation of a run"),
    "per_device_eval_batch_size": _ignored("evaluation takes batches of the training's size"),
    "prediction_loss_only": _mapped("whether `compute_metrics` is left out"),
    "eval_on_start": _mapped("whether a run evaluates before its first step"),
    "eval_do_concat_batches": _ignored("predictions are always one array"),
    "eval_use_gather_object": _ignored("predictions are always one array"),
    "eval_accumulation_steps": _ignored("predictions go to the host batch by batch"),
    "include_for_metrics": _ignored("`compute_metrics` gets predictions and labels"),
    "batch_eval_metrics": _refused("`compute_metrics` is called once, with all predictions"),
    "save_only_model": _mapped("`train.save_optimizer`: without it checkpoints cannot be resumed"),
    "save_strategy": _mapped(
        "no: only the last; best: the best and the last; else `train.checkpoint_interval`"
    ),
    "save_steps": _mapped("`train.checkpoint_interval`; below 1 a share of all steps"),
    "save_on_each_node": _ignored("one checkpoint is written, by all processes together"),
    "save_total_limit": _mapped("`train.keep_checkpoints`; None keeps all"),
    "enable_jit_checkpoint": _ignored("SIGTERM always ends a run with a checkpoint"),
    "push_to_hub": _refused(_HUB),
    "hub_token": _mapped("of `trainer.push_to_hub`"),
    "hub_private_repo": _mapped("of `trainer.push_to_hub`"),
    "hub_model_id": _mapped("of `trainer.push_to_hub`; default: the name of `output_dir`"),
    "hub_strategy": _ignored(_HUB),
    "hub_always_push": _ignored(_HUB),
    "hub_revision": _mapped("of `trainer.push_to_hub`"),
    "load_best_model_at_end": _mapped("`train.save_best`, and its weights at the end of `train`"),
    "metric_for_best_model": _mapped("name of an evaluation metric; None: loss"),
    "greater_is_better": _mapped("None: unless the name ends with loss"),
    "ignore_data_skip": _ignored("the data order is a function of the step: nothing has to be skipped"),
    "restore_callback_states_from_checkpoint": _ignored("checkpoints hold no callbacks"),
    "full_determinism": _ignored(
        "a run is a function of its seed; XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    ),
    "seed": _mapped("`train.seed`"),
    "data_seed": _ignored("the order of the data follows from `seed`"),
    "use_cpu": _ignored("JAX_PLATFORMS=cpu chooses the device"),
    "accelerator_config": _ignored(_ONE_PROGRAM),
    "parallelism_config": _refused(_MESH),
    "dataloader_drop_last": _ignored("the last batch of a pass is filled up with rows that weigh nothing"),
    "dataloader_num_workers": _ignored(_LOADER),
    "dataloader_pin_memory": _ignored(_LOADER),
    "dataloader_persistent_workers": _ignored(_LOADER),
    "dataloader_prefetch_factor": _ignored(_LOADER),
    "dataloader_multiprocessing_context": _ignored(_LOADER),
    "dataloader_in_order": _ignored(_LOADER),
    "remove_unused_columns": _ignored("columns that nothing reads are left alone"),
    "label_names": _ignored("labels are made of the rows' own columns"),
    "train_sampling_strategy": _ignored("rows come in a random order, every row once a pass"),
    "length_column_name": _ignored("rows come in a random order, every row once a pass"),
    "ddp_find_unused_parameters": _ignored(_ONE_PROGRAM),
    "ddp_bucket_cap_mb": _ignored(_ONE_PROGRAM),
    "ddp_broadcast_buffers": _ignored(_ONE_PROGRAM),
    "ddp_static_graph": _ignored(_ONE_PROGRAM),
    "ddp_backend": _ignored(_ONE_PROGRAM),
    "ddp_timeout": _ignored(_ONE_PROGRAM),
    "fsdp": _refused(_MESH),
    "fsdp_config": _refused(_MESH),
    "deepspeed": _refused(_MESH),
    "debug": _ignored("JAX_DEBUG_NANS=true finds the operation that makes a NaN"),
    "skip_memory_metrics": _ignored("a run says at its start what memory it needs"),
    "do_train": _mapped("for scripts; trainers do not read it"),
    "do_eval": _mapped("for scripts; trainers do not read it"),
    "do_predict": _mapped("for scripts; trainers do not read it"),
    "resume_from_checkpoint": _mapped("`train.resume_from_checkpoint`; an argument of `train` comes first"),
    "local_rank": _ignored(_ONE_PROGRAM),
}
"""Of transformers."""

OLD_ARGUMENTS: Mapping[str, Meaning] = {
    "evaluation_strategy": _mapped("`eval_strategy`"),
    "warmup_ratio": _mapped("share of all steps that the schedule warms up, where `warmup_steps` is 0"),
    "logging_dir": _mapped("`train.logging_dir`: folder of the tracker's files"),
    "overwrite_output_dir": _mapped("`train.overwrite`: whether a new run may delete the checkpoints there"),
    "group_by_length": _ignored("rows come in a random order, every row once a pass"),
    "no_cuda": _ignored("JAX_PLATFORMS=cpu chooses the device"),
    "save_safetensors": _ignored("models are always written as safetensors"),
}
"""Of older transformers, which scripts still name."""

SHARED: Mapping[str, Meaning] = {
    "model_init_kwargs": _mapped("arguments of `from_pretrained` where `model` is a name"),
    "disable_dropout": _mapped("`method.disable_dropout`"),
    "dataset_num_proc": _mapped("processes that tokenise"),
    "eos_token": _mapped("the tokenizer's EOS; it must be in the vocabulary"),
    "pad_token": _mapped("the tokenizer's padding; it must be in the vocabulary. Deprecated"),
    "chat_template_path": _mapped("a .jinja file, or a model whose chat template is taken"),
    "pad_to_multiple_of": _ignored("rows are padded to a few widths, so that few programs are compiled"),
    "activation_offloading": _ignored("activations that do not fit are recomputed: `gradient_checkpointing`"),
    "trust_remote_code": _ignored("jrl has models of its own, and runs no code of a checkpoint"),
    "router_aux_loss_coef": _ignored("the router of a mixture of experts gets no loss of its own"),
    "padding_free": _ignored("`packing` of SFT puts several samples in a row; nothing else is unpadded"),
    "mesh": _mapped("`train.mesh`: sizes of the axes data, fsdp and tensor"),
}
"""Of more than one of the three configurations; `mesh` is jrl's own."""

REWARD: Mapping[str, Meaning] = {
    "max_length": _mapped("rows with a longer side are dropped, not cut: `train.seq_length`"),
    "center_rewards_coefficient": _mapped("`method.center_rewards_coefficient`"),
}

SFT: Mapping[str, Meaning] = {
    "dataset_text_field": _mapped("the column of texts"),
    "dataset_kwargs": _mapped("`append_concat_token`; `skip_prepare_dataset`: rows have `input_ids`"),
    "max_length": _mapped("`train.seq_length`"),
    "truncation_mode": _mapped("which end of a long row is kept: `tokenizer.truncation_side`"),
    "shuffle_dataset": _ignored("rows come in a random order, every row once a pass"),
    "packing": _mapped("`method.packing`"),
    "packing_strategy": _mapped("`method.packing_strategy`"),
    "eval_packing": _mapped("`method.eval_packing`"),
    "neftune_noise_alpha": _mapped("`method.neftune_noise_alpha`: noise on the embeddings in training"),
    "completion_only_loss": _mapped("`method.completion_only_loss`"),
    "assistant_only_loss": _mapped("`method.assistant_only_loss`"),
    "loss_type": _mapped("`method.loss_type`; None and chunked_nll are nll, whose logits are made in pieces"),
    "max_seq_length": _mapped("the older name of `max_length`"),
    "num_of_sequences": _ignored("rows are packed by tokens, all of them at once"),
    "chars_per_token": _ignored("rows are packed by tokens, all of them at once"),
    "dataset_batch_size": _ignored("rows are tokenised one by one"),
}

DPO: Mapping[str, Meaning] = {
    "max_length": _mapped("`train.seq_length`"),
    "truncation_mode": _mapped("`method.truncation_mode`"),
    "precompute_ref_log_probs": _mapped(
        "`method.precompute_ref_log_probs`; False: where the reference is frozen"
    ),
    "precompute_ref_batch_size": _mapped("`method.precompute_ref_batch_size`"),
    "loss_type": _mapped("`method.loss_type`, one name or several"),
    "loss_weights": _mapped("`method.loss_weights`"),
    "ld_alpha": _mapped("`method.ld_alpha`"),
    "f_divergence_type": _mapped("`method.f_divergence_type`"),
    "f_alpha_divergence_coef": _mapped("`method.f_alpha_divergence_coef`"),
    "label_smoothing": _mapped("`method.label_smoothing`"),
    "beta": _mapped("`method.beta`"),
    "use_weighting": _mapped("`method.use_weighting`"),
    "discopop_tau": _mapped("`method.discopop_tau`"),
    "sync_ref_model": _mapped("`method.sync_ref_model`"),
    "ref_model_mixup_alpha": _mapped("`method.ref_model_mixup_alpha`"),
    "ref_model_sync_steps": _mapped("`method.ref_model_sync_steps`"),
    "max_prompt_length": _mapped("`method.max_prompt_length`"),
    "max_completion_length": _mapped("`method.max_completion_length`"),
    "reference_free": _mapped("`method.reference_free`"),
    "label_pad_token_id": _mapped("of the batches that the collator makes"),
    "padding_value": _mapped("of the batches that the collator makes; None: the tokenizer's padding"),
    "generate_during_eval": _ignored("evaluation samples where `jrl.train` is given `eval_prompts`"),
    "model_adapter_name": _ignored("one adapter trains, and the base without it is the reference"),
    "ref_adapter_name": _refused(
        "one adapter trains, and the base without it is the reference; give `ref_model`"
    ),
    "rpo_alpha": _refused('the sum of two losses is `loss_type=["sigmoid", "sft"]` with `loss_weights`'),
    "ref_model_init_kwargs": _mapped("arguments of `from_pretrained` where `ref_model` is a name"),
    "is_encoder_decoder": _ignored("the checkpoint says what it is"),
    "max_target_length": _mapped("`method.max_completion_length`"),
    "dataset_batch_size": _ignored("rows are tokenised one by one"),
}
