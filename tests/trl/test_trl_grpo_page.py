# SPDX-License-Identifier: Apache-2.0
"""The script of `docs/trl_grpo.md` runs as it stands, on a tiny model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trl_grpo.md"
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_script_of_the_page(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"rows": [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(4)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(SCRIPT.replace('"gpt2"', repr(checkpoint)), str(PAGE), "exec"), names)
    assert names["trainer"].state.global_step == 2
    assert (tmp_path / "gpt2-grpo" / "final" / "model.safetensors").exists()
    assert names["trainer"].native.history[0]["characters"] > 0
