# SPDX-License-Identifier: Apache-2.0
"""Which numbers a run computes in."""

from __future__ import annotations

import copy
from pathlib import Path

import jax
import pytest

import jrl
from jrl.trainers.loading.setup import compute_dtype
from tests.models.multimodal_cases import CASES as MULTIMODAL
from tests.trainers.runs import sft_config

CASES = [
    ("auto", "cpu", "float32"),
    ("auto", "tpu", "bfloat16"),
    ("auto", "gpu", "bfloat16"),
    ("float32", "tpu", "float32"),
]


@pytest.mark.parametrize(("asked", "backend", "expected"), CASES)
def test_the_platform_decides_where_the_recipe_does_not(
    asked: str, backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert compute_dtype(jrl.default_sft_config().evolve(train={"compute_dtype": asked})) == expected


def test_a_run_notes_what_it_computes_in(checkpoint: str, tmp_path: Path) -> None:
    config = sft_config(checkpoint, tmp_path / "run")
    assert config.train.compute_dtype == "auto"
    assert jrl.SFTTrainer(config).config.train.compute_dtype == "float32"


def test_a_multimodal_model_without_a_checkpoint_is_refused_before_it_trains(
    checkpoint: str, tmp_path: Path
) -> None:
    hf_config = copy.deepcopy(MULTIMODAL["gemma3"])
    hf_config.text_config.vocab_size = 1024
    sections = {"model": {"model_path": hf_config}, "tokenizer": {"tokenizer_path": checkpoint}}
    with pytest.raises(ValueError, match="can be saved only if it was read from a checkpoint"):
        jrl.SFTTrainer(sft_config(checkpoint, tmp_path / "run", **sections))
