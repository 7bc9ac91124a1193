# SPDX-License-Identifier: Apache-2.0
"""The command line: `jrl ppo|ilql|sft|rft --config recipe.yaml --method.cliprange 0.1`, `jrl generate`, `jrl sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jrl.cli.finding import load_function, load_reward
from jrl.cli.flags import add_reward_flags, parser
from jrl.cli.sampling import generate
from jrl.cli.sweeping import sweep
from jrl.cli.training import ilql, ppo, rft, sft
from jrl.sweep import SweepError
from jrl.trainers.checkpoint import CheckpointError
from jrl.trainers.loggers_trackers import MissingTrackerError

__all__ = ["add_reward_flags", "load_function", "load_reward", "main"]

COMMANDS = {"ppo": ppo, "ilql": ilql, "sft": sft, "rft": rft, "generate": generate, "sweep": sweep}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      0; 2 where the flags, or what they name, are mistaken, with one line on stderr; 130 where it was interrupted
      before there was anything to end in order; else what the command says.
    """
    flags, overrides = parser().parse_known_args(argv)
    try:
        return _run(flags, overrides)
    except KeyboardInterrupt:
        print(f"jrl {flags.command}: interrupted.", file=sys.stderr)
        return 130


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        work = COMMANDS[flags.command](flags, overrides)
    except (ValueError, TypeError, FileNotFoundError, MissingTrackerError) as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
    try:
        return work() or 0
    except (CheckpointError, SweepError) as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
