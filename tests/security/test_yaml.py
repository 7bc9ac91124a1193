# SPDX-License-Identifier: Apache-2.0
"""YAML files are data: a tag that names Python is refused wherever one is read, and what it names is not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jrl
from jrl.cli import main
from jrl.sweep.plan import read_plan
from jrl.trainers.config.coercion import parse_yaml, read_yaml
from jrl.trl.parser import TrlParser
from jrl.trl.scripts import ScriptArguments

TAGS = [
    "!!python/object/apply:pathlib.Path.touch [{target}]",
    "!!python/object/apply:os.system ['touch {target}']",
    "!!python/object/new:os.system ['touch {target}']",
    "!!python/name:os.system ''",
    "!!python/module:os ''",
    "!!python/tuple [1, 2]",
]
READERS: dict[str, Callable[[Path], Any]] = {
    "nested": jrl.TRLConfig.load_yaml,
    "flat": lambda path: TrlParser(ScriptArguments).parse_args_and_config(["--config", str(path)]),
    "sweep": read_plan,
    "plain": read_yaml,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file that is there only if a tag was obeyed."""
    return tmp_path / "obeyed"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("tag", TAGS, ids=lambda tag: tag.split()[0])
def test_python_tags_are_refused(tag, reader, tmp_path, target):
    path = tmp_path / "config.yaml"
    path.write_text(f"train:\n  seed: {tag.format(target=target)}\n")
    with pytest.raises(ValueError, match=r"config\.yaml: not YAML: could not determine a constructor"):
        READERS[reader](path)
    assert not target.exists()


def test_so_are_those_of_flags(target):
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_yaml(f"!!python/object/apply:os.system ['touch {target}']")
    assert not target.exists()


def test_the_command_line_says_so_in_one_line(tmp_path, target, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(f"train: !!python/object/apply:os.system ['touch {target}']\n")
    assert main(["sft", "--config", str(path), "--samples", "x.jsonl"]) == 2
    assert "config.yaml: not YAML" in capsys.readouterr().err
    assert not target.exists()
