# SPDX-License-Identifier: Apache-2.0
"""A flat recipe as the six sections that its trainer would run on, without its model and data."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import jrl
from jrl.trl import commands
from jrl.trl.command_help import FlatParser
from jrl.trl.commands import COMMANDS, init_kwargs, peft_config_of
from jrl.trl.ddpo_native import native_config
from jrl.trl.flat_trainer import FlatTrainer
from tests.recipe_shapes import ARCHITECTURES
from tests.tiny import tiny_tokenizer

ROWS = {
    "sft": [{"text": "the cat sat"}],
    "dpo": [{"prompt": "the cat", "chosen": " sat", "rejected": " ran"}],
    "reward": [{"prompt": "the cat", "chosen": " sat", "rejected": " ran"}],
}


class Configured(Exception):
    """A trainer has come as far as its configuration."""

    def __init__(self, config: jrl.TRLConfig) -> None:
        self.config = config


def is_flat(path: Path) -> bool:
    """Whether a recipe has TRL's fields, and none of the six sections."""
    return "train" not in yaml.safe_load(path.read_text(encoding="utf-8"))


def command_of(path: Path) -> str:
    """The command that a recipe's head names."""
    found = re.search(r"command:  jrl (\w+) ", path.read_text(encoding="utf-8"))
    assert found is not None, path
    return found[1]


def is_ddpo(path: Path) -> bool:
    """Whether a recipe trains a diffusion model, whose command has no data set and no language model."""
    return command_of(path) == "ddpo"


def ddpo_sections(path: Path) -> tuple[Any, Any, jrl.TRLConfig]:
    """(script arguments, configuration, what the run would be configured by) of a recipe of DDPO."""
    parser = commands.ddpo_parser()
    script, config = parser.parse_args_and_config(["--config", str(path)])
    with warnings.catch_warnings():  # recipes are written for accelerators, and read here on a CPU
        warnings.filterwarnings("ignore", message="`mixed_precision` bf16 computes in float32 on a CPU")
        found = native_config(config, model=script.pretrained_model, use_lora=script.use_lora)
    found.validate()
    return script, config, found


def parse(path: Path) -> tuple[Any, Any, Any, Any]:
    """Script arguments, configuration, model and mixture."""
    name = command_of(path)
    parser = FlatParser(name, COMMANDS[name].config_class, COMMANDS[name].what)
    script, config, model, mixture = parser.parse_args_and_config(["--config", str(path)])
    return script, config, model, mixture


def sections(path: Path) -> jrl.TRLConfig:
    """What the trainer's run would be configured by, with the model's config in the place of its name."""
    name = command_of(path)
    command = COMMANDS[name]
    _, config, model, _ = parse(path)
    config.model_init_kwargs = None
    handle = command.trainer_class.model_class.from_pretrained(
        ARCHITECTURES[model.model_name_or_path](), **init_kwargs({}, model)
    )

    def stop(self: Any, handle: Any, optimizer: Any) -> None:
        raise Configured(self._native_config(handle, given_optimizer=optimizer is not None))

    with mock.patch.object(FlatTrainer, "_make_native", stop), pytest.raises(Configured) as found:
        command.trainer_class(
            model=handle,
            args=config,
            train_dataset=ROWS[name],
            processing_class=tiny_tokenizer(),
            peft_config=peft_config_of(command.peft_task, config, model),
        )
    found.value.config.validate()
    return found.value.config
