# SPDX-License-Identifier: Apache-2.0
"""What a section refuses by itself, before a model is read."""

from __future__ import annotations

from typing import Any

import pytest

from jrl.methods import default_ppo_config
from jrl.trainers.config.sections import ModelConfig, OptimizerConfig, SchedulerConfig, TrainConfig

SIZES = {
    "total_steps": 4,
    "seq_length": 8,
    "epochs": 1,
    "batch_size": 4,
    "checkpoint_interval": 0,
    "eval_interval": 0,
}


class TestNumbers:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("total_steps", "4", "a number, got str '4'"),
            ("minibatch_size", "2", "a number, or None, got str '2'"),
            ("logprob_chunk_bytes", None, "a number, got NoneType None"),
        ],
    )
    def test_of_the_run(self, field: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^`train.{field}` must be {message}"):
            TrainConfig(**(SIZES | {field: value}))

    def test_of_the_model(self) -> None:
        with pytest.raises(ValueError, match=r"^`model.num_layers_unfrozen` must be a number, got str 'all'"):
            ModelConfig("gpt2", num_layers_unfrozen="all")  # type: ignore[arg-type]


class TestNames:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"optimizer": {"name": "adamww"}},
                "`optimizer.name`: unknown name 'adamww'; .*Did you mean `adamw`",
            ),
            (
                {"optimizer": {"kwargs": {"lrr": 0.1}}},
                "optimizer 'adamw': unknown argument `lrr`; .*mean `lr`",
            ),
            (
                {"scheduler": {"name": "cosine_anealing"}},
                "`scheduler.name`: unknown name .*mean `cosine_annealing`",
            ),
            ({"scheduler": {"kwargs": {"T_mx": 9}}}, "scheduler 'cosine_annealing': unknown .*mean `T_max`"),
        ],
    )
    def test_of_optimizers_and_schedules(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            default_ppo_config().evolve(**changes)

    def test_an_edited_section_is_checked_again(self) -> None:
        section = OptimizerConfig("adamw", {"lr": 0.1})
        section.kwargs["wieght_decay"] = 0.1
        with pytest.raises(ValueError, match=r"unknown argument `wieght_decay`; .*mean `weight_decay`"):
            section.validate()

    def test_what_is_known_passes(self) -> None:
        OptimizerConfig("AdamW", {"lr": 0.1, "betas": [0.9, 0.99]})
        OptimizerConfig("adamw_8bit_bnb")  # refused where it is made, with what to take instead
        SchedulerConfig("linear", {"total_iters": 3})
