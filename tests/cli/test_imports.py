# SPDX-License-Identifier: Apache-2.0
"""`jrl --import MODULE`: an algorithm of one's own has its command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jrl.cli import main

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from dataclasses import dataclass
import jrl

@dataclass(kw_only=True)
class ElsewhereConfig(jrl.OnlineConfig):
    name: str = "ElsewhereConfig"

jrl.register(jrl.Method(
    name="elsewhere",
    config=ElsewhereConfig,
    recipe=lambda config: jrl.Recipe(
        estimate=jrl.learners.returns_to_go(), loss=jrl.PolicyLoss(surrogate=jrl.losses.reinforce())
    ),
    default=lambda: jrl.default_config(ElsewhereConfig()),
    title="from elsewhere",
    summary="an algorithm of another module",
))
"""


def test_a_module_registers_a_command(tmp_path: Path) -> None:
    (tmp_path / "elsewhere_algorithm.py").write_text(MODULE, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "jrl", "--import", "elsewhere_algorithm", "elsewhere", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: jrl elsewhere") and "--reward" in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--import"], "expected the name of a module"),
        (["--import", "no_such_module_here", "plan"], "there is no module 'no_such_module_here'"),
    ],
)
def test_a_module_that_is_none_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_importing_jrl_brings_nothing_heavy_that_can_wait() -> None:
    script = (
        "import sys; import jrl; "
        "late = {'orbax.checkpoint', 'transformers', 'datasets', 'torch', 'matplotlib', 'ray'} & set(sys.modules); "
        "print(late or 'none')"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "none\n"
