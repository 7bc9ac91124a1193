# SPDX-License-Identifier: Apache-2.0
"""The entry of rejection fine-tuning."""

from __future__ import annotations

from jrl.learners.rft import RFTConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.sections import ModelConfig
from jrl.trainers.config.trl_config import TRLConfig


def default_rft_config() -> TRLConfig:
    """Rejection fine-tuning of the model that the default PPO run starts from; trlX has no default of it."""
    return default_config(RFTConfig(), trainer="RFTTrainer", model=ModelConfig("lvwerra/gpt2-imdb"))


def _footprint(config: TRLConfig) -> Footprint:
    assert isinstance(config.method, RFTConfig), "the entry's own"
    return Footprint(sampling_rows=config.method.chunk_size or config.train.batch_size)


RFT = Method(
    name="rft",
    config=RFTConfig,
    default=default_rft_config,
    title="rejection fine-tuning (RFT)",
    summary="rejection fine-tuning: trains on those of its own samples that score best",
    tags=("rft", "reinforcement-learning"),
    papers=lambda method: ("gulcehre2023reinforced",),
    footprint=_footprint,
)
