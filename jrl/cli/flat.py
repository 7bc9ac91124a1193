# SPDX-License-Identifier: Apache-2.0
"""`jrl reward|dpo|sft` with a flat configuration: TRL's fields from a YAML file and flags, run by `jrl.trl`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.cli.ending import Work, end_early, tell
from jrl.cli.flat_help import FlatParser
from jrl.data.records import RecordStream
from jrl.trl.arguments import FlatArguments
from jrl.trl.configs import DPOConfig, RewardConfig, SFTConfig
from jrl.trl.dpo import DPOTrainer
from jrl.trl.reward import RewardTrainer
from jrl.trl.scripts import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from jrl.trl.sft import SFTTrainer

Records = Sequence[Any] | RecordStream


class Command(NamedTuple):
    """What a command is made of.

    Attributes:
      config_class: Its flat configuration.
      trainer_class: Its trainer.
      what: What it does, in a few words.
      peft_task: PEFT's name of what its model does, where nothing else is said.
    """

    config_class: type[FlatArguments]
    trainer_class: Callable[..., Any]
    what: str
    peft_task: str = "CAUSAL_LM"


COMMANDS: Mapping[str, Command] = {
    "reward": Command(
        RewardConfig,
        RewardTrainer,
        "a reward model from pairs of a chosen and a rejected completion",
        "SEQ_CLS",
    ),
    "dpo": Command(
        DPOConfig,
        DPOTrainer,
        "direct preference optimisation from pairs of a chosen and a rejected completion",
    ),
    "sft": Command(
        SFTConfig, SFTTrainer, "supervised fine-tuning on texts, messages or prompts with completions"
    ),
}


def flat(name: str, words: Sequence[str]) -> Work:
    """Flags, file and data are read and the model is loaded at once; training starts when the result is called.

    Args:
      name: Of the command.
      words: What stands behind it.
    Raises:
      ValueError: On a mistake in flags, file or data; as do TypeError and FileNotFoundError.
    """
    command = COMMANDS[name]
    parser = FlatParser(name, command.config_class, command.what)
    script, config, model, mixture = parser.parse_args_and_config(words)
    if model.model_name_or_path is None:
        raise ValueError("`model_name_or_path` must name a checkpoint, got None.")
    config.model_init_kwargs = init_kwargs(config.model_init_kwargs or {}, model)
    train, evaluation = read_data(script, mixture, evaluates=config.eval_strategy != "no")
    trainer = command.trainer_class(
        model=model.model_name_or_path,
        args=config,
        train_dataset=train,
        eval_dataset=evaluation,
        peft_config=peft_config_of(command.peft_task, config, model),
    )
    trainer.native.dataset_names = data_names(script, mixture)

    def work() -> int:
        trainer.train()
        if trainer.native.interrupted:
            return end_early(trainer.native, f"--resume_from_checkpoint {config.output_dir}")
        trainer.save_model()
        tell(f"model and model card: {config.output_dir}")
        return 0

    return work


def read_data(
    script: ScriptArguments, mixture: DatasetMixtureConfig, *, evaluates: bool
) -> tuple[Records, Records | None]:
    """(training records, evaluation records); the latter None where nothing is evaluated.

    Raises:
      ValueError: If no data set is named, or there is none to evaluate on.
    """
    if mixture.datasets:
        if script.dataset_name is not None:
            warnings.warn("`dataset_name` is not read: `datasets` is given.", stacklevel=2)
        found = get_dataset(mixture)
        if evaluates and "test" not in found:
            raise ValueError(
                "`test_split_size` must hold rows out where `eval_strategy` is not 'no', got None."
            )
        return found["train"], found["test"] if evaluates else None
    if script.dataset_name is None:
        raise ValueError("`dataset_name` must name a data set or file, or `datasets` list some, got neither.")
    if evaluates and Path(script.dataset_name).is_file():
        raise ValueError(
            "`dataset_name` must be a data set with splits where `eval_strategy` is not 'no'; of a file, `datasets` "
            "with `test_split_size` hold rows out."
        )

    def read(split: str) -> Records:
        entry = DatasetConfig(str(script.dataset_name), name=script.dataset_config, split=split)
        return get_dataset(DatasetMixtureConfig([entry], streaming=script.dataset_streaming))["train"]

    train, evaluation = read(script.dataset_train_split), None
    if evaluates:
        evaluation = read(script.dataset_test_split)
        if isinstance(evaluation, RecordStream):  # an evaluation goes over all of them
            evaluation = list(evaluation)
    return train, evaluation


def data_names(script: ScriptArguments, mixture: DatasetMixtureConfig) -> tuple[str, ...]:
    """What the model card calls the data."""
    return tuple(entry.path for entry in mixture.datasets) or (str(script.dataset_name),)


def peft_config_of(task: str, config: Any, model: ModelConfig) -> dict[str, Any] | None:
    """The adapter that trains, if one does; `task` is what its model does where nothing else is said."""
    found = get_peft_config(model)
    if found is None:
        return None
    if model.lora_task_type == ModelConfig.lora_task_type:
        found["task_type"] = task
    # Nobody is to be told that a rate has no effect who never set one.
    if model.lora_dropout == ModelConfig.lora_dropout and vars(config).get("disable_dropout", True):
        found["lora_dropout"] = 0.0
    return found


def init_kwargs(given: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`: those that are given, and what the model's flags say beside."""
    quantization = get_quantization_config(model)
    found = dict(given)
    if model.dtype not in (None, "auto"):
        found.setdefault("dtype", model.dtype)
    if model.model_revision != "main":
        found["revision"] = model.model_revision
    if model.trust_remote_code:
        found["trust_remote_code"] = True
    if model.attn_implementation is not None:
        found["attn_implementation"] = model.attn_implementation
    if quantization is not None:
        found["load_in_4bit" if quantization == "nf4" else "load_in_8bit"] = True
    return found
