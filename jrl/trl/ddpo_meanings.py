# SPDX-License-Identifier: Apache-2.0
"""What each field of `DDPOConfig` means in jrl: mapped, accepted without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping

from jrl.trl.meanings import Meaning


def _method(*names: str) -> dict[str, Meaning]:
    return {name: Meaning("mapped", f"`method.{name}`") for name in names}


def _mapped(text: str) -> Meaning:
    return Meaning("mapped", text)


def _ignored(text: str) -> Meaning:
    return Meaning("ignored", text)


def _refused(text: str) -> Meaning:
    return Meaning("refused", text)


_TRACKER = "`entity`, `group`, `name` and `tags` of wandb: `train.entity_name`, `train.group_name`, ..."

DDPO: Mapping[str, Meaning] = {
    "exp_name": _mapped("`train.group_name`, the tracker's name of runs that belong together"),
    "run_name": _mapped("`train.run_name`, the tracker's name of the run"),
    "seed": _mapped("`train.seed`"),
    "log_with": _mapped("`train.tracker`; the hook gets a tracker without it too"),
    "tracker_kwargs": _mapped(_TRACKER),
    "accelerator_kwargs": _ignored("one program runs on all devices of the mesh"),
    "project_kwargs": _mapped("`project_dir`, `total_limit` and `logging_dir`, see below"),
    "tracker_project_name": _mapped("`train.project_name`"),
    "logdir": _mapped("`train.checkpoint_dir`, the run's folder"),
    "num_epochs": _mapped("`train.epochs`"),
    "save_freq": _mapped("`train.checkpoint_interval`, in epochs here"),
    "num_checkpoint_limit": _mapped("`train.keep_checkpoints`"),
    "mixed_precision": _mapped(
        "`train.compute_dtype`; fp16 also scales the loss, and both are float32 on a CPU"
    ),
    "allow_tf32": _mapped("False: products are computed at the highest precision"),
    "resume_from": _mapped("`train.resume_from_checkpoint`"),
    **_method("sample_num_steps", "sample_eta", "sample_guidance_scale"),
    "sample_batch_size": _mapped("times the devices: `method.sample_batch_size`"),
    **_method("sample_num_batches_per_epoch"),
    "train_batch_size": _mapped("times the devices: `train.minibatch_size`"),
    "train_use_8bit_adam": _refused(
        "train an adapter (`use_lora=True`), whose moments take 6 MB; 8-bit ones would save nothing"
    ),
    "train_learning_rate": _mapped("`optimizer.kwargs.lr`"),
    "train_adam_beta1": _mapped("`optimizer.kwargs.betas`"),
    "train_adam_beta2": _mapped("`optimizer.kwargs.betas`"),
    "train_adam_weight_decay": _mapped("`optimizer.kwargs.weight_decay`; not on norms and biases"),
    "train_adam_epsilon": _mapped("`optimizer.kwargs.eps`"),
    "train_gradient_accumulation_steps": _mapped("`train.batch_size` = this × `train.minibatch_size`"),
    "train_max_grad_norm": _mapped("`train.max_grad_norm`"),
    **_method(
        "train_num_inner_epochs",
        "train_cfg",
        "train_adv_clip_max",
        "train_clip_range",
        "train_timestep_fraction",
        "per_prompt_stat_tracking",
        "per_prompt_stat_tracking_buffer_size",
        "per_prompt_stat_tracking_min_count",
        "async_reward_computation",
        "max_workers",
        "negative_prompts",
    ),
    "push_to_hub": _refused("training uploads nothing by itself: `trainer.push_to_hub` does when asked"),
    **_method(
        "sample_images_per_prompt",
        "advantage",
        "advantage_std",
        "share_initial_noise",
        "beta_kl",
        "old_log_probs",
        "train_skip_last_steps",
        "train_timestep_range",
        "sample_height",
        "sample_width",
        "guidance_rescale",
    ),
    "gradient_checkpointing": _mapped("`train.remat`"),
    **_method("ema_decay"),
    "lora_rank": _mapped("`model.peft_config.r`, where the pipeline has `use_lora`"),
    "lora_alpha": _mapped("`model.peft_config.lora_alpha`, likewise"),
    "lora_targets": _mapped("`model.peft_config.target_modules`, likewise"),
    "eval_every": _mapped("`train.eval_interval`, in epochs here"),
    **_method("eval_prompts", "eval_eta"),
    "lr_warmup_steps": _mapped("`scheduler.kwargs.warmup_steps`"),
    "mesh": _mapped("`train.mesh`: sizes of the axes data, fsdp and tensor"),
    "overwrite": _mapped("`train.overwrite`"),
}

PROJECT: Mapping[str, Meaning] = {
    "project_dir": _mapped("`train.checkpoint_dir`, in the place of `logdir`"),
    "logging_dir": _mapped("`train.logging_dir`: folder of the tracker's files"),
    "total_limit": _mapped("`train.keep_checkpoints`, in the place of `num_checkpoint_limit`"),
    "automatic_checkpoint_naming": _ignored("checkpoints are always named by the optimizer step"),
    "iteration": _ignored("checkpoints are named by the optimizer step, which a resumed run counts on"),
    "save_on_each_node": _ignored("one checkpoint is written, by all processes together"),
}
"""Of `project_kwargs`."""
