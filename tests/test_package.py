# SPDX-License-Identifier: Apache-2.0
"""What an installed package brings beside its modules: a version, its types, and its recipes."""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import jrl
from jrl.cli import main
from jrl.trainers.config.coercion import read_yaml

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml"))


def test_the_version_is_one(capsys):
    assert jrl.__version__ == version("jrl-post")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"jrl {jrl.__version__}\n"


def test_types_are_published():
    assert (Path(jrl.__file__).parent / "py.typed").is_file()


def test_recipes_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in RECIPES:
        expected = read_yaml(ROOT / "configs" / path)
        assert (
            read_yaml(path.with_suffix("").as_posix()) == read_yaml(f"configs/{path.as_posix()}") == expected
        )
    with pytest.raises(
        FileNotFoundError, match=r"no recipe of this name in jrl\. Did you mean `ppo_sentiment`"
    ):
        read_yaml("ppo_sentimnt")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_yaml("../pyproject")


def test_a_file_here_goes_before_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo_sentiment").write_text("mine: 1")
    assert read_yaml("ppo_sentiment") == {"mine": 1}


@pytest.mark.slow
def test_a_wheel_holds_recipes_and_types(tmp_path):
    pytest.importorskip("setuptools")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run(
        ["cp", "-r", "jrl", "configs", "pyproject.toml", "README.md", "LICENSE", tmp_path],
        cwd=ROOT,
        check=True,
    )
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"jrl/configs/{path.as_posix()}" for path in RECIPES} | {"jrl/py.typed"} <= names
