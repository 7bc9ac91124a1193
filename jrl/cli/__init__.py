# SPDX-License-Identifier: Apache-2.0
"""The command line: `jrl ppo|ilql|sft|rft --config recipe.yaml --method.cliprange 0.1`, `jrl generate`, `jrl sweep`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jrl.cli.finding import load_function, load_reward
from jrl.cli.flags import add_reward_flags, parser
from jrl.cli.sampling import generate
from jrl.cli.sweeping import sweep
from jrl.cli.training import ilql, ppo, rft, sft
from jrl.sweep import SweepError
from jrl.trainers.checkpoint import CheckpointError

__all__ = ["add_reward_flags", "load_function", "load_reward", "main"]

COMMANDS = {"ppo": ppo, "ilql": ilql, "sft": sft, "rft": rft, "generate": generate, "sweep": sweep}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a mistake in the flags, or in what they name, is one line on stderr and exit status 2."""
    flags, overrides = parser().parse_known_args(argv)
    try:
        work = COMMANDS[flags.command](flags, overrides)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
    try:
        return work() or 0
    except (CheckpointError, SweepError) as error:
        print(f"jrl {flags.command}: {error}", file=sys.stderr)
        return 2
