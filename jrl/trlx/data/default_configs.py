# SPDX-License-Identifier: Apache-2.0
"""trlX's default configurations, and every class that they are made of."""

from __future__ import annotations

from typing import NoReturn

import jrl
from jrl.trlx.data.configs import ILQLConfig as ILQLConfig
from jrl.trlx.data.configs import ModelConfig as ModelConfig
from jrl.trlx.data.configs import OptimizerConfig as OptimizerConfig
from jrl.trlx.data.configs import PPOConfig as PPOConfig
from jrl.trlx.data.configs import SchedulerConfig as SchedulerConfig
from jrl.trlx.data.configs import SFTConfig as SFTConfig
from jrl.trlx.data.configs import TokenizerConfig as TokenizerConfig
from jrl.trlx.data.configs import TrainConfig as TrainConfig
from jrl.trlx.data.configs import TRLConfig as TRLConfig
from jrl.trlx.nemo import refuse

_INSTEAD = "default_ppo_config (default_ilql_config, default_sft_config)"


def default_ppo_config() -> TRLConfig:
    """GPT-2 fine-tuned on IMDB, two layers unfrozen."""
    return _as_seed(jrl.default_ppo_config())


def default_ilql_config() -> TRLConfig:
    """GPT-2, all layers, two Q heads."""
    return _as_seed(jrl.default_ilql_config())


def default_sft_config() -> TRLConfig:
    """GPT-2, all layers."""
    return _as_seed(jrl.default_sft_config())


def default_nemo_20b_config() -> NoReturn:
    """Raises ImportError: a model too large for one device is spread by `train.mesh`."""
    refuse("default_nemo_20b_config", _INSTEAD)


def default_nemo_2b_config() -> NoReturn:
    """Raises as `default_nemo_20b_config` does."""
    refuse("default_nemo_2b_config", _INSTEAD)


def default_nemo_1_3b_config() -> NoReturn:
    """Raises as `default_nemo_20b_config` does."""
    refuse("default_nemo_1_3b_config", _INSTEAD)


def _as_seed(config: jrl.TRLConfig) -> TRLConfig:
    """A default configuration with what jrl's differs in: tracker, project and the names of trainers."""
    train = {"tracker": "wandb", "project_name": "trlx", "trainer": f"Accelerate{config.train.trainer}"}
    return TRLConfig(**vars(config.evolve(train=train)))
