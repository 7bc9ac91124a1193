# SPDX-License-Identifier: Apache-2.0
"""Parts of a trainer of TRL's shape that a flat configuration and what stands beside it decide together."""

from __future__ import annotations

import os
from typing import Any

import optax

from jrl.data.chat import with_chat_template
from jrl.data.tokenizer import load_tokenizer
from jrl.learners.optimizers import make_optimizer
from jrl.trl.arguments import FlatArguments
from jrl.trl.given import Given
from jrl.trl.models import ModelHandle
from jrl.trl.optimization import optimizer_section
from jrl.typing import TRUNCATION_MODES


def flat_tokenizer(config: FlatArguments, given: Any, handle: ModelHandle) -> Any:
    """The tokenizer with the template, EOS and padding that the configuration names."""
    source = handle.source
    if given is None and not isinstance(source, str | os.PathLike):
        raise ValueError("`tokenizer` (or `processing_class`) must be given for a model that has no folder.")
    mode = vars(config).get("truncation_mode", "keep_start")  # reward models cut nothing
    if mode not in TRUNCATION_MODES:
        raise ValueError(f"`truncation_mode` must be one of {TRUNCATION_MODES}, got {mode!r}.")
    side = "left" if mode == "keep_end" else "right"
    tokenizer = load_tokenizer(source if given is None else given, padding_side="right", truncation_side=side)
    if vars(config).get("chat_template_path") is not None:
        tokenizer = with_chat_template(tokenizer, vars(config)["chat_template_path"])
    for name in ("eos_token", "pad_token"):
        token = vars(config)[name]
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


def given_optimizer(config: FlatArguments, given: Given) -> optax.GradientTransformation | None:
    """What was given as `optimizers` or `optimizer_cls_and_kwargs`; None: the configuration names one."""
    transformation, schedule = given.optimizers or (None, None)
    if given.optimizer_cls_and_kwargs is not None:
        make, kwargs = given.optimizer_cls_and_kwargs
        transformation = make(**kwargs)
    if transformation is not None:
        if not isinstance(transformation, optax.GradientTransformation) or schedule is not None:
            raise ValueError(
                "`optimizers` must be (an optax transformation, None) or (None, a function from the step to the "
                f"learning rate), got ({type(transformation).__name__}, {type(schedule).__name__})."
            )
        return transformation
    if schedule is None:
        return None
    if not callable(schedule):
        raise ValueError(f"`optimizers`: the schedule must be a function, got {type(schedule).__name__}.")
    section = optimizer_section(config)
    clip = config.max_grad_norm or None
    return make_optimizer(section.name, section.kwargs, lambda _: schedule, max_grad_norm=clip)
