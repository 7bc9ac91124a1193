# SPDX-License-Identifier: Apache-2.0
"""One command, from its words to its exit status."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

import jax

from jrl.cli.names import TOOLS, Name
from jrl.cli.parser import parser
from jrl.cli.plain_warnings import plain_warnings
from jrl.distributed import PeerError, end_now
from jrl.named_functions import load_module
from jrl.rollout.rewards import RewardError
from jrl.sweep import SweepError
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trainers.diffusion.images import ImageError
from jrl.trainers.loggers.safe_text import for_terminal
from jrl.trainers.loggers.trackers import MissingTrackerError
from jrl.trainers.loop.run import UnfinishedError
from jrl.trainers.plan.targets import MissingCompilerError


def run_command(words: Sequence[str]) -> int:
    """Runs a command.

    Args:
      words: `--import MODULE` as often as wanted, the command's name, and its flags.
    Returns:
      The exit status, as `jrl.cli.main` describes it.
    """
    try:
        words = _import_modules(list(words))
    except ValueError as error:
        return _fail("--import", str(error), 2)
    name = words[0] if words else ""
    try:
        with plain_warnings():
            return _run(name, words)
    except KeyboardInterrupt:
        return _fail(name, "interrupted.", 130)


def _import_modules(words: list[str]) -> list[str]:
    """Imports what `--import MODULE` names, for algorithms that it registers; the words behind."""
    while words and words[0].partition("=")[0] == "--import":
        _, equals, module = words[0].partition("=")
        words = words[1:]
        if not equals:
            module, words = next(iter(words), ""), words[1:]
        if not module:
            raise ValueError(
                "expected the name of a module, as in `jrl --import my_algorithm ...`, got nothing."
            )
        load_module(module, asked_for_as=f"--import {module}")
    return words


def _run(name: str, words: Sequence[str]) -> int:
    try:
        work = _understand(name, words)
    except (
        ValueError,
        TypeError,
        FileNotFoundError,
        CheckpointError,
        MissingTrackerError,
        MissingCompilerError,
    ) as error:
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
    for known, (_, aliases, module) in TOOLS.items():
        if name in (known, *aliases):
            top, parsers = parser()
            tool = importlib.import_module(module)
            tool.add_flags(parsers[name])
            work: Callable[[], int | None] = tool.prepare(*top.parse_known_args(words))
            return work
    return _understand_training(name, words)


def _understand_training(name: str, words: Sequence[str]) -> Callable[[], int | None]:
    """Reads flags, files, model and data of an algorithm's command."""
    # Tools do without algorithms and what loads models.
    from jrl.cli.flags import add_training_flags
    from jrl.cli.flat import flat, wants_flat
    from jrl.cli.multihost import join_job
    from jrl.cli.train import train
    from jrl.trainers.config.method import commands, entries

    if name in commands():
        words = [name, *join_job(words[1:])]
    if wants_flat(name, words[1:]):
        return flat(name, words[1:])
    known = {entry.name: Name(entry.summary, tuple(entry.variants)) for entry in entries().values()}
    top, parsers = parser(known)
    if name not in parsers:
        top.parse_args(words)  # shows help or version, or refuses the name; and ends
    add_training_flags(parsers[name], commands()[name])
    return train(*top.parse_known_args(words))
