# SPDX-License-Identifier: Apache-2.0
"""Parser of the command line: every command by its name, to which the one that is named adds its flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from jrl.cli.names import ALGORITHMS, TOOLS, Name
from jrl.suggestions import did_you_mean
from jrl.version import __version__

_NEEDED = {
    "--reward": ": a function as `module:function`, or the folder of a classifier; got none. Example: "
    "`--reward my_rewards:score`",
    "--prompts": ": a file or data set; got none. Example: `--prompts prompts.txt`",
    "--samples": ": a file or data set; got none. Example: `--samples samples.jsonl`",
    "--model": ": a folder; got none. Example: `--model ckpts`",
    "--prompt": ': a text; got none. Example: `--prompt "The film was"`',
}
"""What required flags take, for errors."""


class CommandParser(argparse.ArgumentParser):
    """A command; the help of one that trains ends with the fields of its algorithm's configuration."""

    _fields: Callable[[], str] | None = None

    def end_help_with(self, epilog: str) -> None:
        """Sets the text below the flags."""
        self.epilog = epilog

    def show_fields(self, fields: Callable[[], str]) -> None:
        """Sets what makes the list of fields, which is called for the help alone."""
        self._fields = fields

    def error(self, message: str) -> NoReturn:
        """Ends with one line, as every mistake does, and the closest name where one is misspelled."""
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            # Newer releases of Python quote no choice: one message, whichever it is.
            names = [name.strip("'") for name in found[2].split(", ")]
            message = f"{message[: found.start(2)]}{', '.join(names)}).{did_you_mean(found[1], names)}"
        lacking = re.search(r"arguments are required: (.*)", message)
        if lacking:
            needed = [f"`{name}`{_NEEDED.get(name, '; got none')}" for name in lacking[1].split(", ")]
            message = f"needs {', and '.join(needed)}"
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(2, f"{self.prog}: {message}{end} `{self.prog} --help` says more.\n")

    def format_help(self) -> str:
        """Help on the flags, and on the fields."""
        return super().format_help() + ("" if self._fields is None else self._fields())


def parser(algorithms: Mapping[str, Name] = ALGORITHMS) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Parser of all commands, none of which has flags yet, and the commands by name and alias.

    Args:
      algorithms: By name: jrl's own, or those and the user's.
    """
    top = CommandParser(
        prog="jrl",
        description="Reinforcement-learning post-training of language models in JAX.",
        epilog="Every field of the configuration is a flag: --train.seed 3 --method.cliprange=0.1; flat: --beta 0.1",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"jrl {__version__}")
    top.add_argument(
        "--import",
        metavar="MODULE",
        action="append",
        dest="imported",
        help="first of all: import a module, which registers an algorithm of your own",
    )
    commands = top.add_subparsers(
        title="commands", metavar="command", dest="command", required=True, parser_class=CommandParser
    )
    for name, found in {**algorithms, **TOOLS}.items():
        commands.add_parser(name, aliases=list(found.aliases), help=found.summary)
    return top, commands.choices
