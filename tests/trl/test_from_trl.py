# SPDX-License-Identifier: Apache-2.0
"""The scripts of `docs/migrating/from_trl.md` run as they stand, on a tiny model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating" / "from_trl.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
IMPORTS = """
from transformers import AutoTokenizer
from jrl.trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
"""


def run(script, checkpoint, **names):
    """The names that a script leaves behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script.replace('"gpt2"', repr(checkpoint)), str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
def test_ppo_step_by_step(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"review": f"the film {i} was long"} for i in range(32)]
    found = run(IMPORTS + SCRIPTS[1], checkpoint, rows=rows, score=lambda text: float(text.count("e")))
    assert np.isfinite(found["stats"]["ppo/loss/total"])
    assert (tmp_path / "gpt2-tuned" / "config.json").exists()


@pytest.mark.slow
def test_dpo(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"p{i} ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(8)]
    found = run(SCRIPTS[2], checkpoint, pairs=pairs, held_out=pairs[:3])
    assert found["trainer"].state.global_step == 2
    assert (tmp_path / "gpt2-dpo" / "final" / "model.safetensors").exists()


def test_the_page_has_both_scripts():
    assert len(SCRIPTS) == 3 and "trainer.step(" in SCRIPTS[1] and "DPOTrainer(" in SCRIPTS[2]
