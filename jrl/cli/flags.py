# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands that train, as far as they are not configuration."""

from __future__ import annotations

import argparse
from functools import partial

from jrl.cli.dry_run import add_dry_run_flag
from jrl.cli.flat import BOTH
from jrl.cli.multihost import add_job_flags
from jrl.cli.parser import CommandParser
from jrl.trainers.config.described import as_flags
from jrl.trainers.config.method import Method
from jrl.trainers.loading.reward_model import OUTPUTS


def add_reward_flags(command: argparse.ArgumentParser) -> None:
    """The flags that choose a score of a classifier."""
    command.add_argument(
        "--reward-label", metavar="LABEL", help="label of a classifier: its name or number; default: positive"
    )
    command.add_argument("--reward-output", choices=OUTPUTS, help="of that label; default: probability")


_SAMPLES = {
    "rewarded": "samples with a reward each",
    "samples": "texts, prompt-output pairs or dialogues",
    "pairs": "records with a prompt, a chosen and a rejected completion",
}
"""What `--samples` names, by what an algorithm learns from."""


def add_training_flags(command: CommandParser, entry: Method) -> None:
    """The flags of an algorithm's command, of which those of a flat configuration are another parser's."""
    if entry.name in BOTH and entry.data != "prompts":
        command.end_help_with(
            "With a flat YAML file, or --dataset_name, this command takes TRL's fields: add --help to see them."
        )
    command.show_fields(partial(_fields_of, entry))
    if entry.data == "drawn":
        _add_image_flags(command)
        return
    if entry.data == "prompts":
        command.add_argument(
            "--reward",
            action="append",
            required=True,
            metavar="MODULE:FUNCTION_OR_CLASSIFIER",
            help="reward function, or folder or hub id of a classifier; repeatable: their weighted sum",
        )
        add_reward_flags(command)
        command.add_argument(
            "--prompts", required=True, metavar="FILE_OR_DATASET", help="one prompt a line, record or row"
        )
    else:
        command.add_argument("--samples", required=True, metavar="FILE_OR_DATASET", help=_SAMPLES[entry.data])
    command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
    command.add_argument("--eval-prompts", metavar="FILE_OR_DATASET", help="evaluation prompts")
    command.add_argument("--metric", metavar="MODULE:FUNCTION", help="evaluation metrics")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop sequence; repeatable"
    )
    add_dry_run_flag(command)
    add_job_flags(command)


def _add_image_flags(command: CommandParser) -> None:
    """The flags of an algorithm whose images a JAX function judges; its evaluations are fields of its section."""
    command.add_argument(
        "--reward",
        required=True,
        metavar="REWARD",
        help="module:function, a JAX function of images (B, height, width, 3) in [0, 1] or a DifferentiableReward; or "
        "aesthetic:FILE.safetensors, or clip:./FOLDER",
    )
    command.add_argument(
        "--prompts", required=True, metavar="FILE_OR_DATASET", help="one prompt a line, record or row"
    )
    command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
    add_job_flags(command)
    add_dry_run_flag(command)


def _fields_of(entry: Method) -> str:
    """End of the help: the fields of the algorithm's default configuration."""
    return (
        f"\nfields of the configuration, with their defaults (`jrl config {entry.name}` has the whole text):\n"
        f"{as_flags(entry.default())}\n"
    )
