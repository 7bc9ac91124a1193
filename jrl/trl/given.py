# SPDX-License-Identifier: Apache-2.0
"""What the constructors of TRL's shape are given, and how their older arguments enter the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.trl.arguments import FlatArguments
from jrl.trl.models import ModelHandle


@dataclasses.dataclass(frozen=True)
class Given:
    """A constructor's arguments that every one of these trainers takes."""

    model: Any
    args: TrainingArguments | None
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    tokenizer: Any
    model_init: Callable[..., Any] | None
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    callbacks: Sequence[Any] | None
    optimizers: tuple[Any, Any]
    optimizer_cls_and_kwargs: tuple[Callable[..., Any], Mapping[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    peft_config: Any


def untrained(handle: ModelHandle, name: str) -> ModelHandle:
    """The handle, unless a trainer has it already: its source then is not the model that the script means.

    Args:
      handle: Of a model.
      name: Of the argument, for the error.
    Raises:
      ValueError: If a trainer has it.
    """
    if handle.trainer is not None:
        raise ValueError(
            f"`{name}` belongs to another trainer already; save it there, and load it again from that folder."
        )
    return handle


def flat_copy(args: TrainingArguments, config_class: type[FlatArguments]) -> FlatArguments:
    """A copy of a flat configuration, which transformers' own arguments become with the other fields' defaults."""
    if isinstance(args, config_class):
        found = dataclasses.replace(args)
        found.__post_init__()
        return found
    names = {entry.name for entry in dataclasses.fields(TrainingArguments)}
    return config_class(**{name: value for name, value in vars(args).items() if name in names})


def with_classic(config: FlatArguments, classic: Mapping[str, Any]) -> FlatArguments:
    """A configuration with arguments of the older constructors, as far as they say anything.

    Args:
      config: Changed in place and returned.
      classic: Field → value; None: not given.
    """
    for name, value in classic.items():
        if value is not None:
            vars(config)[name] = value
    return config
