# SPDX-License-Identifier: Apache-2.0
"""The configuration of jrl's own that TRL's flat `DDPOConfig` stands for, and the trainer that its face runs on."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Literal, Protocol

import jax

from jrl.learners.ddpo_config import DDPOConfig as NativeDDPOConfig
from jrl.models.diffusion import DiffusionModel
from jrl.trainers.config import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from jrl.trainers.diffusion import Answers, DDPOTrainer, PromptFunction, RewardFunction, Tracker
from jrl.trainers.loading import default_compute_dtype
from jrl.trainers.loop import Run, Stopwatch
from jrl.trainers.rollouts import Evaluation
from jrl.trl.ddpo_config import DDPOConfig, tracker_fields
from jrl.typing import DifferentiableReward

FIRST_LOSS_SCALE = 4096.0
Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES: dict[str, Dtype] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


Precision = Callable[[], AbstractContextManager[Any]]


class Owner(Protocol):
    """The trainer of TRL's shape, as the one below it knows it."""

    image_samples_callback: Any

    def step(self, epoch: int, global_step: int) -> int:
        """Runs an epoch."""
        ...

    def compute_rewards(self, prompt_image_pairs: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """Rewards of all sampling batches."""
        ...


class OwnedDDPO(DDPOTrainer):
    """jrl's trainer, whose epochs and rewards go through the trainer of TRL's shape that owns it.

    Args:
      config: The run's configuration.
      owner: Whose `step`, `compute_rewards` and `image_samples_callback` count, overridden or not.
      model: The diffusion model.
      precision: A context in which everything is to be computed.

    Attributes:
      precision: As given.
    """

    resume_argument = "resume_from"

    def __init__(self, config: TRLConfig, *, owner: Any, model: DiffusionModel, precision: Precision) -> None:
        self._owner: Owner = owner
        self._run: Run | None = None
        self._global_step = 0
        self.precision = precision
        super().__init__(
            config,
            reward_function=owner.reward_fn,
            prompt_function=owner.prompt_fn,
            model=model,
            image_samples_hook=self._show,
        )

    def _show(self, data: list[list[Any]], global_step: int, tracker: Tracker) -> None:
        del global_step  # the owner counts
        if self._owner.image_samples_callback is not None:
            self._owner.image_samples_callback(data, self._global_step, tracker)

    def take_functions(
        self, reward_function: RewardFunction | DifferentiableReward, prompt_function: PromptFunction
    ) -> None:
        """Takes the owner's functions, which a script may have replaced since."""
        self.reward_function, self.prompt_function = reward_function, prompt_function

    def compute_rewards(self, batches: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """Rewards by the owner's method, which may ask for `own_rewards`."""
        return self._owner.compute_rewards(batches, is_async)

    def own_rewards(self, batches: Sequence[list[Any]], is_async: bool) -> Answers:
        """Rewards as jrl computes them, without the owner."""
        return super().compute_rewards(batches, is_async)

    def run_epoch(self, run: Run, epoch: int) -> None:
        """Runs the owner's `step`, which asks for `own_step`.

        Raises:
          TypeError: If it does not.
        """
        self._run = run
        try:
            self._owner.step(epoch, run.step)
        finally:
            self._run = None
        if run.iteration == epoch:
            raise TypeError(
                f"{type(self._owner).__name__}.step must call `super().step(epoch, global_step)`."
            )

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Evaluates as every DDPO trainer does, in the configured precision."""
        with self.precision():
            return super().run_evaluation(step)

    def own_step(self, epoch: int, global_step: int) -> None:
        """Runs an epoch: of the present run, with its checkpoints, or by itself; the hook gets `global_step`."""
        self._global_step = global_step
        if self._run is not None:
            super().run_epoch(self._run, epoch)
            return
        with jax.set_mesh(self.mesh):
            done = self.one_epoch(epoch, while_sampling=lambda: None, stopwatch=Stopwatch())
            jax.block_until_ready(done.device)


def native_config(
    config: DDPOConfig, *, model: str, use_lora: bool, row_devices: int | None = None
) -> TRLConfig:
    """The six sections.

    Args:
      config: TRL's.
      model: What the model is called, or where it lies.
      use_lora: Whether an adapter trains.
      row_devices: Devices that share the rows of a run that is planned, which need not be here; None: those that are.
    Raises:
      ValueError: On a value out of range, under the name that it has there.
    """
    names = {entry.name for entry in fields(NativeDDPOConfig)} & {entry.name for entry in fields(DDPOConfig)}
    devices, dtype = data_devices(config, row_devices), compute_dtype(config, is_here=row_devices is None)
    method = {name: vars(config)[name] for name in names - {"name", "sample_batch_size"}}
    peft_config = {
        "peft_type": "LORA",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": list(config.lora_targets),
        "init_lora_weights": "gaussian",
    }
    adam = {
        "lr": config.train_learning_rate,
        "betas": [config.train_adam_beta1, config.train_adam_beta2],
        "eps": config.train_adam_epsilon,
        "weight_decay": config.train_adam_weight_decay,
    }
    warmup = config.lr_warmup_steps
    return TRLConfig(
        method=NativeDDPOConfig(
            **method,
            sample_batch_size=config.sample_batch_size * devices,
            loss_scaling=FIRST_LOSS_SCALE if dtype == "float16" else 0.0,
        ),
        model=ModelConfig(model, peft_config=peft_config if use_lora else None),
        optimizer=OptimizerConfig("adamw", adam),
        scheduler=SchedulerConfig("warmup_constant", {"warmup_steps": warmup})
        if warmup
        else SchedulerConfig("constant"),
        tokenizer=TokenizerConfig(model),
        train=_train(config, devices, dtype),
    )


def _train(config: DDPOConfig, devices: int, dtype: Dtype) -> TrainConfig:
    steps = steps_per_epoch(config)
    tracker, project = tracker_fields(config.tracker_kwargs), config.project_kwargs
    minibatch_size = config.train_batch_size * devices
    return TrainConfig(
        total_steps=config.num_epochs * steps,
        seq_length=1,  # of texts, which nothing here writes
        epochs=config.num_epochs,
        batch_size=minibatch_size * config.train_gradient_accumulation_steps,
        minibatch_size=minibatch_size,
        checkpoint_interval=config.save_freq * steps,
        eval_interval=config.eval_every * steps,
        trainer=DDPOTrainer.__name__,
        project_name=config.tracker_project_name,
        run_name=config.run_name or tracker.get("name"),
        entity_name=tracker.get("entity"),
        group_name=tracker.get("group") or config.exp_name or None,
        tags=list(tracker.get("tags") or ()),
        checkpoint_dir=os.path.expanduser(project.get("project_dir") or config.logdir),
        logging_dir=project.get("logging_dir"),
        tracker=config.log_with,  # type: ignore[arg-type]
        resume_from_checkpoint=config.resume_from or None,
        seed=config.seed,
        mesh=config.mesh_sizes or None,
        max_grad_norm=config.train_max_grad_norm,
        compute_dtype=dtype,
        remat=config.gradient_checkpointing,
        # Every overflow halves the factor: so many in a row say nothing yet.
        max_bad_steps=3 + (int(math.log2(FIRST_LOSS_SCALE)) if dtype == "float16" else 0),
        keep_checkpoints=project.get("total_limit") or config.num_checkpoint_limit,
        overwrite=config.overwrite,
    )


def steps_per_epoch(config: DDPOConfig) -> int:
    """Optimizer steps of an epoch."""
    return config.train_num_inner_epochs * (config.samples_of_a_device // config.samples_of_a_step)


def data_devices(config: DDPOConfig, row_devices: int | None) -> int:
    """Devices that rows are divided over; those of the tensor axis share theirs."""
    if row_devices is not None:
        return row_devices
    return max(jax.device_count() // max(config.mesh_sizes.get("tensor", 1), 1), 1)


def compute_dtype(config: DDPOConfig, *, is_here: bool) -> Dtype:
    """Dtype for `mixed_precision`: by default bfloat16 on an accelerator, float32 on a CPU.

    On a CPU that is here it is float32 whatever is asked for: XLA computes not all of the networks in half precision
    there.
    """
    default = default_compute_dtype()
    on_cpu = default == "float32" and is_here
    if on_cpu and config.mixed_precision not in (None, "no"):
        warnings.warn(
            f"`mixed_precision` {config.mixed_precision} computes in float32 on a CPU.", stacklevel=2
        )
    return default if on_cpu or config.mixed_precision is None else _DTYPES[config.mixed_precision]
