# SPDX-License-Identifier: Apache-2.0
"""The command line: `jrl ppo|sft --config recipe.yaml --method.cliprange 0.1`, `jrl generate`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.api import prepare
from jrl.data.batching import pad_left
from jrl.data.sources import load_prompts, load_samples
from jrl.data.tokenizer import load_tokenizer, tokenize
from jrl.notebook import load_model
from jrl.trainers.checkpoint import CheckpointError
from jrl.trainers.config import TRLConfig, default_ppo_config, default_sft_config
from jrl.trainers.overrides import apply_overrides
from jrl.trainers.reward_model import OUTPUTS, Output, load_reward_model
from jrl.trainers.setup import mesh_of


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the working directory are found too.

    Raises:
      ValueError: If there is no such module or function, with what there is.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"expected `module:function`, as in `my_rewards:politeness`, got {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ValueError(f"there is no module {module_name!r} (asked for as {name!r}).") from error
    function = vars(module).get(function_name)
    if not callable(function):
        found = sorted(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise ValueError(f"{module_name!r} has no function {function_name!r}; it has {found}.")
    return function


def load_reward(
    name: str, *, label: str | None = None, output: Output | None = None, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The reward that `--reward` names: an importable `module:function`, or a classifier by its folder or hub id.

    Args:
      name: Of the reward.
      label: Of the classifier, as in `jrl.load_reward_model`.
      output: Likewise; None: its default.
      mesh: Where a classifier runs.
    Raises:
      ValueError: If there is no such function or classifier, or a function is given a label or an output.
    """
    if not Path(name).is_dir() and (":" in name or "/" not in name):
        if label is not None or output is not None:
            raise ValueError(
                f"--reward-label and --reward-output choose a score of a classifier, but --reward is {name!r}."
            )
        return load_function(name)
    return load_reward_model(name, label=label, output=output or "probability", mesh=mesh)


def add_reward_flags(command: argparse.ArgumentParser) -> None:
    """The flags that choose a score of a classifier."""
    command.add_argument(
        "--reward-label", metavar="LABEL", help="label of a classifier: its name or number; default: positive"
    )
    command.add_argument("--reward-output", choices=OUTPUTS, help="of that label; default: probability")


def parser() -> argparse.ArgumentParser:
    """The commands and the flags that are not configuration."""
    top = argparse.ArgumentParser(
        prog="jrl",
        description="Reinforcement-learning post-training of language models in JAX.",
        epilog="Every field of the configuration is a dotted flag too: --train.seed 3 --method.cliprange=0.1",
    )
    commands = top.add_subparsers(dest="command", required=True)
    ppo = commands.add_parser("ppo", help="online PPO against a reward function")
    ppo.add_argument(
        "--reward",
        required=True,
        metavar="MODULE:FUNCTION_OR_CLASSIFIER",
        help="reward function, or folder or hub id of a classifier",
    )
    add_reward_flags(ppo)
    ppo.add_argument(
        "--prompts", required=True, metavar="FILE_OR_DATASET", help="one prompt a line, record or row"
    )
    sft = commands.add_parser("sft", help="supervised fine-tuning")
    sft.add_argument(
        "--samples", required=True, metavar="FILE_OR_DATASET", help="texts, or prompt-output pairs"
    )
    for command in (ppo, sft):
        command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
        command.add_argument("--eval-prompts", metavar="FILE_OR_DATASET", help="evaluation prompts")
        command.add_argument("--metric", metavar="MODULE:FUNCTION", help="evaluation metrics")
        command.add_argument(
            "--stop", action="append", default=[], metavar="TEXT", help="stop sequence; repeatable"
        )
    generate = commands.add_parser("generate", help="complete prompts with a checkpoint")
    generate.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="checkpoint, or the adapter that a run wrote"
    )
    generate.add_argument("--prompt", action="append", required=True, help="repeatable")
    generate.add_argument("--max-new-tokens", type=int, default=40)
    generate.add_argument("--temperature", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a mistake in the flags, or in what they name, is one line on stderr and exit status 2."""
    flags, overrides = parser().parse_known_args(argv)
    try:
        work = {"ppo": ppo, "sft": sft, "generate": generate}[flags.command](flags, overrides)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
    try:
        work()
    except CheckpointError as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
    return 0


def ppo(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl ppo`: flags, files and model are read now, training starts when the result is called."""
    config = _config(flags, overrides, default_ppo_config)
    config.validate()  # before its mesh is used
    trainer = prepare(
        config=config,
        reward_fn=load_reward(
            flags.reward, label=flags.reward_label, output=flags.reward_output, mesh=mesh_of(config)
        ),
        prompts=load_prompts(flags.prompts),
        eval_prompts=load_prompts(flags.eval_prompts) if flags.eval_prompts else None,
        metric_fn=load_function(flags.metric) if flags.metric else None,
        stop_sequences=flags.stop,
    )
    return trainer.learn


def sft(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl sft`: likewise."""
    trainer = prepare(
        config=_config(flags, overrides, default_sft_config),
        samples=load_samples(flags.samples),
        eval_prompts=load_prompts(flags.eval_prompts) if flags.eval_prompts else None,
        metric_fn=load_function(flags.metric) if flags.metric else None,
        stop_sequences=flags.stop,
    )
    return trainer.learn


def _config(flags: argparse.Namespace, overrides: list[str], default: Callable[[], TRLConfig]) -> TRLConfig:
    return apply_overrides(TRLConfig.load_yaml(flags.config) if flags.config else default(), overrides)


def generate(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl generate`: prints every prompt with its completion; of a seq2seq model, what it writes."""
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    model, params = load_model(flags.model)
    tokenizer = load_tokenizer(flags.model)
    seq2seq = model.lm.decoder_start_token_id is not None
    rows = tokenize(tokenizer, flags.prompt, add_special_tokens=seq2seq)
    tokens, mask = pad_left(rows, pad_token_id=tokenizer.pad_token_id)
    if not mask.any(axis=1).all():
        raise ValueError("a --prompt has no tokens; to start a document, give the BOS or EOS text.")

    def work() -> None:
        completions = model.generate(
            params,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            jax.random.key(flags.seed),
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        ids = jax.device_get(completions).tolist()
        for prompt, output in zip(
            flags.prompt, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        ):
            print(output if seq2seq else f"{prompt}{output}")

    return work
