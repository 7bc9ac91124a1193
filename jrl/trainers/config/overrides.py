# SPDX-License-Identifier: Apache-2.0
"""Dotted, typed overrides of a configuration on the command line: `--method.cliprange 0.1 --train.seed=3`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrl.suggestions import did_you_mean
from jrl.trainers.config.coercion import coerce_flag, field_types, parse_yaml
from jrl.trainers.config.section_dicts import hint_anywhere, nest
from jrl.trainers.config.trl_config import TRLConfig


def apply_overrides(config: TRLConfig, arguments: Sequence[str]) -> TRLConfig:
    """A new configuration with the overrides applied, left to right, and checked when all of them are there.

    Each is `--section.field value` or `--section.field=value`; a boolean field may stand alone, meaning true.
    The field's annotation decides how the text is read: `--train.run_name 3` is the text "3", `--train.seed
    3` a number. Entries of dictionaries are reached by further dots and read as YAML:
    `--optimizer.kwargs.betas "[0.9, 0.99]"`.

    Args:
      config: Left untouched.
      arguments: As they stand in `sys.argv`.
    Raises:
      ValueError: On an unknown section or field, naming the closest one, a flag without a value, or values that are
        out of range or do not fit each other.
      TypeError: On a value of the wrong type.
    """
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ValueError(f"Expected an override such as --train.seed 3, got {flag!r}.")
        name, equals, text = flag[2:].partition("=")
        expected = _expected_type(config, name)
        if not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif not equals and expected is bool:
            text = "true"
        elif not equals:
            raise ValueError(f"--{name} needs a value.")
        value = parse_yaml(text) if expected is None else coerce_flag(text, expected, name)
        # A dotted name inside a dictionary may follow the dictionary itself, so each is applied in its turn.
        config = config.draft(**nest(name, value))
    return config.evolve()


def _expected_type(config: TRLConfig, name: str) -> Any:
    """The annotation of a dotted field; None for an entry of a dictionary, which may be anything."""
    section, _, path = name.partition(".")
    sections = vars(config)
    if section not in sections:
        near = did_you_mean(section, sections) if path else hint_anywhere(config.to_dict(), name)
        if name.replace("-", "_") == "learning_rate":
            near = " Did you mean `optimizer.kwargs.lr`?"
        raise ValueError(f"Unknown flag --{name}: the sections are {list(sections)}.{near}")
    expected = field_types(type(sections[section]))
    field, _, entry = path.partition(".")
    if field not in expected:
        near = did_you_mean(f"{section}.{field}", (f"{section}.{known}" for known in expected))
        raise ValueError(f"Unknown flag --{name}: no such field in {type(sections[section]).__name__}.{near}")
    return None if entry else expected[field]
