# SPDX-License-Identifier: Apache-2.0
"""Arguments of the constructors of TRL's trainers: the configuration, the tokenizer and the length that they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import EvalPrediction

from jrl.data.chat import with_chat_template
from jrl.data.tokenizer import load_tokenizer
from jrl.learners.config import MethodConfig
from jrl.trainers.loading import tokenizer_home
from jrl.trl.arguments import FlatArguments
from jrl.trl.models import ModelHandle
from jrl.typing import TRUNCATION_MODES


@dataclasses.dataclass(frozen=True)
class Given:
    """A constructor's arguments that every one of these trainers takes."""

    model: Any = None
    args: TrainingArguments | None = None
    data_collator: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    tokenizer: Any = None
    model_init: Callable[..., Any] | None = None
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None
    callbacks: Sequence[Any] | None = None
    optimizers: tuple[Any, Any] = (None, None)
    optimizer_cls_and_kwargs: tuple[Callable[..., Any], Mapping[str, Any]] | None = None
    preprocess_logits_for_metrics: Callable[..., Any] | None = None
    peft_config: Any = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Given:
        """Selects from a constructor's arguments, by name; a `processing_class` is the tokenizer."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        found = {name: value for name, value in arguments.items() if name in names}
        newer = arguments["processing_class"]
        return cls(**found if newer is None else {**found, "tokenizer": newer})

    @property
    def brings_optimizer(self) -> bool:
        """True where the script gives an optimizer or a schedule of its own."""
        parts = (self.optimizer_cls_and_kwargs, *(self.optimizers or ()))
        return any(part is not None for part in parts)


def flat_copy(args: TrainingArguments, config_class: type[FlatArguments]) -> FlatArguments:
    """A copy of a flat configuration, which transformers' own arguments become with the other fields' defaults."""
    if isinstance(args, config_class):
        found = dataclasses.replace(args)
        found.__post_init__()
        return found
    names = {entry.name for entry in dataclasses.fields(TrainingArguments)}
    return config_class(**{name: value for name, value in vars(args).items() if name in names})


def shared_fields(config: FlatArguments, method: type[MethodConfig]) -> dict[str, Any]:
    """The values of a flat configuration that have an effect and, in the method's section, the same name."""
    names = {entry.name for entry in dataclasses.fields(method)} & vars(config).keys()
    return {name: vars(config)[name] for name in names if config.MEANINGS[name].kind != "ignored"}


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


def flat_tokenizer(config: FlatArguments, given: Any, handle: ModelHandle) -> Any:
    """The tokenizer with the template, EOS and padding that the configuration names."""
    if given is None:
        given = tokenizer_home(handle.source, "`tokenizer` (or `processing_class`)")
    mode = vars(config).get("truncation_mode", "keep_start")  # reward models cut nothing
    if mode not in TRUNCATION_MODES:
        raise ValueError(f"`truncation_mode` must be one of {TRUNCATION_MODES}, got {mode!r}.")
    side = "left" if mode == "keep_end" else "right"
    tokenizer = load_tokenizer(given, padding_side="right", truncation_side=side)
    if vars(config).get("chat_template_path") is not None:
        tokenizer = with_chat_template(tokenizer, vars(config)["chat_template_path"])
    for name in ("eos_token", "pad_token"):
        token = vars(config).get(name)  # a policy's tokenizer is taken as it is
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ValueError(f"`{name}` must be in the tokenizer's vocabulary, got {token!r}.")
        setattr(tokenizer, name, token)
    return tokenizer


def flat_max_length(config: FlatArguments, handle: ModelHandle) -> int:
    """Most tokens of a row; `max_length` None: the model's positions, where it has a table of them."""
    given = vars(config)["max_length"]
    limit = vars(handle.config).get("n_positions") or vars(handle.config).get("max_position_embeddings")
    if given is not None:
        return int(min(given, limit or given))
    if limit is None:
        raise ValueError("`max_length` must be a number for a model without a table of positions, got None.")
    return int(limit)
