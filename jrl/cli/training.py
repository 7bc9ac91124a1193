# SPDX-License-Identifier: Apache-2.0
"""Training with nested configurations: flags, files and model are read at once, training starts on a call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from jrl.api import prepare
from jrl.cli.ending import Work, status_of
from jrl.cli.finding import load_function, load_reward
from jrl.data.records import read_records
from jrl.data.sources import load_prompts, load_rewarded_samples, load_samples
from jrl.trainers.base import Trainer
from jrl.trainers.config import TRLConfig
from jrl.trainers.defaults import (
    default_dpo_config,
    default_ilql_config,
    default_ppo_config,
    default_reward_config,
    default_rft_config,
    default_sft_config,
)
from jrl.trainers.overrides import apply_overrides
from jrl.trainers.setup import reward_mesh


def ppo(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl ppo`."""
    return _online(flags, _config(flags, overrides, default_ppo_config))


def rft(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl rft`."""
    return _online(flags, _config(flags, overrides, default_rft_config))


def ilql(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl ilql`."""
    config = _config(flags, overrides, default_ilql_config)
    samples, rewards = load_rewarded_samples(flags.samples)
    return _learning(prepare(config=config, samples=samples, rewards=rewards, **_evaluation(flags)))


def sft(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl sft`."""
    config = _config(flags, overrides, default_sft_config)
    return _learning(prepare(config=config, samples=load_samples(flags.samples), **_evaluation(flags)))


def dpo(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl dpo` with a nested configuration."""
    config = _config(flags, overrides, default_dpo_config)
    return _learning(prepare(config=config, samples=_pairs(flags), **_evaluation(flags)))


def reward(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl reward` with a nested configuration."""
    config = _config(flags, overrides, default_reward_config)
    return _learning(prepare(config=config, samples=_pairs(flags)))


def _learning(trainer: Trainer) -> Work:
    def work() -> int:
        trainer.learn()
        return status_of(trainer)

    return work


def _pairs(flags: argparse.Namespace) -> Sequence[Any]:
    """Records of pairs, all of them."""
    return list(iter(read_records(flags.samples)))


def _online(flags: argparse.Namespace, config: TRLConfig) -> Work:
    config.validate()  # before its mesh is used
    reward = load_reward(
        flags.reward, label=flags.reward_label, output=flags.reward_output, mesh=reward_mesh(config)
    )
    prompts = load_prompts(flags.prompts)
    return _learning(prepare(config=config, reward_fn=reward, prompts=prompts, **_evaluation(flags)))


def _config(flags: argparse.Namespace, overrides: list[str], default: Callable[[], TRLConfig]) -> TRLConfig:
    return apply_overrides(TRLConfig.load_yaml(flags.config) if flags.config else default(), overrides)


def _evaluation(flags: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `jrl.train` that all commands share."""
    return {
        "eval_prompts": load_prompts(flags.eval_prompts) if flags.eval_prompts else None,
        "metric_fn": load_function(flags.metric) if flags.metric else None,
        "stop_sequences": flags.stop,
    }
