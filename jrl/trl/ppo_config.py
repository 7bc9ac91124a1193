# SPDX-License-Identifier: Apache-2.0
"""TRL's flat configuration and arguments of PPO, and the configuration of jrl's own that they stand for."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jrl.interop import warn_ignored
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.ppo import KL_PENALTY_NAMES
from jrl.learners.ppo import PPOConfig as NativePPOConfig
from jrl.models.model import make_model
from jrl.trainers.config import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from jrl.trainers.loggers import PACKAGES, check_tracker
from jrl.trl.core import flatten_dict
from jrl.trl.handles import ModelHandle, resolve_model, same_source, unfrozen_layers, untrained
from jrl.trl.torch_optimizers import is_torch_optimizer, is_torch_schedule, named_optimizer, tabulated

__all__ = ["PPOConfig"]

EARLY_STOP_FACTOR = 1.5
"""Epochs stop above this many times `target_kl`."""
_NO_EFFECT = {
    "accelerator_kwargs": "one program runs on all devices of the mesh",
    "optimize_cuda_cache": "XLA manages the device's memory",
    "optimize_device_cache": "XLA manages the device's memory",
}


@dataclass
class PPOConfig:
    """Configuration of the step-by-step PPO; fields, order and defaults are TRL's.

    Attributes:
      task_name: A label.
      model_name: A label; the trainer gets its model as an argument.
      steps: Samples that a script means to take; feeds `total_ppo_epochs`, and is how many rates a torch schedule has.
      learning_rate: Of the default Adam.
      adap_kl_ctrl: Whether the KL coefficient is adapted; else it stays.
      init_kl_coef: KL coefficient at the start.
      kl_penalty: "kl" (log π − log π_ref), "abs", "mse" or "full" (over the vocabulary); it is also what is steered and
        logged.
      target: KL that the adaptive controller steers to, in nats per sequence.
      horizon: Samples over which the controller may move the coefficient by a fifth.
      gamma: Discount per token.
      lam: λ of generalised advantage estimation.
      cliprange: Half-width of the ratio clip.
      cliprange_value: Half-width of the value clip, absolute.
      vf_coef: Weight of the value loss.
      batch_size: Samples of a `step`, over all devices.
      forward_batch_size: Old name of `mini_batch_size`, which it replaces.
      mini_batch_size: Rows of a forward pass.
      backward_batch_size: Computed: rows of an optimizer step.
      gradient_accumulation_steps: Forward passes of an optimizer step.
      ppo_epochs: Passes over the samples of a `step`.
      remove_unused_columns: Whether the loader keeps only columns that a model reads, and label, query, response.
      log_with: "wandb", "tensorboard" or None.
      tracker_kwargs: For wandb `entity`, `group`, `name` and `tags`, as given or under "wandb".
      accelerator_kwargs: No effect.
      project_kwargs: `logging_dir` is the folder of the tracker's files.
      tracker_project_name: The tracker's project.
      max_grad_norm: The gradient's global norm is clipped to this at every optimizer step.
      seed: Of samples, orders and fresh weights.
      optimize_cuda_cache: No effect.
      early_stopping: Whether epochs stop once the policy has moved too far.
      target_kl: Above 1.5 times this KL, in nats per action over an epoch, they stop.
      push_to_hub_if_best_kwargs: If not empty, `repo_id` and more of `push_to_hub`: the model is pushed whenever the
        mean score is the best so far.
      compare_steps: How often that is looked at, in steps.
      ratio_threshold: A minibatch whose mean ratio exceeds it is left out.
      use_score_scaling: Whether scores are divided by their running deviation.
      use_score_norm: Whether, beside that, their running mean is subtracted.
      score_clip: Scores are clipped to ± this, after scaling.
      exp_name: A label.
      query_dataset: A label.
      reward_model: A label.
      whiten_rewards: Whether rewards are scaled to unit variance before the advantages.
      optimize_device_cache: No effect.
      is_encoder_decoder: Set by the trainer.
      is_peft_model: Set by the trainer.
      world_size: Set by the trainer: 1 program.
      global_backward_batch_size: Set by the trainer.
      global_batch_size: Set by the trainer.
      output_dir: jrl's own: folder of checkpoints; None: none is kept but where `save_state` is told.
      train_kwargs: jrl's own: fields of `TrainConfig` that TRL has no name for, such as `mesh` and `remat`.
    """

    task_name: str | None = None
    model_name: str | None = None
    steps: int = 20000
    learning_rate: float = 1e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    kl_penalty: str = "kl"
    target: float = 6
    horizon: float = 10000
    gamma: float = 1
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 256
    forward_batch_size: int | None = None
    mini_batch_size: int = 1
    backward_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    remove_unused_columns: bool = True
    log_with: str | None = None
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    max_grad_norm: float | None = None
    seed: int = 0
    optimize_cuda_cache: bool | None = False
    early_stopping: bool = False
    target_kl: float = 0.1
    push_to_hub_if_best_kwargs: dict[str, Any] = field(default_factory=dict)
    compare_steps: int = 1
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    _: KW_ONLY
    exp_name: str = field(default_factory=lambda: Path(sys.argv[0]).stem)
    query_dataset: str | None = None
    reward_model: str | None = None
    whiten_rewards: bool = False
    optimize_device_cache: bool = False
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    world_size: int | None = None
    global_backward_batch_size: int | None = None
    global_batch_size: int | None = None
    output_dir: str | None = None
    train_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fills in what follows from other fields, and checks.

        Raises:
          ValueError: On a value out of range.
          ImportError: If the tracker's package is missing.
        """
        if self.forward_batch_size is not None:
            warnings.warn(
                "`forward_batch_size` is the old name of `mini_batch_size`, which is set to it.", stacklevel=3
            )
            self.mini_batch_size = self.forward_batch_size
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.backward_batch_size < 1 or self.batch_size % self.backward_batch_size:
            raise ValueError(
                "`batch_size` must be a multiple of `mini_batch_size` * `gradient_accumulation_steps`, got "
                f"{self.batch_size}, {self.mini_batch_size} and {self.gradient_accumulation_steps}."
            )
        if self.kl_penalty not in KL_PENALTY_NAMES:
            raise ValueError(f"`kl_penalty` must be one of {KL_PENALTY_NAMES}, got {self.kl_penalty!r}.")
        if self.log_with not in (None, *PACKAGES):
            raise ValueError(f"`log_with` must be one of {sorted(PACKAGES)} or None, got {self.log_with!r}.")
        if self.push_to_hub_if_best_kwargs and "repo_id" not in self.push_to_hub_if_best_kwargs:
            raise ValueError(
                "`push_to_hub_if_best_kwargs` must hold `repo_id`, got "
                f"{sorted(self.push_to_hub_if_best_kwargs)}."
            )
        check_tracker(self.log_with)
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)
        for name, why in _NO_EFFECT.items():
            if vars(self)[name]:
                warn_ignored(f"PPOConfig.{name}", why)

    def to_dict(self) -> dict[str, Any]:
        """All fields as one flat mapping, nested names joined by "/".

        Raises:
          ValueError: If a name holds "/" already.
        """
        return flatten_dict(vars(self))


def native_config(
    config: PPOConfig,
    model: ModelHandle,
    tokenizer_path: str | None,
    *,
    num_shared_layers: int | None,
    run_dir: str,
) -> TRLConfig:
    """The configuration that jrl's own PPO trainer runs on.

    Args:
      config: TRL's.
      model: What trains.
      tokenizer_path: Folder of the tokenizer; None: the model's own.
      num_shared_layers: Layers that do not train; None: all do.
      run_dir: Folder of checkpoints.
    Raises:
      ValueError: On a value out of range, under the name that it has there.
    """
    return TRLConfig(
        method=_method(config),
        model=ModelConfig(
            model.source,
            model_arch_type=model.arch_type,  # type: ignore[arg-type]
            num_layers_unfrozen=unfrozen_layers(model, num_shared_layers),
            peft_config=model.peft_config,
            frozen_dtype=model.frozen_dtype,  # type: ignore[arg-type]
            attn_implementation=model.attn_implementation,
            model_extra_configs=dict(model.model_extra_configs),
            value_head="linear",
        ),
        # torch's Adam, which TRL takes: no decay.
        optimizer=OptimizerConfig("adam", {"lr": config.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8}),
        scheduler=SchedulerConfig("constant"),
        tokenizer=TokenizerConfig(tokenizer_path),
        train=_train(config, model, run_dir),
    )


def _method(config: PPOConfig) -> NativePPOConfig:
    return NativePPOConfig(
        ppo_epochs=config.ppo_epochs,
        num_rollouts=config.batch_size,
        chunk_size=config.batch_size,
        init_kl_coef=config.init_kl_coef,
        target=config.target if config.adap_kl_ctrl else None,
        horizon=round(config.horizon),
        gamma=config.gamma,
        lam=config.lam,
        cliprange=config.cliprange,
        cliprange_value=config.cliprange_value,
        vf_coef=config.vf_coef,
        scale_reward="running" if config.use_score_scaling else "ignored",
        center_reward=config.use_score_scaling and config.use_score_norm,
        cliprange_reward=None,
        cliprange_scaled_reward=config.score_clip,
        kl_penalty=config.kl_penalty,  # type: ignore[arg-type]
        whiten_rewards=config.whiten_rewards,
        max_policy_kl=EARLY_STOP_FACTOR * config.target_kl if config.early_stopping else None,
        ratio_threshold=config.ratio_threshold,
    )


def _train(config: PPOConfig, model: ModelHandle, run_dir: str) -> TrainConfig:
    tracker = config.tracker_kwargs.get("wandb", config.tracker_kwargs)
    tracker = tracker.get("init_kwargs", tracker) if isinstance(tracker, dict) else {}
    longest = make_model(model.config).max_positions
    train = TrainConfig(
        total_steps=config.total_ppo_epochs
        * config.ppo_epochs
        * config.batch_size
        // config.backward_batch_size,
        # Only figures of memory depend on it: rows are as long as the script makes them.
        seq_length=min(longest, 1024),
        epochs=max(config.total_ppo_epochs, 1),
        batch_size=config.backward_batch_size,
        minibatch_size=config.mini_batch_size,
        checkpoint_interval=0,
        eval_interval=0,
        checkpoint_dir=run_dir,
        project_name=config.tracker_project_name,
        run_name=tracker.get("name"),
        entity_name=tracker.get("entity"),
        group_name=tracker.get("group"),
        tags=list(tracker.get("tags") or ()),
        logging_dir=config.project_kwargs.get("logging_dir"),
        tracker=config.log_with,  # type: ignore[arg-type]
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        compute_dtype=model.compute_dtype,  # type: ignore[arg-type]
    )
    return replace(train, **config.train_kwargs)


Optimizer = Any
"""optax's transformation, a name, a pair (name, arguments), or an optimizer of torch."""
Schedule = Callable[[Any], Any]
"""Number of the step → learning rate."""


def policy_handle(model: Any) -> ModelHandle:
    """The handle of what trains.

    Raises:
      ValueError: If it is none, or a classifier.
    """
    if model is None:
        raise ValueError(
            "`model` must be given: a handle of AutoModelForCausalLMWithValueHead.from_pretrained."
        )
    handle = resolve_model(model)
    if handle.kind == "classifier":
        raise ValueError("`model` must write text, got a sequence classifier.")
    peft_type = "LORA" if handle.peft_config is None else str(handle.peft_config.get("peft_type"))
    if peft_type.upper() != "LORA":
        raise ValueError(
            f"`peft_config` must be of LORA in a step-by-step PPO, got {peft_type}: `jrl.train` takes virtual tokens."
        )
    return untrained(handle)


def reference_handle(
    ref_model: Any, handle: ModelHandle, num_shared_layers: int | None
) -> ModelHandle | None:
    """The handle of the reference that was given; None where the model itself is the reference.

    Raises:
      ValueError: If it shares layers with another model.
    """
    if ref_model is None:
        return None
    reference = untrained(resolve_model(ref_model))
    if handle.is_peft_model:
        warn_ignored("ref_model", "beside an adapter the reference is the base model")
        return None
    if num_shared_layers is not None:
        warnings.warn("`num_shared_layers` has no effect beside a `ref_model`.", stacklevel=4)
    if reference.num_shared_layers is not None and not same_source(reference, handle):
        raise ValueError("`ref_model` with shared layers must be made of `model` (`create_reference_model`).")
    return reference


def checked_schedule(lr_scheduler: Any, optimizer: Any, num_steps: int) -> Schedule | None:
    """The schedule as it was given; one of torch as the table of its first `num_steps` rates.

    Raises:
      ValueError: If it cannot be traced, or stands beside an optimizer with a rate of its own.
    """
    if lr_scheduler is None:
        return None
    if is_torch_schedule(lr_scheduler):
        lr_scheduler = tabulated(lr_scheduler, max(num_steps, 1))
    if not callable(lr_scheduler):
        raise ValueError(
            "`lr_scheduler` must be a function from the number of the step to a learning rate, such as "
            f"optax.linear_schedule(...), got {type(lr_scheduler).__name__}."
        )
    if isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            "`lr_scheduler` must be None beside an optax `optimizer`, which has its own learning rate."
        )
    try:
        jax.eval_shape(lr_scheduler, jax.ShapeDtypeStruct((), np.int32))
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "`lr_scheduler` must be traceable: compute with jax.numpy, not with `if`, `float` or the math module."
        ) from error
    schedule: Schedule = lr_scheduler
    return schedule


def with_optimizer(
    native: TRLConfig, optimizer: Optimizer
) -> tuple[TRLConfig, optax.GradientTransformation | None]:
    """The configuration with the optimizer in it, or the optimizer beside it where it is optax's own."""
    if optimizer is None:
        return native, None
    if isinstance(optimizer, optax.GradientTransformation):
        return native, optimizer
    if is_torch_optimizer(optimizer):
        optimizer = named_optimizer(optimizer)
    if not isinstance(optimizer, str | tuple | list):
        raise ValueError(
            "`optimizer` must be None, a name, a pair (name, arguments), an optax transformation or an optimizer of "
            f"torch, got {type(optimizer).__name__}."
        )
    name, kwargs = (optimizer, {}) if isinstance(optimizer, str) else optimizer
    values = {"lr": native.optimizer.kwargs["lr"], **kwargs}
    make_optimizer(name, values, make_schedule("constant", {}), max_grad_norm=None)
    changed = replace(native.optimizer, name=name, kwargs=values)
    return replace(native, optimizer=changed), None
