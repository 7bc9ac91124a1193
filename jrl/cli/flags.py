# SPDX-License-Identifier: Apache-2.0
"""The commands and the flags that are not configuration."""

from __future__ import annotations

import argparse

from jrl.cli.benching import WHAT, add_bench_flags
from jrl.cli.joining import add_job_flags
from jrl.cli.planning import add_plan_flags
from jrl.trainers.reward_model import OUTPUTS


def add_reward_flags(command: argparse.ArgumentParser) -> None:
    """The flags that choose a score of a classifier."""
    command.add_argument(
        "--reward-label", metavar="LABEL", help="label of a classifier: its name or number; default: positive"
    )
    command.add_argument("--reward-output", choices=OUTPUTS, help="of that label; default: probability")


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(
        prog="jrl",
        description="Reinforcement-learning post-training of language models in JAX.",
        epilog="Every field of the configuration is a flag: --train.seed 3 --method.cliprange=0.1; flat: --beta 0.1",
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, what in {
        "ppo": "online PPO against a reward function",
        "rft": "rejection fine-tuning: trains on those of its own samples that score best",
    }.items():
        online = commands.add_parser(name, help=what)
        online.add_argument(
            "--reward",
            required=True,
            metavar="MODULE:FUNCTION_OR_CLASSIFIER",
            help="reward function, or folder or hub id of a classifier",
        )
        add_reward_flags(online)
        online.add_argument(
            "--prompts", required=True, metavar="FILE_OR_DATASET", help="one prompt a line, record or row"
        )
        _add_training_flags(online)
    pairs = "records with a prompt, a chosen and a rejected completion"
    flat = (
        "With a flat YAML file, or --dataset_name, this command takes TRL's fields: add --help to see them."
    )
    for name, what, samples, epilog in (
        (
            "ilql",
            "offline reinforcement learning from samples with a reward each",
            "samples with a reward each",
            None,
        ),
        ("sft", "supervised fine-tuning", "texts, prompt-output pairs or dialogues", flat),
        ("dpo", "direct preference optimisation; --help lists TRL's flat fields", pairs, flat),
        ("reward", "a reward model from preferences; --help lists TRL's flat fields", pairs, flat),
    ):
        offline = commands.add_parser(name, help=what, epilog=epilog)
        offline.add_argument("--samples", required=True, metavar="FILE_OR_DATASET", help=samples)
        _add_training_flags(offline)
    commands.add_parser("ddpo", help="reinforcement learning of a diffusion model; --help lists its fields")
    _add_generate(commands.add_parser("generate", help="complete prompts with a checkpoint"))
    _add_bench(commands.add_parser("bench", help="how fast a model samples and learns on this machine"))
    add_plan_flags(commands.add_parser("plan", help="memory and traffic of a recipe on devices not yet here"))
    commands.add_parser("env", help="versions and devices, for a bug report")
    _add_sweep(commands.add_parser("sweep", help="search hyperparameters of a script with Ray Tune"))
    return top


def _add_training_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
    command.add_argument("--eval-prompts", metavar="FILE_OR_DATASET", help="evaluation prompts")
    command.add_argument("--metric", metavar="MODULE:FUNCTION", help="evaluation metrics")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop sequence; repeatable"
    )
    add_job_flags(command)


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="checkpoint, or the adapter that a run wrote"
    )
    command.add_argument("--prompt", action="append", required=True, help="repeatable")
    command.add_argument("--max-new-tokens", type=int, default=40)
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument(
        "--beta", type=float, help="weight of Q − V in the logits, of a checkpoint that `jrl ilql` wrote"
    )
    command.add_argument("--seed", type=int, default=0)


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY_OR_PRESET", help="checkpoint, or a name of known shapes"
    )
    command.add_argument(
        "--what",
        default="decode,score,update",
        metavar="NAMES",
        help=f"of {','.join(WHAT)}; default: %(default)s",
    )
    add_bench_flags(command)


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", help="Python file with `main(hparams)`, which calls `jrl.train`")
    command.add_argument("--config", required=True, metavar="YAML", help="`tune_config` and the search space")
    command.add_argument(
        "--output-dir", metavar="DIRECTORY", help="default: runs/sweep_<script>/<time>; trials and results"
    )
    # trlX's spellings beside those of the other commands.
    command.add_argument(
        *("--num-gpus", "--num_gpus"),
        type=float,
        metavar="N",
        help="of each trial; default: 1 where there are any",
    )
    command.add_argument(
        *("--num-cpus", "--num_cpus"),
        type=float,
        metavar="N",
        help="of each trial; default: its share of all, so without GPUs one trial after another",
    )
    command.add_argument(
        *("--server-address", "--server_address"),
        metavar="ADDRESS",
        help="of a Ray cluster; default: this machine",
    )
    command.add_argument("-y", action="store_true", help="no question is ever asked; trlX's flag, accepted")
