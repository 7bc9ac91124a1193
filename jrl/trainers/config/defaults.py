# SPDX-License-Identifier: Apache-2.0
"""The default configuration that all methods start from."""

from __future__ import annotations

import copy

from jrl.learners.config import MethodConfig
from jrl.trainers.config.sections import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)
from jrl.trainers.config.trl_config import TRLConfig

_GPT2 = ModelConfig("gpt2")


def default_config(
    method: MethodConfig,
    *,
    trainer: str = "OnlineTrainer",
    model: ModelConfig = _GPT2,
    lr: float = 3e-5,
    total_steps: int = 1000,
    batch_size: int = 32,
) -> TRLConfig:
    """A default run of a method: what trlX's have in common. The learning rate is constant: it falls to itself.

    Args:
      method: The algorithm's section.
      trainer: By its name; an online algorithm with a recipe needs no trainer of its own.
      model: What is trained.
      lr: Learning rate of AdamW. The default suits a GPT-2, and is too high for larger models: TRL's is 1e-6 for the
        GRPO family. `jrl.train(config=method)`, given the section alone, chooses by the size of the model.
      total_steps: Optimizer steps in all.
      batch_size: Rows of an optimizer step.
    """
    return TRLConfig(
        method=method,
        model=copy.deepcopy(model),
        optimizer=OptimizerConfig(
            "adamw", {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
        ),
        scheduler=SchedulerConfig("cosine_annealing", {"T_max": 1e12, "eta_min": lr}),
        tokenizer=TokenizerConfig(),
        train=TrainConfig(
            total_steps=total_steps,
            seq_length=1024,
            epochs=100,
            batch_size=batch_size,
            checkpoint_interval=10000,
            eval_interval=100,
            trainer=trainer,
        ),
    )
