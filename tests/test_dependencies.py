# SPDX-License-Identifier: Apache-2.0
"""What the package imports, its declared dependencies bring; matplotlib is missed by a plot alone."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.trainers.runs import save_tiny_checkpoint

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Read where a script that brings them is at hand, and declared nowhere.
BROUGHT = {"accelerate", "bitsandbytes", "peft", "torch"}

# Those whose module has another name.
DISTRIBUTIONS = {"PIL": "pillow", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(lines: list[str]) -> set[str]:
    """Distributions that requirements bring, with all that those require in their turn."""
    found: set[tuple[str, str]] = set()

    def add(line: str, extra: str) -> None:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            return
        for wanted in ("", *sorted(requirement.extras)):
            node = (normal(requirement.name), wanted)
            if node in found:
                continue
            found.add(node)
            try:
                inner = requires(node[0]) or [] if node[0] != "jrl-post" else EXTRAS.get(wanted, [])
            except PackageNotFoundError:  # an extra that is not installed here
                continue
            for other in inner:
                add(other, wanted)

    for line in lines:
        add(line, "")
    return {name for name, _ in found}


def imported(node: ast.AST, *, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """(top-level module, whether importing the file imports it) of every import that is not for types alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for top in {name.split(".")[0] for name in names} - {"jrl"} - sys.stdlib_module_names:
            yield top, at_import
    now = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.expr) else ():
        yield from imported(child, at_import=now)


@functools.cache
def imports() -> set[tuple[str, str, bool]]:
    """(file, top-level module, whether importing the file imports it) of the whole package."""
    return {
        (path.relative_to(ROOT).as_posix(), *found)
        for path in (ROOT / "jrl").rglob("*.py")
        for found in imported(ast.parse(path.read_text(encoding="utf-8")))
    }


def missing(*, at_import: bool, declared: set[str]) -> set[tuple[str, str]]:
    """(file, module) of imports that none of the distributions brings."""
    assert len(imports()) > 500
    return {
        (file, top)
        for file, top, now in imports()
        if now == at_import and normal(DISTRIBUTIONS.get(top, top)) not in declared
    }


def test_what_an_import_needs_is_declared():
    assert missing(at_import=True, declared=required_by(PROJECT["dependencies"])) == set()


def test_what_a_function_imports_is_declared_or_an_extra():
    everything = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    assert missing(at_import=False, declared=required_by(everything) | BROUGHT) == set()


def test_chat_templates_need_no_extra():
    assert "jinja2" in required_by(PROJECT["dependencies"])
    assert "matplotlib" not in required_by(PROJECT["dependencies"])
    for extra in ("examples", "sweep", "test"):
        assert "matplotlib" in required_by(EXTRAS[extra]), extra


WITHOUT_MATPLOTLIB = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import jrl
from tests.trainers.runs import sft_config
jrl.train(config=sft_config(sys.argv[1], sys.argv[2], train={"total_steps": 4, "checkpoint_interval": 2}),
          samples=["the cat sat", "a dog ran"] * 4)
"""


@pytest.mark.slow
def test_a_run_without_matplotlib_skips_the_plot_and_says_so_once(tmp_path):
    model = save_tiny_checkpoint(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, model, str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "UserWarning: No training.png" in line]
    assert len(lines) == 1 and "pip install 'jrl-post[plots]'" in lines[0], done.stderr
    cards = list((tmp_path / "run").rglob("README.md"))
    assert cards and not any("training.png" in card.read_text(encoding="utf-8") for card in cards)
    assert not list((tmp_path / "run").rglob("training.png"))
