# SPDX-License-Identifier: Apache-2.0
"""`jrl sft|dpo|reward|ppo|ddpo` with a flat configuration: TRL's fields from a YAML file and flags."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jrl import image_rewards
from jrl.api import prepare
from jrl.data.sources import RecordStream, load_prompts
from jrl.named_functions import (
    load_function,
    load_image_reward,
    load_reward,
    names_function,
    names_image_model,
)
from jrl.trainers.base import Trainer
from jrl.trainers.config import TRLConfig
from jrl.trainers.diffusion import PromptFunction, PromptList
from jrl.trainers.loading import reward_mesh
from jrl.trl.arguments import FlatArguments
from jrl.trl.command_help import FlatParser
from jrl.trl.configs import DPOConfig, RewardConfig, SFTConfig
from jrl.trl.ddpo import DDPOTrainer
from jrl.trl.ddpo_config import DDPOConfig
from jrl.trl.ddpo_native import native_config as ddpo_native_config
from jrl.trl.ddpo_pipeline import DefaultDDPOStableDiffusionPipeline
from jrl.trl.dpo import DPOTrainer
from jrl.trl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    resolve_model,
)
from jrl.trl.ppo_config import PPOConfig, native_config
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

__all__ = ["ddpo_parser"]

Records = Sequence[Any] | RecordStream


class Prepared(NamedTuple):
    """A command whose flags, file and data are read and whose model is loaded.

    Attributes:
      native: jrl's own trainer.
      train: Trains.
      save: Writes the model and its card; returns the folder.
    """

    native: Trainer
    train: Callable[[], Any]
    save: Callable[[], Any]


def prepare_command(name: str, words: Sequence[str]) -> Prepared:
    """Reads flags, file and data, and loads the model.

    Args:
      name: Of the command.
      words: What stands behind it.
    Raises:
      ValueError: On a mistake in flags, file or data; as do TypeError and FileNotFoundError.
    """
    if name == "ddpo":
        return _ddpo(words)
    return _ppo(words) if name == "ppo" else _offline(COMMANDS[name], name, words)


# Reward models, preferences, demonstrations.


class Command(NamedTuple):
    """Definition of a command.

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


def _offline(command: Command, name: str, words: Sequence[str]) -> Prepared:
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

    def save() -> Any:
        trainer.save_model()
        return config.output_dir

    return Prepared(trainer.native, trainer.train, save)


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
    """Names of the data on the model card."""
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


# PPO, with a reward in the place of the script's own loop.


@dataclass
class RolloutArguments:
    """Choices that a script of TRL's makes in its PPO loop.

    Attributes:
      reward: `module:function`, or folder or hub id of a classifier.
      reward_label: Label of a classifier.
      reward_output: "probability" or "logit" of that label.
      eval_prompts: Evaluation prompts, a file or data set.
      metric: `module:function`, evaluation metrics.
      max_length: Most tokens of a prompt with its completion.
      max_new_tokens: Of a completion.
      temperature: Of sampling.
      top_k: 0 keeps all.
      top_p: 1 keeps all.
      num_shared_layers: Layers from the bottom that do not train.
    """

    reward: str | None = None
    reward_label: str | None = None
    reward_output: str | None = None
    eval_prompts: str | None = None
    metric: str | None = None
    max_length: int = 512
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    num_shared_layers: int | None = None


def ppo_parser() -> FlatParser:
    """Parser of `RolloutArguments` and `PPOConfig`, beside data and model."""
    return FlatParser(
        "ppo",
        PPOConfig,
        "online PPO against a reward function",
        data_class=RolloutArguments,
        functions={"reward": names_function, "metric": lambda _: True},
    )


def _ppo(words: Sequence[str]) -> Prepared:
    script, config, model, rollouts = ppo_parser().parse_args_and_config(words)
    for name, value in (
        ("model_name_or_path", model.model_name_or_path),
        ("dataset_name", script.dataset_name),
        ("reward", rollouts.reward),
    ):
        if value is None:
            raise ValueError(f"`{name}` must be given, got None.")
    for name, given in (
        ("dataset_config", script.dataset_config),
        ("dataset_streaming", script.dataset_streaming),
    ):
        if given:
            raise ValueError(f"`{name}` must be left out for prompts, got {given!r}.")
    source = script.dataset_name
    prompts = load_prompts(source if Path(source).is_file() else f"{source}:{script.dataset_train_split}")
    seq2seq = resolve_model(model.model_name_or_path).is_encoder_decoder
    kind = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
    handle = kind.from_pretrained(
        model.model_name_or_path,
        peft_config=peft_config_of("SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM", config, model),
        **init_kwargs({}, model),
    )
    sampling = {"max_new_tokens": rollouts.max_new_tokens, "temperature": rollouts.temperature}
    native = native_config(
        config,
        handle,
        None,
        num_shared_layers=rollouts.num_shared_layers,
        run_dir=config.output_dir or "trainer_output",
    ).evolve(
        method={"gen_kwargs": {**sampling, "top_k": rollouts.top_k, "top_p": rollouts.top_p}},
        train={"seq_length": rollouts.max_length},
    )
    reward = load_reward(
        rollouts.reward, label=rollouts.reward_label, output=rollouts.reward_output, mesh=reward_mesh(native)
    )
    trainer = prepare(
        config=native,
        reward_fn=reward,
        prompts=prompts,
        eval_prompts=load_prompts(rollouts.eval_prompts) if rollouts.eval_prompts else None,
        metric_fn=load_function(rollouts.metric) if rollouts.metric else None,
    )
    trainer.dataset_names = (source,)
    trainer.resume_argument = "resume_from_checkpoint"

    return Prepared(trainer, trainer.learn, lambda: trainer.save_pretrained(native.train.checkpoint_dir))


# Diffusion models.


@dataclass
class DiffusionArguments:
    """Choices that a script of TRL's makes beside its DDPO configuration.

    Attributes:
      pretrained_model: Folder in the layout of diffusers, or name on the hub.
      pretrained_revision: Of the hub.
      use_lora: Whether an adapter trains; else the whole UNet does.
      reward: brightness, jpeg_compressibility or jpeg_incompressibility; aesthetic:FILE.safetensors or clip:./FOLDER;
        or `module:function`, which takes (images, prompts, metadata) and returns (rewards, metadata).
      prompts: A file with one prompt a line, or records with `prompt`; or `module:function`.
      image_samples_hook: `module:function`, called once an epoch with (images, global_step, tracker).
      epochs: In the place of `num_epochs`.
    """

    pretrained_model: str | None = None
    pretrained_revision: str = "main"
    use_lora: bool = True
    reward: str | None = None
    prompts: str | None = None
    image_samples_hook: str | None = None
    epochs: int | None = None


def ddpo_parser() -> FlatParser:
    """Parser of `DiffusionArguments` and `DDPOConfig`."""
    return FlatParser(
        "ddpo",
        DDPOConfig,
        "reinforcement learning of a diffusion model against a reward on its images",
        script_class=DiffusionArguments,
        functions={
            "reward": lambda value: value not in image_rewards.BY_NAME and not names_image_model(value),
            "prompts": _names_function,
            "image_samples_hook": lambda _: True,
        },
    )


def _ddpo(words: Sequence[str]) -> Prepared:
    script, config = ddpo_parser().parse_args_and_config(words)
    for name, given in (
        ("pretrained_model", script.pretrained_model),
        ("reward", script.reward),
        ("prompts", script.prompts),
    ):
        if given is None:
            raise ValueError(f"`{name}` must be given, got None.")
    if script.epochs is not None:
        config.num_epochs = script.epochs
    reward = load_image_reward(script.reward)
    prompt_function = _prompt_function(script.prompts)
    hook = None if script.image_samples_hook is None else load_function(script.image_samples_hook)
    pipeline = DefaultDDPOStableDiffusionPipeline(
        script.pretrained_model,
        pretrained_model_revision=script.pretrained_revision,
        use_lora=script.use_lora,
    )
    trainer = DDPOTrainer(config, reward, prompt_function, pipeline, hook)
    trainer.native.dataset_names = (script.prompts,)

    native = trainer.native
    return Prepared(native, trainer.train, native.save_pretrained)


def planned_ddpo(path: str, row_devices: int) -> TRLConfig:
    """A flat recipe of DDPO as the six sections of its run, for `jrl plan`.

    Args:
      path: Of the recipe.
      row_devices: Devices that share the rows; they need not be here. TRL's sizes are of one device.
    Raises:
      ValueError: If a field is mistaken; as does TypeError.
    """
    script, config = ddpo_parser().parse_args_and_config(["--config", path])
    if script.pretrained_model is None:
        raise ValueError("`pretrained_model` must be given, got None.")
    return ddpo_native_config(
        config, model=script.pretrained_model, use_lora=script.use_lora, row_devices=row_devices
    )


def _prompt_function(name: str) -> PromptFunction:
    """A function by its name, or one that draws from a file's prompts."""
    if _names_function(name):
        return load_function(name)
    return PromptList(load_prompts(name))


def _names_function(value: str) -> bool:
    """True where a value reads `module:function`, which no file's name that is meant does."""
    module, colon, function = value.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function))
