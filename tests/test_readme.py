# SPDX-License-Identifier: Apache-2.0
"""What the README says is so."""

import os
import re
from pathlib import Path

import pytest

from tests.trainers.runs import save_tiny_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("mark", ["run", "test"])
def test_each_command_is_one_line_under_its_mark(mark):
    block = re.search(rf"<!-- {mark} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert block is not None and len(block[1].strip().splitlines()) == 1
    assert block[1].startswith("python3 -m venv .venv && ")


@pytest.mark.slow
def test_the_first_example_runs(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    code = code.replace("path/to/checkpoint", save_tiny_checkpoint(tmp_path / "model"))
    code = code.replace('"total_steps": 200', '"total_steps": 16')
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert os.path.exists("tuned/model.safetensors") and os.path.exists("ckpts/metrics.jsonl")
