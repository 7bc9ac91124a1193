# SPDX-License-Identifier: Apache-2.0
"""`TrlParser`: dataclasses from a YAML file and the command line; the command line wins."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_args, get_type_hints

from transformers import HfArgumentParser

from jrl.suggestions import did_you_mean
from jrl.trainers.config import coerce, field_notes, read_yaml

__all__ = ["TrlParser"]

CONFIG_FLAG = "--config"
# What a file may set: numbers, switches, levels of talk and names of a tracker's runs. Of all other variables nobody
# can list which name a program, machine code, a host, a folder that code is read from, or a job to join.
ENVIRONMENT = frozenset(
    {
        *("COLUMNS", "DO_NOT_TRACK", "FORCE_COLOR", "NO_COLOR"),
        *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TF_CPP_MIN_LOG_LEVEL"),
        *(
            "DATASETS_VERBOSITY",
            "HF_HUB_VERBOSITY",
            "TRANSFORMERS_VERBOSITY",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        ),
        *("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"),
        *("JAX_DEBUG_NANS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_LOG_COMPILES", "JAX_NUM_CPU_DEVICES"),
        *("JAX_PLATFORMS", "JAX_TRACEBACK_FILTERING"),
        *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
        "TOKENIZERS_PARALLELISM",
        *(
            "WANDB_DISABLED",
            "WANDB_ENTITY",
            "WANDB_INIT_TIMEOUT",
            "WANDB_JOB_TYPE",
            "WANDB_MODE",
            "WANDB_NAME",
        ),
        *("WANDB_NOTES", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_SILENT", "WANDB_TAGS"),
        *("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    }
)


class TrlParser(HfArgumentParser):
    """Parser with an option for each field of some dataclasses, with defaults from a YAML file.

    A value is that of the command line, else of the file, else of the dataclass; a flag that repeats the dataclass's
    default counts as given. Options may be spelled with `_` or `-`.

    Unlike TRL's parser, this one also takes `--config=PATH`, names the closest field where a key or a flag is unknown,
    converts and checks the file's values by the types of the fields, and reads no `.args` file that happens to lie
    beside the script.

    Args:
      dataclass_types: One dataclass or several, none of them with a field `config`.
      kwargs: Those of `argparse.ArgumentParser`.
    Raises:
      ValueError: If a dataclass has a field `config`.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        given = [] if dataclass_types is None else dataclass_types
        types = list(given) if isinstance(given, Iterable) else [given]
        for found in types:
            if "config" in {field.name for field in dataclasses.fields(found)}:
                raise ValueError(
                    f"`dataclass_types`: {found.__name__} has a field named 'config', and {CONFIG_FLAG} names "
                    "the YAML file: rename it."
                )
        self.expected_types: Mapping[str, Any] = {
            name: kind for found in types for name, kind in get_type_hints(found).items()
        }
        super().__init__(types, **kwargs)  # type: ignore[arg-type]

    @property
    def documented(self) -> dict[str, str]:
        """Field → what the docstring of its dataclass says of it."""
        return {name: text for kind in self.dataclass_types for name, text in field_notes(kind).items()}

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Takes the help of an option from the dataclass's docstring, where the field brings none."""
        super()._add_dataclass_arguments(dtype)
        told = field_notes(dtype)
        for action in self._actions:
            if action.help is None and action.dest in told:
                action.help = told[action.dest].replace("%", "%%")

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Builds an instance of each dataclass, from the file that `--config` names and the command line.

        The file's mapping `env` is written to the process's environment first, over what is there; all but the
        variables of `ENVIRONMENT` are refused by name.

        Args:
          args: The command line; None: the process's own.
          return_remaining_strings: What belongs to no field is returned as the last element, the file's before the
            command line's.
          fail_with_unknown_args: Whether a key of the file that belongs to no field is an error where it is not
            returned; else it is ignored. A flag that belongs to no field always is.
          separate_remaining_strings: Returns both kinds of what remains, as two lists.
        Returns:
          The instances in the order of the dataclasses; then, where the parser has arguments of its own, a namespace;
          then what remains, if asked for.
        Raises:
          ValueError: On an unknown key or flag, naming the closest one; a key that stands twice; an `env` that is no
            mapping, or sets what a file may not set; or a `--config` without a path.
          TypeError: If a value of the file is not of its field's type.
          FileNotFoundError: If there is no such file.
        """
        words = list(sys.argv[1:] if args is None else args)
        path, words = _take_config(words)
        content = {} if path is None else self._read(path)
        of_file = self.set_defaults_with_config(**content)
        returned = return_remaining_strings or separate_remaining_strings
        if of_file and fail_with_unknown_args and not returned:
            name = of_file[0].removeprefix("--")
            raise ValueError(f"{path}: there is no field `{name}`.{did_you_mean(name, self._known())}")
        namespace, of_flags = self.parse_known_args(words)
        if of_flags and not returned:
            name = of_flags[0].partition("=")[0].lstrip("-").replace("-", "_")
            near = did_you_mean(f"--{name}", (f"--{known}" for known in self._known()))
            raise ValueError(f"there is no field for {of_flags[0]!r}.{near}")
        found = self._instances(vars(namespace))
        if separate_remaining_strings:
            return (*found, of_file, of_flags)
        return (*found, [*of_file, *of_flags]) if returned else tuple(found)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Makes these values the defaults, in sub-parsers too; a required option that has one is required no longer.

        Args:
          kwargs: Values by name of the field.
        Returns:
          What belongs to no option, as words of a command line: `["--name", "value", ...]`.
        Raises:
          TypeError: If a value is not of its field's type.
        """
        used = set()
        for parser in _parsers(self):
            for action in parser._actions:
                if action.dest in kwargs:
                    action.default = _as_default(parser, action, kwargs[action.dest])
                    action.required = False
                    used.add(action.dest)
        return [word for name in kwargs if name not in used for word in (f"--{name}", str(kwargs[name]))]

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and a single line: the usage of a hundred options would bury it."""
        self.exit(2, f"{self.prog}: {message}\n")

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
        """A field that two dataclasses share, with one default, is one option and fills both."""
        known = parser._option_string_actions.get(f"--{field.name}")
        if known is not None and known.default == field.default:
            return
        HfArgumentParser._parse_dataclass_field(parser, field)
        option = parser._option_string_actions[f"--{field.name}"]
        convert, default = option.type, option.default
        # argparse would read the default of a `str | bool` as a flag's text, and make False of "no".
        if field.type is bool and isinstance(default, str) and callable(convert):
            option.type = lambda text: default if text == default else convert(text)

    def _instances(self, values: Mapping[str, Any]) -> list[Any]:
        """Instances of the dataclasses, and a namespace of values that no dataclass has, where there are any."""
        names = [
            {field.name for field in dataclasses.fields(kind) if field.init} for kind in self.dataclass_types
        ]
        found = [
            kind(**{name: value for name, value in values.items() if name in of_kind})
            for kind, of_kind in zip(self.dataclass_types, names, strict=True)
        ]
        others = {
            name: value for name, value in values.items() if not any(name in of_kind for of_kind in names)
        }
        return [*found, argparse.Namespace(**others)] if others else found

    def _read(self, path: str) -> dict[str, Any]:
        """The file's content, once its `env` has been written to the environment."""
        content = read_yaml(path)
        content = {} if content is None else content
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a mapping of fields, got {type(content).__name__}.")
        environment = content.pop("env", {})
        if not isinstance(environment, Mapping):
            raise ValueError(
                f"{path}: `env` must be a mapping of variables, got {type(environment).__name__}."
            )
        for name in environment:
            if name not in ENVIRONMENT:
                raise ValueError(
                    f"{path}: `env` must not set {name}: a file of settings names no program, host, folder or key, and "
                    "only variables that are known to name none may stand in it (docs/security.md). Set it in the "
                    f"shell: export {name}=...{did_you_mean(str(name), ENVIRONMENT)}"
                )
        os.environ |= {str(name): str(value) for name, value in environment.items()}
        return {str(name): value for name, value in content.items()}

    def _known(self) -> list[str]:
        """Names of all options, those of sub-parsers included."""
        found = {action.dest for parser in _parsers(self) for action in parser._actions}
        return sorted(found - {"help", argparse.SUPPRESS})


def _take_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The path after `--config`, and the words without it."""
    path, rest, given = None, [], list(words)
    while given:
        word = given.pop(0)
        flag, equals, value = word.partition("=")
        if flag != CONFIG_FLAG:
            rest.append(word)
            continue
        if path is not None:
            raise ValueError(f"{CONFIG_FLAG} must be given once, got a second one.")
        if not equals and given:
            value = given.pop(0)
        if not value or value.startswith("--"):
            raise ValueError(f"{CONFIG_FLAG} needs the path of a YAML file.")
        path = value
    return path, rest


def _as_default(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """A file's value as its option's default: a text is read as a flag's would be, other values are checked by type."""
    name = action.dest
    expected = parser.expected_types.get(name, Any) if isinstance(parser, TrlParser) else Any
    if isinstance(value, str):
        try:
            value = parser._get_value(action, value)
        except argparse.ArgumentError as error:
            raise TypeError(f"`{name}`: {error.message}.") from error
        if action.choices is not None and value not in action.choices:
            choices = list(action.choices)
            raise ValueError(
                f"`{name}` must be one of {choices}, got {value!r}.{did_you_mean(value, map(str, choices))}"
            )
        return value
    if any(dataclasses.is_dataclass(part) for part in get_args(expected)):
        return value  # mappings, which the dataclass of this field makes into theirs
    try:
        return coerce(value, expected, name)
    except TypeError as error:
        if not isinstance(value, bool):
            raise
        raise TypeError(f"{error} YAML reads a bare yes, no, on or off as a boolean: quote it.") from None


def _parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all its sub-parsers."""
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in dict.fromkeys(action.choices.values()):
                yield from _parsers(parser)
