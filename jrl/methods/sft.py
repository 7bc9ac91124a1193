# SPDX-License-Identifier: Apache-2.0
"""The entry of supervised fine-tuning."""

from __future__ import annotations

from jrl.learners.sft import SFTConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.trl_config import TRLConfig


def default_sft_config() -> TRLConfig:
    """trlX's default SFT run: GPT-2, all layers."""
    return default_config(SFTConfig(), trainer="SFTTrainer", lr=1e-4, batch_size=8)


SFT = Method(
    name="sft",
    config=SFTConfig,
    default=default_sft_config,
    title="supervised fine-tuning (SFT)",
    summary="supervised fine-tuning",
    tags=("sft",),
    data="samples",
    footprint=lambda config: Footprint(evaluation_rows=config.train.batch_size),
    headlines={"sft/loss": "loss", "sft/token_accuracy": "accuracy", "sft/entropy": "entropy"},
)
