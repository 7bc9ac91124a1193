# SPDX-License-Identifier: Apache-2.0
"""`TRLConfig`: six sections, read from YAML, edited without surprises, with the seeds' defaults.

Unlike in trlX, an unknown name is always an error that names the closest known one, and nothing is edited in
place. Only dictionaries of free content (`kwargs`, `gen_kwargs`, ...) take new keys.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

from jrl.learners.config import MethodConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.sft import SFTConfig
from jrl.trainers.coerce import coerce, field_types, hint, parse_yaml
from jrl.trainers.registry import METHODS, get_method
from jrl.trainers.sections import (
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
        """Reads a YAML file with the six sections.

        Raises:
          ValueError: If it is not such a file; else as `from_dict`.
        """
        content = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold the sections {_names()}, got {type(content).__name__}.")
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Builds and checks a configuration.

        Args:
          config: Section → field → value; copied. Fields that have a default may be missing, sections may
            not.
        Raises:
          ValueError: On an unknown or missing section or field, naming the closest one, and on a value out of
            range.
          TypeError: On a value of the wrong type.
        """
        for name in config:
            if name not in _names():
                raise ValueError(f"Unknown section `{name}`; there are {_names()}.{hint(name, _names())}")
        missing = [name for name in _names() if name not in config]
        if missing:
            raise ValueError(
                f"The configuration lacks the sections {missing}; all of {_names()} are required."
            )
        sections = {name: _build(name, _section_class(name, config[name]), config[name]) for name in _names()}
        found = cls(**sections)
        found.validate()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Section → field → value, a deep copy; `from_dict` takes it back."""
        return {name: copy.deepcopy(vars(vars(self)[name])) for name in _names()}

    def evolve(self, **sections: Mapping[str, Any]) -> Self:
        """A new configuration with some fields replaced: `config.evolve(train={"seed": 3})`.

        Dictionaries merge, key by key. A new `name` of method, optimizer or scheduler starts from that one's
        own defaults, because arguments of the old one mean nothing to it.

        Raises:
          ValueError: On an unknown section or field, naming the closest one.
          TypeError: On a value of the wrong type.
        """
        merged = self.to_dict()
        for name, changes in sections.items():
            if name not in merged:
                raise ValueError(f"Unknown section `{name}`; there are {_names()}.{hint(name, _names())}")
            if not isinstance(changes, Mapping):
                raise TypeError(f"`{name}` must be a dict of fields, got {changes!r}.")
            renamed = "name" in changes and str(changes["name"]).lower() != str(merged[name]["name"]).lower()
            merged[name] = _merge({} if renamed else merged[name], changes)
        return type(self).from_dict(merged)

    @classmethod
    def update(cls, base: TRLConfig | Mapping[str, Any], changes: Mapping[str, Any]) -> Self:
        """A new configuration from another and changes by dotted name, nested, or both.

        Args:
          base: A configuration or what `to_dict` gives; left untouched.
          changes: Such as `{"optimizer.kwargs.lr": 1e-4, "train": {"seed": 3}}`.
        Raises:
          ValueError: On an unknown name, naming the closest one.
          TypeError: On a value of the wrong type.
        """
        config = cls.from_dict(base.to_dict() if isinstance(base, TRLConfig) else base)
        nested: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in _names() and "." not in name:
                raise ValueError(f"Unknown parameter `{name}`.{_hint_anywhere(config, name)}")
            nested = _merge(nested, nest(name, value))
        return config.evolve(**nested)

    def validate(self) -> None:
        """Checks all types and values, as they are now. A trainer calls it once, on its own copy.

        Raises:
          ValueError: On a value out of range, or sections that do not fit each other.
          TypeError: On a value of the wrong type.
        """
        for name in _names():
            section = vars(self)[name]
            expected = field_types(type(section))
            unknown = [field for field in vars(section) if field not in expected]
            if unknown:
                raise ValueError(f"Unknown field `{name}.{unknown[0]}`.{hint(unknown[0], expected)}")
            for field, value in vars(section).items():
                vars(section)[field] = coerce(value, expected[field], f"{name}.{field}")
            section.validate()
        fitting = self.train.trainer.lower().removeprefix("accelerate").removesuffix("trainer") + "config"
        if fitting in METHODS and not isinstance(self.method, METHODS[fitting]):
            raise ValueError(
                f"`train.trainer` = {self.train.trainer!r} needs a `method` of {METHODS[fitting].__name__}, got "
                f"{type(self.method).__name__}."
            )

    def __str__(self) -> str:
        """The configuration as indented JSON; objects that are not plain appear by their names."""
        return json.dumps(self.to_dict(), indent=4, default=repr)


def default_ppo_config() -> TRLConfig:
    """trlX's default PPO run: GPT-2 fine-tuned on IMDB, two layers unfrozen."""
    return TRLConfig(
        method=PPOConfig(),
        model=ModelConfig(model_path="lvwerra/gpt2-imdb", num_layers_unfrozen=2),
        optimizer=_adamw(lr=3e-5),
        scheduler=SchedulerConfig("cosine_annealing", {"T_max": 1e12, "eta_min": 3e-5}),
        tokenizer=TokenizerConfig(tokenizer_path="gpt2"),
        train=_train("PPOTrainer", total_steps=10000, batch_size=32),
    )


def default_sft_config() -> TRLConfig:
    """trlX's default SFT run: GPT-2, all layers."""
    return TRLConfig(
        method=SFTConfig(),
        model=ModelConfig(model_path="gpt2", num_layers_unfrozen=-1),
        optimizer=_adamw(lr=1e-4),
        scheduler=SchedulerConfig("cosine_annealing", {"T_max": 1e12, "eta_min": 1e-4}),
        tokenizer=TokenizerConfig(tokenizer_path="gpt2"),
        train=_train("SFTTrainer", total_steps=1000, batch_size=8),
    )


def nest(name: str, value: Any) -> dict[str, Any]:
    """`nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def _adamw(lr: float) -> OptimizerConfig:
    return OptimizerConfig("adamw", {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6})


def _train(trainer: str, *, total_steps: int, batch_size: int) -> TrainConfig:
    return TrainConfig(
        total_steps=total_steps,
        seq_length=1024,
        epochs=100,
        batch_size=batch_size,
        checkpoint_interval=10000,
        eval_interval=100,
        trainer=trainer,
    )


def _names() -> list[str]:
    return [field.name for field in fields(TRLConfig)]


def _section_class(name: str, values: Any) -> type:
    """The dataclass of a section; the method's is told by its name."""
    if not isinstance(values, Mapping):
        raise TypeError(f"`{name}` must be a dict of fields, got {values!r}.")
    if name != "method":
        return _SECTIONS[name]
    if "name" not in values:
        raise ValueError("`method.name` is required: it chooses the algorithm, as in `PPOConfig`.")
    return get_method(coerce(values["name"], str, "method.name"))


def _build(name: str, section: type, values: Mapping[str, Any]) -> Any:
    """A section from a dictionary, its fields known, complete and of the right types."""
    expected = field_types(section)
    for field in values:
        if field not in expected:
            raise ValueError(f"Unknown field `{name}.{field}` of {section.__name__}.{hint(field, expected)}")
    required = [f.name for f in fields(section) if f.default is MISSING and f.default_factory is MISSING]
    missing = [f"{name}.{field}" for field in required if field not in values]
    if missing:
        raise ValueError(f"The configuration lacks {missing}, which {section.__name__} requires.")
    copied = copy.deepcopy(dict(values))
    return section(**{field: coerce(copied[field], expected[field], f"{name}.{field}") for field in copied})


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep merge; neither argument is touched, and nothing is shared with them."""
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(cast(Mapping[str, Any], old), value) if both else copy.deepcopy(value)
    return merged


def _hint_anywhere(config: TRLConfig, name: str) -> str:
    """Dotted names that end in a bare one; else the closest one."""
    dotted = []
    for section, values in config.to_dict().items():
        for field, value in values.items():
            dotted.append(f"{section}.{field}")
            dotted += [f"{section}.{field}.{key}" for key in value] if isinstance(value, dict) else []
    exact = [full for full in dotted if full.rsplit(".", 1)[1] == name]
    return f" Did you mean `{'` or `'.join(exact)}`?" if exact else hint(name, dotted)
