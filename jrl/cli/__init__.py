# SPDX-License-Identifier: Apache-2.0
"""The command line: `jrl ppo|ilql|sft|rft|dpo|reward|ddpo --config recipe.yaml --method.cliprange 0.1`, and tools.

A configuration is nested, of six sections and dotted flags, or flat, of TRL's fields: the YAML file tells which.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrl.cli.bench import bench
from jrl.cli.config import show_config
from jrl.cli.environment import show_environment
from jrl.cli.flags import add_reward_flags, parser
from jrl.cli.flat import flat, wants_flat
from jrl.cli.generate import generate
from jrl.cli.multihost import join_job
from jrl.cli.plan import plan
from jrl.cli.report import show_report
from jrl.cli.sweep import sweep
from jrl.cli.train import train
from jrl.cli.view import show_view
from jrl.distributed import PeerError, end_now
from jrl.named_functions import load_function, load_module, load_reward
from jrl.rollout.rewards import RewardError
from jrl.sweep import SweepError
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trainers.config.method import commands
from jrl.trainers.diffusion.images import ImageError
from jrl.trainers.loggers.safe_text import for_terminal
from jrl.trainers.loggers.trackers import MissingTrackerError
from jrl.trainers.loop.run import UnfinishedError
from jrl.trainers.plan.targets import MissingCompilerError

__all__ = ["add_reward_flags", "load_function", "load_reward", "main"]

COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "plan": plan,
    "bench": bench,
    "config": show_config,
    "report": show_report,
    "view": show_view,
    "sweep": sweep,
    "doctor": show_environment,
    "env": show_environment,
}
"""The tools; all other commands are names of algorithms."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      0; 2 where the flags, or what they name, are mistaken, a reward function among them, with one line on stderr; 130
      where it was interrupted before there was anything to end in order; else what the command says: 1 of a training
      whose last checkpoint could not be written.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        words = _import_modules(words)
    except ValueError as error:
        return _fail("--import", str(error), 2)
    name = words[0] if words else ""
    try:
        return _run(name, words)
    except KeyboardInterrupt:
        return _fail(name, "interrupted.", 130)


def _import_modules(words: list[str]) -> list[str]:
    """Imports what `--import MODULE` names, for algorithms that it registers; the words behind."""
    while words[:1] == ["--import"]:
        if len(words) < 2:
            raise ValueError(
                "expected the name of a module, as in `jrl --import my_algorithm ...`, got nothing."
            )
        load_module(words[1], asked_for_as=f"--import {words[1]}")
        words = words[2:]
    return words


def _run(name: str, words: Sequence[str]) -> int:
    try:
        work = _understand(name, words)
    except (ValueError, TypeError, FileNotFoundError, MissingTrackerError, MissingCompilerError) as error:
        return _fail(name, str(error), 2)
    try:
        return work() or 0
    except (CheckpointError, PeerError, SweepError, UnfinishedError) as error:
        return _fail(name, str(error), 2)
    except (RewardError, ImageError) as error:
        text = " ".join([str(error), *getattr(error, "__notes__", ()), *_origin(error)])
        return _fail(name, " ".join(text.split()), 2)  # a user's exception may have several lines


def _origin(error: BaseException) -> list[str]:
    """Place where the user's own function raised, if that is behind an error."""
    frames = [] if error.__cause__ is None else traceback.extract_tb(error.__cause__.__traceback__)
    return [f"Raised at {frames[-1].filename}:{frames[-1].lineno}."] if frames else []


def _fail(name: str, reason: str, status: int) -> int:
    """Says why a command ends, and gives its status; a process of a job ends here, or it would wait for the others."""
    print(f"jrl {name}: {for_terminal(reason)}", file=sys.stderr)
    if jax.distributed.is_initialized():
        end_now(status)
    return status


def _understand(name: str, words: Sequence[str]) -> Callable[[], int | None]:
    """Reads flags and files, and gives what is to be done."""
    if name in commands():
        words = [name, *join_job(words[1:])]
    if wants_flat(name, words[1:]):
        return flat(name, words[1:])
    flags, overrides = parser().parse_known_args(words)
    return COMMANDS.get(flags.command, train)(flags, overrides)
