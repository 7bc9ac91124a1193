# SPDX-License-Identifier: Apache-2.0
"""Loading of Hugging Face tokenizers, and what every other module may rely on afterwards."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import numpy as np


def load_tokenizer(
    path: Any,
    *,
    padding_side: str = "left",
    truncation_side: str = "right",
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """A transformers tokenizer that has a pad token.

    Without one, EOS pads. That is safe here: masks come from lengths, never from `id == pad`.

    Args:
      path: A directory, a name on the Hugging Face hub, or a tokenizer that is already built (a copy is returned).
      padding_side: "left" or "right"; kept for code that pads with the tokenizer, jrl pads by itself.
      truncation_side: "left" or "right": the end that over-long texts lose.
      extra: More arguments of `AutoTokenizer.from_pretrained`.
    Raises:
      ValueError: If nothing can be loaded, a side is misspelt, there is neither an EOS nor a pad token, or `extra` asks
        for code of the tokenizer's folder to be run.
    """
    for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
        if side not in ("left", "right"):
            raise ValueError(f'`{name}` must be "left" or "right", got {side!r}.')
    if isinstance(path, str | os.PathLike):
        from transformers import AutoTokenizer  # here, because it takes seconds where torch is installed

        options = dict(extra or {})
        if options.pop("trust_remote_code", False):
            raise ValueError(
                f"`tokenizer_extra_configs`: `trust_remote_code` must be false: jrl runs no code of {path!s}. A "
                "tokenizer with code of its own can be built by your own script and given as an object."
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=False, **options)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"`tokenizer_path`: no tokenizer could be loaded from {path!s}: {reason}"
            ) from error
    else:
        if extra:
            raise ValueError(
                f"`extra` must be empty for a tokenizer that is already built, got {sorted(extra)}: "
                "give those arguments where it is built."
            )
        tokenizer = copy.deepcopy(path)
    tokenizer.padding_side, tokenizer.truncation_side = padding_side, truncation_side
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer {path!s} has neither an EOS nor a pad token, so nothing can end or pad a row: set "
                "`eos_token` on it, for example through `tokenizer_extra_configs: {eos_token: ...}`."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Refuses a tokenizer that writes ids for which the model has no embedding.

    Args:
      tokenizer: A transformers tokenizer.
      vocab_size: Rows of the model's embedding.
    Raises:
      ValueError: If the largest id is not below `vocab_size`.
    """
    needed = count_ids(tokenizer)
    if needed > vocab_size:
        raise ValueError(
            f"The tokenizer writes ids up to {needed - 1}, but the model's `vocab_size` is {vocab_size}. Do "
            "`tokenizer.tokenizer_path` and `model.model_path` belong together, or were tokens added afterwards?"
        )


def count_ids(tokenizer: Any) -> int:
    """One more than the largest id that the tokenizer writes."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def check_ids(values: Any, name: str, row: int, num_ids: int) -> list[int]:
    """The ids that a record brings.

    Args:
      values: A list, or an array.
      name: Of the column, for the error.
      row: Number of the record, for the error.
      num_ids: All must be below this: a model would read another token where one is not, and say nothing.
    Raises:
      ValueError: If they are not one list of such ids.
    """
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"`samples`: `{name}` of row {row} must be a list of token ids, got shape {ids.shape}, dtype {ids.dtype}."
        )
    wrong = ids[(ids < 0) | (ids >= num_ids)]
    if wrong.size:
        raise ValueError(
            f"`samples`: `{name}` of row {row} must be ids of the tokenizer, in [0, {num_ids}), got {int(wrong[0])}: "
            "were they made by another one, or padded with a label?"
        )
    found: list[int] = ids.tolist()
    return found


def tokenize(tokenizer: Any, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """Ids of each text, without special tokens around it by default; a special token's own text becomes its id."""
    if not texts:
        return []
    # `verbose=False`: the length warning of transformers speaks of a limit that the caller checks itself.
    encoded = tokenizer(
        texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
    )
    return [list(row) for row in encoded["input_ids"]]


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind an ordinary text: T5 ends every text with EOS.

    Raises:
      ValueError: If it changes the text between them.
    """
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise ValueError(
        f"`tokenizer` writes {bare} for a text without special tokens and {whole} with them: the one is no part of the "
        "other, so special tokens cannot be kept when a prompt is cut."
    )


def cut(row: list[int], max_length: int, side: str) -> list[int]:
    """At most `max_length` ids; `side` ("left" or "right") is the end that is lost."""
    if len(row) <= max_length:
        return row
    return row[len(row) - max_length :] if side == "left" else row[:max_length]
