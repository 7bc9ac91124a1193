# SPDX-License-Identifier: Apache-2.0
"""The scripts of `docs/migrating/trl_grpo.md` run as they stand, on tiny models."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.environments.chat_models import chat_tokenizer, save_chat_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating" / "trl_grpo.md"
GROUPS, TOOLS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(script: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names that a script leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script, str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
def test_the_script_of_the_page(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"rows": [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(4)]}
    run(GROUPS.replace('"gpt2"', repr(checkpoint)), names)
    assert names["trainer"].state.global_step == 2
    assert (tmp_path / "gpt2-grpo" / "final" / "model.safetensors").exists()
    assert names["trainer"].native.history[0]["log_metric/characters"] > 0


@pytest.mark.slow
def test_the_script_with_tools(tmp_path, monkeypatch, writes):
    monkeypatch.chdir(tmp_path)
    call = '{"name": "multiply", "arguments": {"a": 31, "b": 2}}'
    writes([call], ["ok"])
    model = save_chat_model(tmp_path / "model", chat_tokenizer([call, "ok"]))
    names = run(TOOLS.replace('"Qwen/Qwen3-0.6B"', repr(model)), {})
    assert names["trainer"].state.global_step == 1
    (record,) = names["trainer"].native.history
    assert 0 < record["reward/mean"] < 1
    assert record["log_metric/tools/call_frequency"] > 0 == record["log_metric/tools/failure_frequency"]
