# SPDX-License-Identifier: Apache-2.0
"""`jrl.train`: from what a user brings to a trainer that has learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jrl.trainers.base import Trainer
from jrl.trainers.config import TRLConfig, default_ppo_config, default_sft_config
from jrl.trainers.registry import get_trainer


def train(
    model_path: Any = None,
    reward_fn: Callable[..., Any] | None = None,
    dataset: tuple[Sequence[Any], Sequence[float]] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: TRLConfig | None = None,
    stop_sequences: Sequence[str] | None = None,
) -> Trainer:
    """Trains a language model: online with a reward function, or offline on samples.

    Args:
      model_path: Directory or hub id of a Hugging Face checkpoint, or a transformers config object for random
        weights; replaces `config.model.model_path`.
      reward_fn: Called with keywords `samples`, `prompts`, `outputs`, `tokenizer`, `output_tokens` and one for each
        metadata key, as far as its signature accepts them; returns one float a sample, or one list a sample with a
        float for each of its `output_tokens`.
      dataset: `(samples, rewards)`; deprecated, use those arguments.
      samples: Strings, `[prompt, output]` pairs or longer dialogues.
      rewards: One a sample, for offline reinforcement learning.
      prompts: Strings, or dicts with `"prompt"` and metadata; left untouched. Default: the BOS text.
      eval_prompts: Likewise; default: the first `batch_size` prompts, or the BOS text.
      metric_fn: `metric_fn(samples, prompts, outputs, **metadata)` returns name → list of floats, or name → float.
      config: Default: PPO where `reward_fn` is given, else SFT.
      stop_sequences: Texts that end a completion.
    Returns:
      The trainer, after `learn()`.
    Raises:
      ValueError: If the arguments do not say what to train on, or do not fit the configured trainer.
    """
    trainer = prepare(
        model_path=model_path,
        reward_fn=reward_fn,
        dataset=dataset,
        samples=samples,
        rewards=rewards,
        prompts=prompts,
        eval_prompts=eval_prompts,
        metric_fn=metric_fn,
        config=config,
        stop_sequences=stop_sequences,
    )
    trainer.learn()
    return trainer


def prepare(
    *,
    model_path: Any = None,
    reward_fn: Callable[..., Any] | None = None,
    dataset: tuple[Sequence[Any], Sequence[float]] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: TRLConfig | None = None,
    stop_sequences: Sequence[str] | None = None,
) -> Trainer:
    """The trainer that `train` would run, its model and data loaded; the arguments are those of `train`."""
    if dataset is not None:
        warnings.warn(
            "`dataset` is deprecated: pass `samples` and `rewards`.", DeprecationWarning, stacklevel=3
        )
        samples, rewards = dataset
    if reward_fn is None and samples is None:
        raise ValueError("Nothing to train on: give `reward_fn` (online) or `samples` (offline).")
    if rewards is not None and samples is not None and len(rewards) != len(samples):
        raise ValueError(
            f"`rewards` must have one entry a sample: got {len(rewards)} for {len(samples)} samples."
        )
    if config is None:
        config = default_ppo_config() if reward_fn is not None else default_sft_config()
        warnings.warn(
            f"No `config` given: using the default one for {config.train.trainer}, with model "
            f"{config.model.model_path!r}.",
            stacklevel=3,
        )
    if model_path is not None:
        config = config.evolve(model={"model_path": model_path})
    trainer_class = get_trainer(config.train.trainer)
    trainer = trainer_class(
        config, reward_fn=reward_fn, metric_fn=metric_fn, stop_sequences=tuple(stop_sequences or ())
    )
    trainer.add_data(samples=samples, rewards=rewards, prompts=prompts, eval_prompts=eval_prompts)
    return trainer
