# SPDX-License-Identifier: Apache-2.0
"""`jrl ppo` with TRL's flat `PPOConfig`: a reward named by a flag takes the place of the script's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jrl.api import prepare
from jrl.cli.ending import Work, end_early, tell
from jrl.cli.finding import load_function, load_reward, names_function
from jrl.cli.flat import init_kwargs, peft_config_of
from jrl.cli.flat_help import FlatParser
from jrl.data.sources import load_prompts
from jrl.trainers.setup import reward_mesh
from jrl.trl.arguments import described
from jrl.trl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    resolve_model,
)
from jrl.trl.ppo_config import PPOConfig, native_config


@dataclass
class RolloutArguments:
    """What a script of TRL's decides in its loop.

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

    reward: str | None = described(None, "module:function, or folder or hub id of a classifier")
    reward_label: str | None = described(None, "label of a classifier; by default positive")
    reward_output: str | None = described(None, "probability or logit of that label")
    eval_prompts: str | None = described(None, "evaluation prompts, a file or data set")
    metric: str | None = described(None, "module:function, evaluation metrics")
    max_length: int = described(512, "most tokens of a prompt with its completion")
    max_new_tokens: int = described(32, "of a completion")
    temperature: float = described(1.0, "of sampling")
    top_k: int = described(0, "0 keeps all")
    top_p: float = described(1.0, "1 keeps all")
    num_shared_layers: int | None = described(None, "layers from the bottom that do not train")


class _Parser(FlatParser):
    """One in which functions are named on the command line alone: a file that is handed around must not run code."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """As in `FlatParser`.

        Raises:
          ValueError: If the file names a function.
        """
        for name in ("reward", "metric"):
            value = kwargs.get(name)
            if value is not None and (name == "metric" or names_function(str(value))):
                raise ValueError(
                    f"`{name}` must not name a function in a file, got {value!r}: it would be imported and run. Give "
                    f"it as a flag: --{name} {value}"
                )
        return super().set_defaults_with_config(**kwargs)


def flat_ppo(words: Sequence[str]) -> Work:
    """Flags, file and data are read and the model is loaded at once; training starts when the result is called.

    Args:
      words: What stands behind the command.
    Raises:
      ValueError: On a mistake in flags, file or data; as do TypeError and FileNotFoundError.
    """
    parser = _Parser("ppo", PPOConfig, "online PPO against a reward function", data_class=RolloutArguments)
    script, config, model, rollouts = parser.parse_args_and_config(words)
    for name, value in (
        ("model_name_or_path", model.model_name_or_path),
        ("dataset_name", script.dataset_name),
        ("reward", rollouts.reward),
    ):
        if value is None:
            raise ValueError(f"`{name}` must be given, got None.")
    for name in ("dataset_config", "dataset_streaming"):
        if vars(script)[name]:
            raise ValueError(f"`{name}` must be left out for prompts, got {vars(script)[name]!r}.")
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
        model.model_name_or_path,
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

    def work() -> int:
        trainer.learn()
        if trainer.interrupted:
            return end_early(trainer, f"--resume_from_checkpoint {trainer.run_dir}")
        tell(f"model and model card: {trainer.save_pretrained(native.train.checkpoint_dir)}")
        return 0

    return work
