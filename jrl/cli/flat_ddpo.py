# SPDX-License-Identifier: Apache-2.0
"""`jrl ddpo`: TRL's fields of DDPO from a YAML file and flags; prompts and the reward are named beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jrl import image_rewards
from jrl.cli.ending import Work, end_early, tell
from jrl.cli.finding import load_function
from jrl.cli.flat_help import FlatParser
from jrl.data.sources import load_prompts
from jrl.trainers.ddpo_prompts import PromptFunction, PromptList
from jrl.trl.arguments import described
from jrl.trl.ddpo import DDPOTrainer
from jrl.trl.ddpo_config import DDPOConfig
from jrl.trl.ddpo_pipeline import DefaultDDPOStableDiffusionPipeline

REWARDS: Mapping[str, Callable[..., Any]] = {
    "brightness": image_rewards.brightness,
    "jpeg_compressibility": image_rewards.jpeg_compressibility,
    "jpeg_incompressibility": image_rewards.jpeg_incompressibility,
}
"""Rewards that a file may name; every other one is code, and named by a flag."""
_FUNCTIONS = ("reward", "prompts", "image_samples_hook")


@dataclass
class DiffusionArguments:
    """What a script of TRL's decides beside its configuration.

    Attributes:
      pretrained_model: Folder in the layout of diffusers, or name on the hub.
      pretrained_revision: Of the hub.
      use_lora: Whether an adapter trains; else the whole UNet does.
      reward: A name of `REWARDS`, or `module:function`.
      prompts: A file with one prompt a line, or records with `prompt`; or `module:function`.
      image_samples_hook: `module:function`, called once an epoch with all images.
      epochs: In the place of `num_epochs`.
    """

    pretrained_model: str | None = described(None, "folder of a diffusers model, or its name on the hub")
    pretrained_revision: str = described("main", "of the hub")
    use_lora: bool = described(True, "whether an adapter trains; else the whole UNet does")
    reward: str | None = described(
        None, f"{', '.join(REWARDS)}, or module:function (images, prompts, metadata) -> (rewards, metadata)"
    )
    prompts: str | None = described(
        None, "file with one prompt a line, or module:function () -> (prompt, metadata)"
    )
    image_samples_hook: str | None = described(None, "module:function (images, global_step, tracker)")
    epochs: int | None = described(None, "in the place of num_epochs")


class _Parser(FlatParser):
    """One in which functions are named on the command line alone: a file that is handed around must not run code."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """As in `FlatParser`.

        Raises:
          ValueError: If the file names a function.
        """
        for name in _FUNCTIONS:
            value = kwargs.get(name)
            if value is not None and _is_code(name, str(value)):
                raise ValueError(
                    f"`{name}` must not name a function in a file, got {value!r}: it would be imported and run. Give "
                    f"it as a flag: --{name} {value}"
                )
        return super().set_defaults_with_config(**kwargs)


def _is_code(name: str, value: str) -> bool:
    """Whether a value is the name of a function that would be imported."""
    if name == "reward":
        return value not in REWARDS
    return name == "image_samples_hook" or _names_function(value)


def _names_function(value: str) -> bool:
    """Whether it reads `module:function`, as no file does that is meant."""
    module, colon, function = value.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function))


def make_parser() -> FlatParser:
    """Of `DiffusionArguments` and `DDPOConfig`."""
    return _Parser(
        "ddpo",
        DDPOConfig,
        "reinforcement learning of a diffusion model against a reward on its images",
        script_class=DiffusionArguments,
    )


def flat_ddpo(words: Sequence[str]) -> Work:
    """Flags and file are read and the model is loaded at once; training starts when the result is called.

    Args:
      words: What stands behind the command.
    Raises:
      ValueError: On a mistake in flags or file; as do TypeError and FileNotFoundError.
    """
    script, config = make_parser().parse_args_and_config(words)
    for name in ("pretrained_model", "reward", "prompts"):
        if vars(script)[name] is None:
            raise ValueError(f"`{name}` must be given, got None.")
    if script.epochs is not None:
        config.num_epochs = script.epochs
    reward = REWARDS.get(script.reward) or load_function(script.reward)
    prompt_function = _prompt_function(script.prompts)
    hook = None if script.image_samples_hook is None else load_function(script.image_samples_hook)
    pipeline = DefaultDDPOStableDiffusionPipeline(
        script.pretrained_model,
        pretrained_model_revision=script.pretrained_revision,
        use_lora=script.use_lora,
    )
    trainer = DDPOTrainer(config, reward, prompt_function, pipeline, hook)
    trainer.native.dataset_names = (script.prompts,)

    def work() -> int:
        trainer.train()
        if trainer.native.interrupted:
            return end_early(trainer.native, f"--resume_from {trainer.native.run_dir}")
        tell(f"model and model card: {trainer.native.save_pretrained()}")
        return 0

    return work


def _prompt_function(name: str) -> PromptFunction:
    """A function by its name, or one that draws from a file's prompts."""
    if _names_function(name):
        return load_function(name)
    return PromptList(load_prompts(name))
