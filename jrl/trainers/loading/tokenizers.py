# SPDX-License-Identifier: Apache-2.0
"""Choice of a run's tokenizer: the model's own, unless its configuration names another one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from jrl.data.tokenizer import load_tokenizer, prompt_prefix, unlike_ids
from jrl.models.adapters.peft_format import is_adapter_folder, read_adapter_folder
from jrl.models.hub import local_folder
from jrl.models.model_object import ModelObject, as_source
from jrl.trainers.config.sections import ModelConfig, TokenizerConfig


def load_run_tokenizer(model: ModelConfig, section: TokenizerConfig) -> Any:
    """The tokenizer of a run. One that was asked for is compared with the model's own, where the model has one.

    Args:
      model: The run's section.
      section: The run's section.
    Raises:
      FileNotFoundError: If `model_path` can only be a folder, and there is none.
      ValueError: If nothing can be loaded, or no tokenizer is named and the model brings none.
    """
    if isinstance(model.model_path, str | os.PathLike):
        # First: a folder that is missing is not the tokenizer's fault.
        local_folder(model.model_path, argument="`model.model_path`")
    path = tokenizer_path(model, section)
    sides = {"padding_side": section.padding_side, "truncation_side": section.truncation_side}
    tokenizer = load_tokenizer(path, **sides, extra=section.tokenizer_extra_configs)
    if section.tokenizer_path is not None:
        try:
            own = tokenizer_home(model.model_path)
            if own != path:
                _compare(tokenizer, path, own, load_tokenizer(own))
        except ValueError:  # the model has none
            pass
    return tokenizer


def tokenizer_path(model: ModelConfig, section: TokenizerConfig) -> str:
    """Folder or hub id of the run's tokenizer.

    Raises:
      ValueError: If none is named and the model brings none.
    """
    return tokenizer_home(model.model_path) if section.tokenizer_path is None else section.tokenizer_path


def tokenizer_home(path: Any, argument: str = "`tokenizer.tokenizer_path`") -> str:
    """Place of a model's tokenizer: with the model; an adapter's folder need not have one.

    Args:
      path: As `model.model_path`.
      argument: What names another one, for errors.
    Raises:
      ValueError: If it is a config object, or a model object that was made from one.
    """
    source = as_source(path)
    if isinstance(source, ModelObject):
        return source.name or source.require_tokenizer(argument)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"{argument} must be given for a {type(source).__name__} as `model_path`: a config object brings no "
            "tokenizer of its own."
        )
    if not is_adapter_folder(source):
        return os.fspath(source)
    found = read_adapter_folder(source)
    if any(Path(source).expanduser().glob("tokenizer*")) or found.base_model is None:
        return os.fspath(source)
    return str(found.base_model)


def warn_of_bare_prompts(
    section: TokenizerConfig, tokenizer: Any, decoder_start_token_id: int | None
) -> None:
    """Says what `add_special_tokens: false` leaves out of a decoder's prompts, where the tokenizer would write it."""
    if section.add_special_tokens or decoder_start_token_id is not None:
        return
    left_out = tokenizer.convert_ids_to_tokens(prompt_prefix(tokenizer))
    if left_out:
        warnings.warn(
            f"`tokenizer.add_special_tokens` is false, trlX's rule: prompts and samples begin without {left_out}, "
            "which the tokenizer puts before every text. A model that was trained with it is sampled from a "
            "context that it never saw. `jrl.train` writes it.",
            stacklevel=5,
        )


def _compare(tokenizer: Any, path: str, own_path: str, own: Any) -> None:
    """Warns where ids mean other texts than in the model's own tokenizer."""
    unlike = unlike_ids(tokenizer, own)
    if unlike:
        first = unlike[0]
        texts = [each.convert_ids_to_tokens(first) for each in (tokenizer, own)]
        warnings.warn(
            f"`tokenizer.tokenizer_path` {path!r} is not the tokenizer of `model.model_path` {own_path!r}: "
            f"{len(unlike)} ids mean another text, such as {first}, {texts[0]!r} instead of {texts[1]!r}. The model "
            "would have to learn its vocabulary anew. Leave `tokenizer_path` out for the model's own.",
            stacklevel=4,
        )
