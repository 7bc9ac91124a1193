# SPDX-License-Identifier: Apache-2.0
"""Commands in the pages: each is read by its own parser, in this process, and stops before it loads a model."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import jrl
import jrl.cli.run
from jrl.cli.flags import add_training_flags
from jrl.cli.flat import wants_flat
from jrl.cli.multihost import add_job_flags
from jrl.cli.names import TOOLS
from jrl.cli.parser import parser
from jrl.cli.train import configuration
from jrl.trainers.config import method
from jrl.trainers.config.method import commands
from jrl.trl import commands as flat_commands
from jrl.trl.command_help import FlatParser
from tests.test_pages import FENCE, PAGES, ROOT, read

OTHERS = {"export", "gcloud", "hf", "mkdocs", "mpirun", "pygount", "sh", "srun"}
"""Programs that are not of this project; a command of ours that they start is read all the same."""
SHELL = ("bash", "sh", "console", "")
OWN_FILES = ("ppo.yaml", "recipe.yaml", "run.yaml")
"""What a page calls the recipe of its reader."""
SLOW = "benchmarks/policy_gradients.py"
"""Imports Reasoning Gym: 5 to 9 s on two cores with other work."""
ASSIGNMENT = re.compile(r"[A-Z][A-Z_]*=")


class Parsed(BaseException):
    """A script has read its words."""


def simple_commands(block: str) -> Iterator[list[str]]:
    """Commands of a block, each as its words: lines are joined, comments, variables and `&&` taken away.

    Example:
      >>> list(simple_commands("A=1 jrl ppo \\\\\n  --x 'a b'  # why\ncd x && ls"))
      [['jrl', 'ppo', '--x', 'a b'], ['cd', 'x'], ['ls']]
    """
    for line in re.sub(r"\\\n", " ", block).splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", "|"):
                if words:
                    yield words[: words.index(">")] if ">" in words else words
                words = []
            elif words or not ASSIGNMENT.match(word):
                words.append(word)


def inner(words: Sequence[str]) -> Iterator[list[str]]:
    """Commands of jrl that another program starts: behind it, or in one of its words."""
    if "jrl" in words[:-1]:
        yield list(words[words.index("jrl") :])
        return
    for word in words:
        if " jrl " in f" {word}":
            yield from simple_commands(word.partition("=")[2] if word.startswith("--") else word)


def shell_blocks(page: str) -> list[str]:
    """Blocks of a shell, and the lines of blocks without a language that begin like a command of ours."""
    found = []
    for language, code in FENCE.findall(read(page)):
        if language not in SHELL:
            continue
        lines = code if language else "\n".join(re.findall(r"^(?:jrl|python) .*$", code, re.MULTILINE))
        if lines.strip():
            found.append(lines)
    return found


def page_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command."""
    return [
        (page, words) for page in PAGES for block in shell_blocks(page) for words in simple_commands(block)
    ]


def check(words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Reads one command as its program would.

    Raises:
      AssertionError: If it names a program or a file that there is not.
      SystemExit: If its parser refuses it; as does ValueError.
    """
    program, rest = Path(words[0]).name, list(words[1:])
    if program == "jrl":
        check_jrl([word for word in rest if word != "..."])
    elif program in ("python", "python3"):
        check_python(rest, patch)
    elif program == "pytest":
        for word in rest:
            assert "/" not in word or (ROOT / word.partition("::")[0]).exists(), word
    elif program == "pip":
        check_pip(rest)
    else:
        assert program in OTHERS, f"{program!r} is no command that is known; got {' '.join(words)}"
        for found in inner(words):
            check(found, patch)


def check_jrl(words: list[str]) -> None:
    """Flags, recipe and fields of a command, without its data and its model."""
    name = words[0]
    if name in TOOLS or name == "env":
        # The flags alone: what a tool prepares asks for compilers and extras.
        top, parsers = parser()
        tool = importlib.import_module((TOOLS.get(name) or TOOLS["doctor"]).module)
        tool.add_flags(parsers[name])
        flags, overrides = top.parse_known_args(words)
        if name == "plan":
            jrl.apply_overrides(jrl.TRLConfig.load_recipe(flags.config), overrides)
        elif name == "config":
            tool.prepare(flags, overrides)
        else:
            assert not overrides, overrides
        if name == "sweep":
            assert Path(flags.script).is_file() and Path(flags.config).is_file()
        return
    job = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_job_flags(job)
    _, rest = job.parse_known_args([re.sub(r"^\$\w+$", "1", word) for word in words[1:]])
    if wants_flat(name, rest):
        flat_parser(name).parse_args_and_config(rest)
        return
    top, parsers = parser()
    add_training_flags(parsers[name], commands()[name])
    needed = (
        [] if "--dry-run" not in rest or "--reward" in rest else ["--reward", "m:f", "--prompts", "p.txt"]
    )
    flags, overrides = top.parse_known_args([name, *rest, *needed])
    configuration(name, flags.config, overrides)


def flat_parser(name: str) -> FlatParser:
    """Parser of a command with TRL's fields."""
    if name == "ddpo":
        return flat_commands.ddpo_parser()
    if name == "ppo":
        return flat_commands.ppo_parser()
    command = flat_commands.COMMANDS[name]
    return FlatParser(name, command.config_class, command.what)


def check_python(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """A script, a module or a line of Python."""
    if words[0] == "-c":
        ast.parse(words[1])
        return
    if words[:2] == ["-m", "venv"]:
        return
    if words[0] == "train.py":  # the reader's own
        return
    is_module = words[0] == "-m"
    name, rest = (words[1], words[2:]) if is_module else (words[0], words[1:])
    path = ROOT / (name.replace(".", "/") + ".py" if is_module else name)
    assert path.is_file(), f"there is no {path.relative_to(ROOT)}"
    if not re.search(r"\bparse(?:_known)?_args|parse_args_and_config", path.read_text(encoding="utf-8")):
        return  # it has no flags; running it would do its work
    with patch.context() as inside:
        until_parsed(inside)
        inside.setattr(sys, "argv", [str(path), *rest])
        inside.syspath_prepend(str(ROOT))
        inside.syspath_prepend(str(path.parent))
        inside.setattr(method, "_ENTRIES", dict(vars(method)["_ENTRIES"]))  # a script may register one
        with own_modules(), pytest.raises(Parsed):
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")


@contextmanager
def own_modules() -> Iterator[None]:
    """What a script imports from beside itself is forgotten: the next one may have a module of that name."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and any(
                Path(file).is_relative_to(ROOT / folder) for folder in ("examples", "benchmarks")
            ):
                del sys.modules[name]


def until_parsed(patch: pytest.MonkeyPatch) -> None:
    """A script ends once its flags, and the fields that its flags change, are read."""
    known, applied = argparse.ArgumentParser.parse_known_args, jrl.apply_overrides

    def parse(self: Any, *arguments: Any, **others: Any) -> Any:
        found = known(self, *arguments, **others)
        if not found[-1]:
            raise Parsed
        return found

    def apply(*arguments: Any) -> None:
        applied(*arguments)
        raise Parsed

    patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    patch.setattr(jrl, "apply_overrides", apply)


def check_pip(words: list[str]) -> None:
    """The extras that a page installs are those of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        found = re.fullmatch(r"(\.|jrl[\w-]*)\[([\w,-]+)\]", word)
        if found:
            assert found[1] in (".", project["name"]), word
            assert set(found[2].split(",")) <= set(project["optional-dependencies"]), word


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A clone's root as a reader has it, with recipes of the reader's own."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "examples", "benchmarks", "tests", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def write_recipe(folder: Path, words: Sequence[str]) -> None:
    """The recipe that a command of a page names: of its algorithm, or PPO's."""
    name = words[1] if len(words) > 1 and words[1] in commands() else "ppo"
    entry = commands()[name]
    if entry.data != "images":
        for file in OWN_FILES:
            (folder / file).write_text(yaml.safe_dump(entry.default().to_dict()), encoding="utf-8")


def cases() -> Iterator[Any]:
    """Commands as arguments of a test; a script whose imports take seconds is `slow`."""
    for page, words in page_commands():
        marks = [pytest.mark.slow] if SLOW in words else []
        yield pytest.param(page, words, marks=marks, id=f"{page}: {' '.join(words)[:60]}")


@pytest.mark.parametrize(("page", "words"), list(cases()))
@pytest.mark.filterwarnings("ignore")
def test_the_parser_takes_it(page, words, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    ours = next(inner(words), words)
    write_recipe(workplace, ours)
    check(words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "jrl ppo --reward a:b --prompts p.txt --train.sequence_length 64",
        "jrl ppo --config ppo_sentimental --reward a:b --prompts p.txt",
        "jrl ppo --rewards a:b --prompts p.txt",
        "jrl plan --config ppo_sentiment --memory 80",
        "jrl ddpo --config configs/ddpo_compressibility.yaml --prompts a.txt --rewards jpeg",
        "mpirun -np 2 jrl sft --samples a.jsonl --train.step 1",
        "sh -c 'jrl sft --samples a.jsonl --train.step 1'",
        "srun jrl pppo --reward a:b",
        "python examples/ppo_sentiment.py --seeds 0",
        "python examples/ppo_sentiment.py --train.step 0",
        "python examples/ddpo_shapes.py --task bright",
        "python examples/nowhere.py",
        "python -m examples.maze.train --algorithm ilq",
        "python benchmarks/policy_gradients.py run --algorithm dappo",
        "python -c 'import ('",
        "pip install 'jrl[cuda13]'",
        "pip install 'jrl-post[cuda]'",
        "pytest tests/nowhere",
        "jlr ppo",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_mistaken_command_is_refused(line, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    (words,) = simple_commands(line)
    with pytest.raises(
        (SystemExit, ValueError, AssertionError, SyntaxError, FileNotFoundError, KeyError)
    ) as found:
        check(words, monkeypatch)
    if isinstance(found.value, SystemExit):
        assert found.value.code == 2
