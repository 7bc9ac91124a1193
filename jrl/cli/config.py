# SPDX-License-Identifier: Apache-2.0
"""`jrl config`: an algorithm's configuration as a recipe, each field under what it means."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jrl.cli.train import configuration, given_fields
from jrl.suggestions import did_you_mean
from jrl.trainers.config.described import as_yaml
from jrl.trainers.config.method import commands
from jrl.trainers.loading.learning_rate import with_choices_for_model


def add_flags(command: argparse.ArgumentParser) -> None:
    """Flags of `jrl config`."""
    command.add_argument("algorithm", help="name of its command, such as ppo")
    command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
    command.add_argument(
        "--section", action="append", default=[], metavar="NAME", help="this section alone; repeatable"
    )


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl config ppo --method.cliprange 0.1`: prints a recipe that `--config` reads.

    Raises:
      ValueError: If there is no such algorithm, or it has flat fields alone.
    """
    known = [name for name, entry in commands().items() if entry.data != "images"]
    if flags.algorithm not in known:
        hint = (
            " The fields of `jrl ddpo` are flat: `jrl ddpo --help` lists them."
            if flags.algorithm in commands()
            else did_you_mean(flags.algorithm, known)
        )
        raise ValueError(f"the algorithm must be one of {known}, got {flags.algorithm!r}.{hint}")
    config = configuration(flags.algorithm, flags.config, overrides)
    # As the command would: a recipe that is read back chooses no more. Nothing is downloaded for it.
    if Path(str(config.model.model_path)).is_dir():
        config, said = with_choices_for_model(config, given_fields(flags.config, overrides))
        if said:
            print(f"jrl config: {said}.", file=sys.stderr)
    config.validate()
    text = as_yaml(config, flags.section)
    return lambda: print(text, end="")
