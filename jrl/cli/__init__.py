# SPDX-License-Identifier: Apache-2.0
"""The command line: `jrl ppo|ilql|sft|rft|dpo|reward|ddpo --config recipe.yaml --method.cliprange 0.1`, and tools.

A configuration is nested, of six sections and dotted flags, or flat, of TRL's fields: the YAML file tells which. The
list of commands needs neither JAX nor any command: these are imported once one is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jrl.cli.parser import parser

if TYPE_CHECKING:
    from jrl.cli.flags import add_reward_flags
    from jrl.named_functions import load_function, load_reward

__all__ = ["add_reward_flags", "load_function", "load_reward", "main"]


def __getattr__(name: str) -> Any:
    """A name that scripts of the user's own take for their command lines."""
    if name == "add_reward_flags":
        from jrl.cli.flags import add_reward_flags

        return add_reward_flags
    if name in __all__:
        from jrl import named_functions

        return getattr(named_functions, name)
    raise AttributeError(f"module 'jrl.cli' has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      0; 2 where the flags, or what they name, are mistaken, a reward function among them, with one line on stderr; 130
      where it was interrupted before there was anything to end in order; else what the command says: 1 of a training
      whose last checkpoint could not be written.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    first = words[0] if words else ""
    names_a_command = first and not first.startswith("-")
    may_be_extended = first.partition("=")[0] == "--import" or "jrl.trainers.config.method" in sys.modules
    if not names_a_command and not may_be_extended:
        parser()[0].parse_args(words)  # shows help or version, or says that a command is lacking; and ends
    from jrl.cli.run import run_command  # with JAX, and all of what is named

    return run_command(words)
