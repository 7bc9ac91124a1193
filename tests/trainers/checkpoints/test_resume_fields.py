# SPDX-License-Identifier: Apache-2.0
"""Runs of older versions resume: a field that their checkpoints lack has a value that says what they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from jrl.trainers.checkpoints.resume import _BEFORE, check_config, plain
from jrl.trainers.config.method import entries

FIRST = Path(__file__).parent / "fields_of_old_runs.txt"
"""Fields that checkpoints of the first version hold, one a line. Nothing is ever added here: a new field whose value in
older runs is not None goes into `_BEFORE`."""
LATER = {"reward_gradient": {"method.num_last_steps"}}
"""Fields of algorithms that came later: no run of theirs is older than they are."""


def fields(name: str) -> dict[str, object]:
    config = plain(entries()[name].default().to_dict())
    return {
        f"{section}.{field}": value for section, found in config.items() for field, value in found.items()
    }


@pytest.mark.parametrize("name", entries())
def test_a_run_without_the_newer_fields_resumes(name):
    current = plain(entries()[name].default().to_dict())
    old = {
        section: {field: value for field, value in found.items() if f"{section}.{field}" not in _BEFORE}
        for section, found in current.items()
    }
    old["tokenizer"] = current["tokenizer"]
    if "num_generations" in current["method"] and current["method"]["num_generations"] != 1:
        old["method"]["num_generations"] = current["method"]["num_generations"]
    check_config(old, current)


@pytest.mark.parametrize("name", entries())
def test_every_newer_field_has_the_value_of_older_runs(name):
    first = FIRST.read_text(encoding="utf-8").split()
    newer = {field for field, value in fields(name).items() if field not in first and value is not None}
    assert newer - LATER.get(name, set()) <= set(_BEFORE)
