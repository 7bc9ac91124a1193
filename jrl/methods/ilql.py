# SPDX-License-Identifier: Apache-2.0
"""ILQL's entry in the table of methods."""

from __future__ import annotations

from jrl.learners.ilql import ILQLConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.trl_config import TRLConfig


def default_ilql_config() -> TRLConfig:
    """trlX's default ILQL run: GPT-2, all layers, two Q heads."""
    config = default_config(ILQLConfig(), trainer="ILQLTrainer", lr=5e-5, batch_size=128)
    return config.evolve(train={"seq_length": 64, "checkpoint_interval": 1000})


def _footprint(config: TRLConfig) -> Footprint:
    assert isinstance(config.method, ILQLConfig), "the entry's own"
    heads = 2 if config.method.two_qs else 1
    return Footprint(value_head=True, num_q_heads=heads, evaluation_rows=config.train.batch_size)


ILQL = Method(
    name="ilql",
    config=ILQLConfig,
    default=default_ilql_config,
    title="implicit language Q-learning (ILQL)",
    summary="offline reinforcement learning from samples with a reward each",
    tags=("ilql", "reinforcement-learning"),
    papers=lambda method: ("snell2022offline",),
    data="rewarded",
    footprint=_footprint,
    headlines={"ilql/loss": "loss", "ilql/q_loss": "q", "ilql/value_mean": "value"},
)
