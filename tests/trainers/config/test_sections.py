# SPDX-License-Identifier: Apache-2.0
"""What a section refuses by itself, before a model is read."""

from __future__ import annotations

from typing import Any

import pytest

from jrl.trainers.config.sections import ModelConfig, TrainConfig

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
