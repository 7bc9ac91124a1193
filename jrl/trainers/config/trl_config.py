# SPDX-License-Identifier: Apache-2.0
"""`TRLConfig`: six sections, read from YAML, edited without surprises, with the seeds' defaults.

Unlike in trlX, an unknown name is always an error that names the closest known one, and nothing is edited in
place. Only dictionaries (`kwargs`, `gen_kwargs`, ...) take new keys, those of sampling by its own names. `layouts.py`
knows who reads other files.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from jrl.learners.config import MethodConfig, OnlineConfig
from jrl.models.model_object import as_source, is_model_object
from jrl.suggestions import did_you_mean
from jrl.trainers.config.coercion import coerce, field_types, read_yaml
from jrl.trainers.config.gen_kwargs import known_values
from jrl.trainers.config.layouts import full_name, in_present_layout
from jrl.trainers.config.method import entries, entry_of
from jrl.trainers.config.registry import METHODS, get_method, method_of_trainer
from jrl.trainers.config.section_dicts import (
    build_section,
    hint_anywhere,
    merge,
    nest,
    required_fields,
    typed_fields,
    warn_caller,
)
from jrl.trainers.config.sections import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)

_SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
    "train": TrainConfig,
}


@dataclass
class TRLConfig:
    """A run's whole configuration.

    Attributes:
      method: The algorithm's own section; its class decides the algorithm.
      model: The policy.
      optimizer: The optimizer.
      scheduler: The learning rate over steps.
      tokenizer: The tokenizer.
      train: The run.
    """

    method: MethodConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    tokenizer: TokenizerConfig
    train: TrainConfig

    @classmethod
    def load_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a YAML file with the six sections, or with those of an older trlX.

        Raises:
          FileNotFoundError: If there is no such file.
          ValueError: If it is not such a file; else as `from_dict`.
        """
        content = cls._read(path)
        with _naming(path):
            return cls.from_dict(content)

    @classmethod
    def load_recipe(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a YAML file as the commands do: required fields may be missing, too.

        They take the values of the method's default configuration, and a warning shows them.

        Raises:
          FileNotFoundError: If there is no such file.
          ValueError: As `load_yaml`, or if fields are missing of a method without a default configuration.
        """
        content = cls._read(path)
        with _naming(path):
            sections = cls._fill(in_present_layout(content))
            classes = cls._classes(sections)
            return cls._build(cls._complete(sections, classes), classes)

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> dict[str, Any]:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold the sections {_names()}, got {type(content).__name__}.")
        return content

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Builds and checks a configuration.

        Args:
          config: Section → field → value; copied. Fields that have a default may be missing. A section that is
            missing takes the method's default configuration's, and a warning shows it. The layouts of older trlX
            releases are translated, with a warning for each field.
        Raises:
          ValueError: On an unknown section or field, naming the closest one, on a missing field, and on a value out
            of range.
          TypeError: On a value of the wrong type.
        """
        sections = cls._fill(in_present_layout(config))
        return cls._build(sections, cls._classes(sections))

    @classmethod
    def _fill(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """All six sections: those that are missing are the default configuration's, and said."""
        for name in config:
            if name not in _names():
                raise ValueError(
                    f"Unknown section `{name}`; there are {_names()}.{did_you_mean(name, _names())}"
                )
        missing = [name for name in _names() if name not in config]
        if not missing:
            return config
        defaults = cls._defaults(config, f"the sections {missing}").to_dict()
        taken = {name: defaults[name] for name in missing}
        warn_caller(f"The configuration has no section {missing}; taken are the default ones, {taken}.")
        return dict(config) | {name: defaults[name] for name in missing}

    @classmethod
    def _complete(cls, sections: Mapping[str, Any], classes: Mapping[str, type]) -> Mapping[str, Any]:
        """All required fields: those that are missing are the default configuration's, and said."""
        missing = [
            (name, field)
            for name in _names()
            for field in required_fields(classes[name])
            if field not in sections[name]
        ]
        if not missing:
            return sections
        dotted = [f"{name}.{field}" for name, field in missing]
        defaults = cls._defaults(sections, f"the fields {dotted}").to_dict()
        taken = {".".join(place): defaults[place[0]][place[1]] for place in missing}
        warn_caller(f"The configuration lacks {dotted}: they take the default ones, {taken}.")
        return {
            name: dict(sections[name]) | {field: defaults[name][field] for at, field in missing if at == name}
            for name in _names()
        }

    @classmethod
    def _defaults(cls, config: Mapping[str, Any], missing: str) -> TRLConfig:
        """The default configuration of the method that the sections there are name."""
        train = config.get("train")
        if "method" in config:
            method: type | None = cls._section_class("method", config["method"])
        else:
            method = method_of_trainer(str(train.get("trainer", ""))) if isinstance(train, Mapping) else None
        known = entries().values()
        for entry in known:
            if method is not None and issubclass(method, entry.config):
                return entry.default()
        raise ValueError(
            f"The configuration lacks {missing}, and nothing in it names a method that has a default "
            f"configuration: one of {[entry.config.__name__ for entry in known]}, as `method.name`."
        )

    @classmethod
    def _build(cls, sections: Mapping[str, Any], classes: Mapping[str, type]) -> Self:
        """Builds the configuration of all six sections in the present layout."""
        found = cls(**{name: build_section(name, classes[name], sections[name]) for name in _names()})
        found.validate()
        return found

    @classmethod
    def _classes(cls, sections: Mapping[str, Any]) -> dict[str, type]:
        """The dataclasses of all six sections."""
        return {name: cls._section_class(name, sections[name]) for name in _names()}

    @classmethod
    def _section_class(cls, name: str, values: Any) -> type:
        """The dataclass of a section; the method's is told by its name."""
        if not isinstance(values, Mapping):
            raise TypeError(f"`{name}` must be a dict of fields, got {values!r}.")
        if name != "method":
            return _SECTIONS[name]
        if "name" not in values:
            raise ValueError("`method.name` is required: it chooses the algorithm, as in `PPOConfig`.")
        return get_method(coerce(values["name"], str, "method.name"))

    def to_dict(self) -> dict[str, Any]:
        """Section → field → value, a deep copy; `from_dict` takes it back."""
        copied = copy.deepcopy(self)
        return {name: vars(vars(copied)[name]) for name in _names()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares model objects with this one: their weights are not copied."""
        for section in vars(self).values():
            memo |= {
                id(value): as_source(value) for value in vars(section).values() if is_model_object(value)
            }
        copied = copy.copy(self)
        vars(copied).update({name: copy.deepcopy(vars(self)[name], memo) for name in _names()})
        return copied

    def evolve(self, **sections: Mapping[str, Any]) -> Self:
        """A new configuration with some fields replaced: `config.evolve(train={"seed": 3})`.

        Dictionaries merge, key by key. A new `name` of method, optimizer or scheduler starts from that one's
        own defaults, because arguments of the old one mean nothing to it.

        Raises:
          ValueError: On an unknown section or field, naming the closest one.
          TypeError: On a value of the wrong type.
        """
        merged = self.to_dict()
        classes = {name: type(vars(self)[name]) for name in merged}
        for name, changes in sections.items():
            if name not in merged:
                raise ValueError(
                    f"Unknown section `{name}`; there are {_names()}.{did_you_mean(name, _names())}"
                )
            if not isinstance(changes, Mapping):
                raise TypeError(f"`{name}` must be a dict of fields, got {changes!r}.")
            renamed = _renamed(name, merged[name], changes)
            merged[name] = merge({} if renamed else merged[name], changes)
            if renamed:
                classes[name] = self._section_class(name, merged[name])
        return self._build(merged, classes)

    def draft(self, **sections: Mapping[str, Any]) -> Self:
        """A changed copy whose values may be out of range, or not fit each other, until `validate` asks.

        Of several changes a later one may so mend what an earlier one broke.

        Args:
          **sections: Field → value of sections that there are.
        Raises:
          ValueError: On an unknown field, naming the closest one.
          TypeError: On a value of the wrong type.
        """
        found = copy.deepcopy(self)
        for name, changes in sections.items():
            section = vars(found)[name]
            if _renamed(name, vars(section), changes):
                vars(found)[name] = build_section(name, self._section_class(name, changes), changes)
            else:
                values = typed_fields(name, type(section), merge(vars(section), changes))
                vars(section).update(values)
        return found

    @classmethod
    def update(cls, base: TRLConfig | Mapping[str, Any], changes: Mapping[str, Any]) -> TRLConfig:
        """A new configuration from another and changes by dotted name, nested, or both.

        Args:
          base: A configuration or what `to_dict` gives; left untouched.
          changes: Such as `{"optimizer.kwargs.lr": 1e-4, "train": {"seed": 3}}`.
        Raises:
          ValueError: On an unknown name, naming the closest one.
          TypeError: On a value of the wrong type.
        """
        config = base if isinstance(base, TRLConfig) else cls.from_dict(base)
        nested: dict[str, Any] = {}
        known = {name: field_types(type(section)) for name, section in vars(config).items()}
        for name, value in changes.items():
            name = full_name(name, known)
            if name not in _names() and "." not in name:
                raise ValueError(f"Unknown parameter `{name}`.{hint_anywhere(config.to_dict(), name)}")
            nested = merge(nested, nest(name, value))
        return config.evolve(**nested)

    def validate(self) -> None:
        """Checks all types and values, as they are now. A trainer calls it once, on its own copy.

        Raises:
          ValueError: On a value out of range, an unknown name, or sections that do not fit each other.
          TypeError: On a value of the wrong type.
        """
        for name in vars(self):
            if name not in _names():
                raise ValueError(
                    f"Unknown section `{name}`; there are {_names()}.{did_you_mean(name, _names())}"
                )
        for name in _names():
            section = vars(self)[name]
            expected = field_types(type(section))
            unknown = [field for field in vars(section) if field not in expected]
            if unknown:
                raise ValueError(f"Unknown field `{name}.{unknown[0]}`.{did_you_mean(unknown[0], expected)}")
            for field, value in vars(section).items():
                vars(section)[field] = as_source(coerce(value, expected[field], f"{name}.{field}"))
            section.validate()
        for name in ("gen_kwargs", "gen_experience_kwargs"):
            sampling = vars(self.method).get(name)
            if sampling is not None:
                known_values(sampling, where=f"method.{name}")
        # A trainer learns by the method of its own name, where there is one.
        fitting = method_of_trainer(self.train.trainer)
        if fitting is not None and not isinstance(self.method, fitting):
            raise ValueError(
                f"`train.trainer` = {self.train.trainer!r} needs a `method` of {fitting.__name__}, got "
                f"{type(self.method).__name__}."
            )
        entry = entry_of(self.method)
        if not self.tokenizer.add_special_tokens and entry is not None and entry.own_tokens:
            raise ValueError(
                f"`tokenizer.add_special_tokens` must be true for {type(self.method).__name__}, got False: its texts "
                "are tokenised as the tokenizer does it."
            )
        if self.train.rollouts_ahead and not isinstance(self.method, OnlineConfig):
            raise ValueError(
                f"`train.rollouts_ahead` must be 0 for {type(self.method).__name__}, got {self.train.rollouts_ahead}: "
                "only online algorithms of language models (PPO, the GRPO family) collect rollouts ahead."
            )
        if self.train.compute_dtype == "float16" and not (entry is not None and entry.scales_loss):
            raise ValueError(
                "`train.compute_dtype` must be float32 or bfloat16, got 'float16': only DDPO scales its loss."
            )

    def __str__(self) -> str:
        """The configuration as indented JSON; objects that are not plain appear by their names."""
        return json.dumps(self.to_dict(), indent=4, default=repr)


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file in front of what is wrong with its content."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def _names() -> list[str]:
    return [field.name for field in fields(TRLConfig)]


def _renamed(section: str, old: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """True where changes choose another method, optimizer or scheduler than the section's."""
    if "name" not in old or "name" not in changes:
        return False
    if section == "method":
        return METHODS.find(str(changes["name"])) is not METHODS.find(old["name"])
    return str(changes["name"]).lower() != str(old["name"]).lower()
