# SPDX-License-Identifier: Apache-2.0
"""The commands and the flags that are not configuration."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from jrl.cli.bench import WHAT, add_bench_flags
from jrl.cli.config import add_config_flags
from jrl.cli.dry_run import add_dry_run_flag
from jrl.cli.flat import BOTH
from jrl.cli.multihost import add_job_flags
from jrl.cli.plan import add_plan_flags
from jrl.cli.report import add_report_flags
from jrl.cli.view import add_view_flags
from jrl.suggestions import did_you_mean
from jrl.trainers.config.described import as_flags
from jrl.trainers.config.method import Method, entries
from jrl.trainers.loading.reward_model import OUTPUTS
from jrl.version import __version__


def add_reward_flags(command: argparse.ArgumentParser) -> None:
    """The flags that choose a score of a classifier."""
    command.add_argument(
        "--reward-label", metavar="LABEL", help="label of a classifier: its name or number; default: positive"
    )
    command.add_argument("--reward-output", choices=OUTPUTS, help="of that label; default: probability")


_NEEDED = {
    "--reward": ": a function as `module:function`, or the folder of a classifier; got none. Example: "
    "`--reward my_rewards:score`",
    "--prompts": ": a file or data set; got none. Example: `--prompts prompts.txt`",
    "--samples": ": a file or data set; got none. Example: `--samples samples.jsonl`",
    "--model": ": a folder; got none. Example: `--model ckpts`",
    "--prompt": ': a text; got none. Example: `--prompt "The film was"`',
}
"""What required flags take, for errors."""


class _CommandParser(argparse.ArgumentParser):
    """A command; the help of one that trains ends with the fields of its algorithm's configuration."""

    _entry: Method | None = None

    def show_fields_of(self, entry: Method) -> None:
        """Says whose fields the help lists."""
        self._entry = entry

    def error(self, message: str) -> NoReturn:
        """Ends with one line, as every mistake does, and the closest name where one is misspelled."""
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            names = re.findall(r"[\w-]+", found[2])
            message = f"{message}.{did_you_mean(found[1], names)}"
        lacking = re.search(r"arguments are required: (.*)", message)
        if lacking:
            needed = [f"`{name}`{_NEEDED.get(name, '; got none')}" for name in lacking[1].split(", ")]
            message = f"needs {', and '.join(needed)}"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} `{self.prog} --help` says more.\n")

    def format_help(self) -> str:
        """Help on the flags, and on the fields, of which the default configuration is made only here."""
        found = super().format_help()
        if self._entry is None:
            return found
        return (
            f"{found}\nfields of the configuration, with their defaults (`jrl config {self._entry.name}` has the whole "
            f"text):\n{as_flags(self._entry.default())}\n"
        )


def parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    top = _CommandParser(
        prog="jrl",
        description="Reinforcement-learning post-training of language models in JAX.",
        epilog="Every field of the configuration is a flag: --train.seed 3 --method.cliprange=0.1; flat: --beta 0.1",
    )
    top.add_argument("--version", action="version", version=f"jrl {__version__}")
    top.add_argument(
        "--import",
        metavar="MODULE",
        action="append",
        dest="imported",
        help="first of all: import a module, which registers an algorithm of your own",
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=_CommandParser)
    for entry in entries().values():
        _add_training(commands, entry)
    _add_generate(commands.add_parser("generate", help="complete prompts with a checkpoint"))
    _add_bench(commands.add_parser("bench", help="how fast a model samples and learns on this machine"))
    add_plan_flags(commands.add_parser("plan", help="memory and traffic of a recipe on devices not yet here"))
    add_config_flags(
        commands.add_parser("config", help="an algorithm's recipe, each field under what it means")
    )
    commands.add_parser(
        "doctor",
        aliases=["env"],
        help="versions, devices, memory, disk, caches and common traps, each with a verdict",
        epilog="Exits with status 1 where a check says `wrong`.",
    )
    add_report_flags(commands.add_parser("report", help="a run, or several, as one HTML page"))
    add_view_flags(commands.add_parser("view", help="the report of runs at work, live in a browser"))
    _add_sweep(commands.add_parser("sweep", help="search hyperparameters of a script with Ray Tune"))
    return top


_SAMPLES = {
    "rewarded": "samples with a reward each",
    "samples": "texts, prompt-output pairs or dialogues",
    "pairs": "records with a prompt, a chosen and a rejected completion",
}
"""What `--samples` names, by what an algorithm learns from."""


def _add_training(commands: Any, entry: Method) -> None:
    """The command of an algorithm."""
    if entry.data == "images":  # its flags are all of the flat kind
        commands.add_parser(entry.name, help=entry.summary)
        return
    flat = entry.name in BOTH and entry.data != "prompts"
    command = commands.add_parser(
        entry.name,
        aliases=list(entry.variants),
        help=entry.summary,
        epilog="With a flat YAML file, or --dataset_name, this command takes TRL's fields: add --help to see them."
        if flat
        else None,
    )
    command.show_fields_of(entry)
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
    _add_training_flags(command)


def _add_training_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="YAML", help="recipe; default: the method's default config")
    command.add_argument("--eval-prompts", metavar="FILE_OR_DATASET", help="evaluation prompts")
    command.add_argument("--metric", metavar="MODULE:FUNCTION", help="evaluation metrics")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop sequence; repeatable"
    )
    add_dry_run_flag(command)
    add_job_flags(command)


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="model, adapter, checkpoint or run"
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
