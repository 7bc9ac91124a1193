# SPDX-License-Identifier: Apache-2.0
"""Types of the values that PEFT's keys take, as they stand in a dict or in `adapter_config.json`.

PEFT itself checks few of them: `r: "2"` would surface as an error of arithmetic, `use_dora: "false"` as DoRA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Type(NamedTuple):
    """Type of a configuration's value.

    Attributes:
      holds: Tells whether a value is of it.
      says: The same in words, for an error.
    """

    holds: Callable[[Any], bool]
    says: str


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    # A bool is an int to Python, but `r: true` is a mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_or_many(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: all(map(holds, value)) if isinstance(value, list | tuple) else holds(value)


def _named(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(holds, value.values()))
    )


def _many(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


def _named_or_many(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _named(_many(holds))(value) or _many(holds)(value)


BOOL = Type(_is_bool, "true or false")
TEXT = Type(_is_text, "a text")
TEXTS = Type(_one_or_many(_is_text), "a text or a list of texts")
INTEGER = Type(_is_integer, "an integer")
INTEGERS = Type(_one_or_many(_is_integer), "an integer or a list of integers")
NUMBER = Type(_is_number, "a finite number")

TYPES: Mapping[str, Type] = {
    "task_type": TEXT,
    "modules_to_save": TEXTS,
    # LoRA.
    "r": INTEGER,
    "lora_alpha": NUMBER,
    "lora_dropout": NUMBER,
    "target_modules": TEXTS,
    "target_parameters": Type(_many(_is_text), "a list of texts"),
    "trainable_token_indices": Type(
        _named_or_many(_is_integer), "a list of integers or a dict of texts to such lists"
    ),
    "exclude_modules": TEXTS,
    "layers_to_transform": INTEGERS,
    "layers_pattern": TEXTS,
    "rank_pattern": Type(_named(_is_integer), "a dict of texts to integers"),
    "alpha_pattern": Type(_named(_is_number), "a dict of texts to finite numbers"),
    "use_rslora": BOOL,
    "use_dora": BOOL,
    "init_lora_weights": Type(lambda value: _is_bool(value) or _is_text(value), "true, false or a text"),
    # Virtual tokens.
    "num_virtual_tokens": INTEGER,
    "prefix_projection": BOOL,
    "encoder_hidden_size": INTEGER,
    "init_weights": TEXT,
    "prompt_tuning_init": TEXT,
    "prompt_tuning_init_text": TEXT,
}
"""By key; None, which stands for PEFT's default, is not looked at."""
