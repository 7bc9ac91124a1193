# SPDX-License-Identifier: Apache-2.0
"""The parser of `jrl reward|dpo|sft` with flat configurations: its help shows what people set, in groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any

from jrl.trl.arguments import FlatArguments
from jrl.trl.parser import TrlParser
from jrl.trl.scripts import DatasetMixtureConfig, ModelConfig, ScriptArguments

# Of transformers' hundred fields, those that most runs set, and what they do here.
_USUAL: Mapping[str, str] = {
    "output_dir": "the run's folder: checkpoints, metrics.jsonl and the model; by default trainer_output",
    "num_train_epochs": "passes over the data",
    "max_steps": "optimizer steps; where positive, it decides instead of the passes",
    "per_device_train_batch_size": "rows of one forward and backward pass on each device",
    "gradient_accumulation_steps": "such passes of one optimizer step",
    "lr_scheduler_type": "such as linear, cosine or constant",
    "warmup_steps": "steps of the warm-up; below 1 a share of all",
    "weight_decay": "on matrices, not on norms and biases",
    "max_grad_norm": "the gradient is clipped to this norm; 0 never clips",
    "bf16": "compute in bfloat16; by default on an accelerator, not on a CPU",
    "gradient_checkpointing": "recompute activations in the backward pass",
    "mesh": 'devices along the axes data, fsdp, expert and tensor, as JSON: {"fsdp": 4}',
    "seed": "root of every random number",
    "logging_steps": "optimizer steps of one logged window",
    "eval_strategy": "no, steps or epoch",
    "eval_steps": "optimizer steps between evaluations",
    "save_strategy": "no, steps, epoch or best",
    "save_steps": "optimizer steps between checkpoints",
    "report_to": "wandb or tensorboard; metrics.jsonl is always written",
    "resume_from_checkpoint": "a run's folder, or one checkpoint of it",
}
# Shown by `--help-all` alone.
_WITHOUT_EFFECT = {
    "accelerator_kwargs",
    "bnb_4bit_quant_storage",
    "backward_batch_size",
    "bnb_4bit_quant_type",
    "exp_name",
    "global_backward_batch_size",
    "global_batch_size",
    "ignore_bias_buffers",
    "is_encoder_decoder",
    "is_peft_model",
    "model_name",
    "model_revision",
    "optimize_cuda_cache",
    "optimize_device_cache",
    "push_to_hub_if_best_kwargs",
    "query_dataset",
    "reward_model",
    "task_name",
    "trust_remote_code",
    "use_bnb_nested_quant",
    "world_size",
}
_WIDTH = 110
_PROCESSES = (
    " Several processes: --distributed, --coordinator_address, --num_processes, --process_id, "
    "--heartbeat_timeout_seconds."
)


class FlatParser(TrlParser):
    """`TrlParser` of a command's four classes.

    Args:
      command: Name of the command, such as "dpo".
      config_class: The method's flat configuration.
      what: What the command does, in a few words.
      data_class: What is asked beside of the data.
      script_class: What is asked in the place of a language model's data and model; the parser then has this class and
        the configuration's alone.
      functions: Field → whether a value of it names a function. Those are given on the command line alone: a file that
        is handed around must not run code.
    """

    def __init__(
        self,
        command: str,
        config_class: type,
        what: str,
        *,
        data_class: type = DatasetMixtureConfig,
        script_class: type | None = None,
        functions: Mapping[str, Callable[[str], bool]] = MappingProxyType({}),
    ) -> None:
        self._functions = functions
        self._config_class, self._data_class, self._everything = config_class, data_class, False
        self._script_class = script_class
        self._is_run = issubclass(config_class, FlatArguments)
        self._meanings = config_class.MEANINGS if issubclass(config_class, FlatArguments) else {}
        super().__init__(
            (ScriptArguments, config_class, ModelConfig, data_class)
            if script_class is None
            else (script_class, config_class),
            prog=f"jrl {command}",
            usage=f"jrl {command} [--config YAML] [--field value ...]",
            description=f"{what[0].upper()}{what[1:]}.",
            epilog="A YAML file holds the same fields, one a line; flags win over it. `env:` in it sets variables."
            + (_PROCESSES if script_class is None else ""),
            allow_abbrev=False,
        )
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Takes defaults from a configuration, as `TrlParser` does.

        Raises:
          ValueError: If the file names a function.
        """
        for name, is_code in self._functions.items():
            value = kwargs.get(name)
            if value is not None and is_code(str(value)):
                raise ValueError(
                    f"`{name}` must not name a function in a file, got {value!r}: it would be imported and run. Give "
                    f"it as a flag: --{name} {value}"
                )
        return super().set_defaults_with_config(**kwargs)

    def print_all_help(self) -> None:
        """The help with every field."""
        self._everything = True
        self.print_help()

    def format_help(self) -> str:
        """Data, model and the method's own fields; of the run's, the usual ones unless all are asked for."""
        formatter = argparse.HelpFormatter(self.prog, max_help_position=36, width=_WIDTH)
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        count = 0  # of what is shown
        for title, group in self._groups():
            formatter.start_section(title)
            for field in group:
                formatter.add_argument(self._entry(field))
            formatter.end_section()
            count += len(group)
        formatter.add_text(self.epilog)
        if not self._everything:
            known = {field.name for kind in self.dataclass_types for field in fields(kind)}
            formatter.add_text(f"--help-all lists {len(known) - count} more fields.")
        return formatter.format_help()

    def _groups(self) -> Iterator[tuple[str, Sequence[Field[Any]]]]:
        """(title, fields) of what is shown."""
        shared = (
            {field.name for field in fields(FlatArguments)} - {"learning_rate"} if self._is_run else set()
        )
        found = {field.name: field for field in fields(self._config_class)}
        own = [field for name, field in found.items() if name not in shared]
        usual = [found[name] for name in _USUAL if self._is_run]
        of_data = (*fields(ScriptArguments), *fields(self._data_class))
        of_model = [field for field in fields(ModelConfig) if field.name not in found]
        if self._script_class is None:
            yield "data", [field for field in of_data if self._is_shown(field)]
            yield "model and adapter", [field for field in of_model if self._is_shown(field)]
        else:
            yield "model, prompts and reward", fields(self._script_class)
        yield f"{self._config_class.__name__}", [field for field in own if self._is_shown(field)]
        if self._is_run:
            yield "the run", usual
        if self._everything and self._is_run:
            yield "the run, further fields", [f for f in found.values() if f not in own and f not in usual]

    def _is_shown(self, field: Field[Any]) -> bool:
        """True for fields that do something, or for all where all are asked for."""
        meaning = self._meanings.get(field.name)
        idle = field.name in _WITHOUT_EFFECT or (meaning is not None and meaning.kind != "mapped")
        return self._everything or not idle

    def _entry(self, field: Field[Any]) -> argparse.Action:
        """A field as the help prints it: one spelling, one sentence, the default where there is one."""
        meaning = self._meanings.get(field.name)
        told = str(field.metadata.get("help", "")) or self.documented.get(field.name, "")
        text = _USUAL.get(field.name, told) if self._is_run else told
        text = text.strip().rstrip(".")
        if meaning is not None and meaning.kind != "mapped":
            text = f"{meaning.kind}: {meaning.text}"
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default not in (None, MISSING, "", [], {}) and default is not False:
            text = f"{text} [{_shown(default)}]"
        option = argparse.Action([f"--{field.name}"], field.name, nargs=0 if default is False else None)
        option.metavar = "BOOL" if default is True else field.name.rpartition("_")[2].upper()
        option.help = (text if text[:2].isupper() else text[:1].lower() + text[1:]).replace("%", "%%")
        return option


def _shown(default: Any) -> str:
    """A default as a flag would spell it."""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default.value if isinstance(default, Enum) else default)


class _HelpAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, FlatParser)
        parser.print_all_help()
        parser.exit()
