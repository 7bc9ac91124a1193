# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json against what is implemented: each is checked, and none is passed over in silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jrl.suggestions import did_you_mean


class Kind(NamedTuple):
    """Kind of a configuration's value.

    Attributes:
      says: In words, for an error.
      holds: Tells whether a value is of it; lists arrive as tuples.
    """

    says: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    # JSON has no infinity, but 1e400 is read as one.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


COUNT = Kind("a positive whole number", _is_count)
WHOLE = Kind(
    "a whole number of at least 0",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
)
COUNTS = Kind(
    "a list of positive whole numbers",
    lambda value: isinstance(value, tuple) and bool(value) and all(map(_is_count, value)),
)
SIZE = Kind(
    "a positive whole number, or two",
    lambda value: (
        _is_count(value) or (isinstance(value, tuple) and len(value) == 2 and all(map(_is_count, value)))
    ),
)
POSITIVE = Kind("a positive number", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
UNREAD = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys that transformers gives to the configs of all models, of which none is computed with here: of training, of
classes, of generated text, ids that the tokenizer's overrule, notes."""
# How alike an unknown key and a known one must be for a slip of the pen: at 0.6, difflib's own, most names are alike.
NEAR = 0.85


def one_of(*values: Any) -> Kind:
    """Kind of values that are among the given ones."""
    return Kind(" or ".join(map(repr, values)), lambda value: value in values)


def all_of(name: str) -> Kind:
    """A list of one name, repeated."""
    return Kind(
        f"a list of {name!r} only (nothing else is implemented)",
        lambda value: isinstance(value, tuple) and bool(value) and all(kind == name for kind in value),
    )


def read_values(
    what: str,
    values: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    fixed: Mapping[str, tuple[Any, ...]],
    silent: Collection[str] = (),
) -> dict[str, Any]:
    """The values of the keys that a config has fields for, lists as tuples.

    Args:
      what: "VAE", for messages.
      values: The content of the file. Keys that begin with `_` are notes of the writer's.
      kinds: What each field may be. A null for a `FLAG` is false, as it is to those who write such files.
      fixed: Keys of which a few values are implemented alone, the first of them the usual one.
      silent: Keys that say nothing of what is computed here.
    Raises:
      ValueError: If a key is unknown, or its value not implemented; the message names it.
    """
    found = {}
    for key, value in values.items():
        plain = tuple(value) if isinstance(value, list) else value
        if key in kinds:
            plain = False if value is None and kinds[key] is FLAG else plain
            require(what, key, kinds[key].holds(plain), kinds[key].says, value)
            found[key] = plain
        elif key in fixed:
            says = " or ".join(map(repr, fixed[key]))
            require(what, key, plain in fixed[key], f"{says} (else not implemented)", value)
        elif not key.startswith("_") and key not in silent:
            hint = did_you_mean(key, [*kinds, *fixed], cutoff=NEAR)
            raise ValueError(
                f"{what} config: `{key}` is unknown, and what it asks for may not be implemented.{hint}"
            )
    return found


def require(what: str, key: str, holds: bool, expected: str, got: object) -> None:
    """Raises ValueError, naming the key, where a claim about its value does not hold."""
    if not holds:
        raise ValueError(f"{what} config: `{key}` must be {expected}; got {got!r}.")
