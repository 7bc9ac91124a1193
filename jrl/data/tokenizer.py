# SPDX-License-Identifier: Apache-2.0
"""Loading of Hugging Face tokenizers, and what every other module may rely on afterwards."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
_LFS_POINTER = b"version https://git-lfs"


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
      ValueError: If nothing can be loaded, or nothing but special tokens, a side is misspelt, there is neither an EOS
        nor a pad token, or `extra` asks for code of the tokenizer's folder to be run.
    """
    for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
        if side not in ("left", "right"):
            raise ValueError(f'`{name}` must be "left" or "right", got {side!r}.')
    if isinstance(path, str | os.PathLike):
        from transformers import AutoTokenizer  # here, because it takes seconds where torch is installed

        check_folder(path)
        options = dict(extra or {})
        if options.pop("trust_remote_code", False):
            raise ValueError(
                f"`tokenizer_extra_configs`: `trust_remote_code` must be false: jrl runs no code of {path!s}. A "
                "tokenizer with code of its own can be built by your own script and given as an object."
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=False, **options)
        except RecursionError as error:
            raise ValueError(
                f"`tokenizer_path`: no tokenizer could be loaded from {path!s}: a JSON file of it is nested too deeply."
            ) from error
        except Exception as error:  # of malformed files transformers raises whatever it stumbles over
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            reason = _pointer(path) or kind + (str(error).strip().splitlines() or [""])[0]
            here = "" if Path(path).expanduser().exists() else ", which is no folder here"
            raise ValueError(
                f"`tokenizer_path`: no tokenizer could be loaded from {path!s}{here}: {reason}"
            ) from error
    else:
        if extra:
            raise ValueError(
                f"`extra` must be empty for a tokenizer that is already built, got {sorted(extra)}: "
                "give those arguments where it is built."
            )
        tokenizer = copy.deepcopy(path)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if len(vocabulary.keys() - added.keys()) < 2:
        # transformers makes an empty one of a folder that holds the model alone.
        raise ValueError(
            f"`tokenizer_path`: the tokenizer of {path!s} has no vocabulary, only {len(vocabulary)} special tokens. "
            "Are its files (tokenizer.json or the like) missing? Set "
            "`tokenizer.tokenizer_path` to the folder that holds them."
        )
    tokenizer.padding_side, tokenizer.truncation_side = padding_side, truncation_side
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer {path!s} has neither an EOS nor a pad token, so nothing can end or pad a row. Name an "
                "EOS token of its vocabulary: `tokenizer.tokenizer_extra_configs: {eos_token: TOKEN}`. "
                f"Its last entries are {sorted(vocabulary, key=vocabulary.__getitem__)[-4:]}."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuses a path that can only be a folder's, and is none: the hub has no such names.

    Raises:
      ValueError: If there is no such folder.
    """
    name = os.fspath(path)
    is_path = isinstance(path, os.PathLike) or name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).expanduser().exists():
        raise ValueError(f"there is no folder {name!r} to load a tokenizer from.")


def _pointer(path: str | os.PathLike[str]) -> str | None:
    """Advice on a file of the tokenizer that is only a git-lfs pointer; None where there is no such file."""
    for name in _FILES:
        file = Path(path).expanduser() / name
        if file.is_file():
            with file.open("rb") as opened:
                if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    return f"{name} is a git-lfs pointer, not the file: run `git lfs pull` in its repository."
    return None


_NAMED = 5
"""Tokens that an error names."""


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Refuses a tokenizer that writes ids for which the model has no embedding.

    Args:
      tokenizer: A transformers tokenizer.
      vocab_size: Rows of the model's embedding.
    Raises:
      ValueError: If the largest id is not below `vocab_size`.
    """
    missing = sorted((number, text) for text, number in tokenizer.get_vocab().items() if number >= vocab_size)
    if not missing:
        return
    first = ", ".join(f"{text!r} ({number})" for number, text in missing[:_NAMED])
    others = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
    raise ValueError(
        f"The tokenizer writes ids up to {missing[-1][0]}, but the model's `vocab_size` is {vocab_size}: it has no "
        f"embedding of {first}{others}. Do `tokenizer.tokenizer_path` and `model.model_path` belong together, or were "
        "tokens added afterwards? Leave `tokenizer_path` out for the model's own tokenizer; or enlarge the model in "
        "transformers, `model.resize_token_embeddings(len(tokenizer))`, and save both into one folder."
    )


def count_ids(tokenizer: Any) -> int:
    """Number of ids of the tokenizer: its largest id plus 1."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def unlike_ids(tokenizer: Any, other: Any) -> list[int]:
    """Ids that both tokenizers write, and that mean another text to each, in order."""
    texts, others = ({token: text for text, token in each.get_vocab().items()} for each in (tokenizer, other))
    return sorted(token for token in texts.keys() & others.keys() if texts[token] != others[token])


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
        [without_surrogates(text) for text in texts],
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        verbose=False,
    )
    return [list(row) for row in encoded["input_ids"]]


def without_surrogates(text: str) -> str:
    r"""A text that UTF-8 can hold, and so a tokenizer can read: each lone surrogate becomes U+FFFD.

    JSON can say a lone surrogate (`"\ud800"`) and UTF-8 cannot, so such texts come from data sets of JSON lines.
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer puts before and behind an ordinary text: T5 ends every text with EOS.

    Raises:
      ValueError: If it changes the text between them.
    """
    vocab, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    # By number: a vocabulary has no order of its own, and a special token would be found at its own place.
    ordinary = (text for text in sorted(vocab, key=vocab.__getitem__) if text not in special)
    text = "a" if _ids(tokenizer, "a") else next(text for text in ordinary if _ids(tokenizer, text))
    bare, whole = _ids(tokenizer, text), _ids(tokenizer, text, add_special_tokens=True)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise ValueError(
        f"`tokenizer` writes {bare} for a text without special tokens and {whole} with them: the one is no part of the "
        "other, so special tokens cannot be kept when a prompt is cut."
    )


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def prompt_prefix(tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """Ids that stand before the prompt of a decoder: what the tokenizer puts before ordinary text, such as BOS.

    What it puts behind a text is left out: a prompt that ended with EOS would be over.

    Args:
      tokenizer: A transformers tokenizer.
      add_special_tokens: Whether there are any.
    """
    return special_tokens_around(tokenizer)[0] if add_special_tokens else []


def begun(prefix: list[int], ids: list[int]) -> list[int]:
    """Prepends the special tokens, unless the text has them already, as a chat template's does."""
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encodes prompts as a decoder reads them: special tokens before each text, such as BOS, and none behind it.

    Args:
      tokenizer: A transformers tokenizer.
      texts: Prompts; one that begins with the special tokens already, as a chat template's does, gets no second ones.
    Returns:
      The ids of each, of whatever length.
    """
    prefix = prompt_prefix(tokenizer)
    return [begun(prefix, row) for row in tokenize(tokenizer, list(texts))]


def cut(row: list[int], max_length: int, side: str) -> list[int]:
    """Cuts a row to `max_length` ids; `side` ("left" or "right") is the end that is lost."""
    if len(row) <= max_length:
        return row
    return row[len(row) - max_length :] if side == "left" else row[:max_length]
