# SPDX-License-Identifier: Apache-2.0
"""Commands whose configuration is flat, of TRL's fields: which they are, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from jrl.cli.summary import Work, status_of, tell
from jrl.trainers.config.coercion import read_yaml
from jrl.trainers.config.trl_config import TRLConfig

FLAT_BY_DEFAULT = ("reward", "dpo")
BOTH = (*FLAT_BY_DEFAULT, "sft", "ppo")
# Flags that only one layout has.
_FLAT_FLAGS = ("--dataset_name", "--dataset-name", "--model_name_or_path", "--model-name-or-path")
_NESTED_FLAGS = ("--samples",)


def flat(name: str, words: Sequence[str]) -> Work:
    """Flags, file and data are read and the model is loaded at once; training starts when the result is called.

    Args:
      name: Of the command.
      words: What stands behind it.
    Raises:
      ValueError: On a mistake in flags, file or data; as do TypeError and FileNotFoundError.
    """
    if "--dry-run" in words:
        raise ValueError(
            "--dry-run must go with a nested configuration, got a flat one, of TRL's fields: give a recipe with the "
            "sections method, model, train, ..., or `--samples FILE` and dotted flags (docs/command_line.md)."
        )
    from jrl.trl.commands import prepare_command  # transformers' arguments take a second to import

    run = prepare_command(name, words)

    def work() -> int:
        run.train()
        if run.native.interrupted:
            return status_of(run.native)
        tell(f"model and model card: {run.save()}")
        return 0

    return work


def wants_flat(command: str, words: Sequence[str]) -> bool:
    """True where a command is to be read with TRL's fields.

    The file that `--config` names decides: one without any of the six sections is flat. Without one the flags do,
    and where they do not either, `reward` and `dpo` are flat and the others nested.

    Args:
      command: Its name.
      words: What stands behind it.
    Raises:
      FileNotFoundError: If the file that `--config` names does not exist; ValueError if it holds no mapping.
    """
    if command == "ddpo":
        return True
    if command not in BOTH:
        return False
    flags = [word.partition("=")[0] for word in words]
    path = _config_path(words)
    content = None if path is None else read_yaml(path)
    if content is not None:
        if not isinstance(content, Mapping):
            raise ValueError(f"{path} must hold a mapping of fields, got {type(content).__name__}.")
        return is_flat(content)
    if any(flag in _FLAT_FLAGS for flag in flags):
        return True
    return command in FLAT_BY_DEFAULT and not any(flag in _NESTED_FLAGS for flag in flags)


def is_flat(content: object) -> bool:
    """True where the content of a YAML file is a mapping without any of the six sections."""
    return isinstance(content, Mapping) and not {field.name for field in fields(TRLConfig)} & set(content)


def _config_path(words: Sequence[str]) -> str | None:
    """Value of `--config`; None where there is none."""
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--config":
            return value if equals else next(iter(words[number + 1 :]), None)
    return None
