# SPDX-License-Identifier: Apache-2.0
"""`docs/migrating/trl_surface.md` against the table of what fields become, and the table against the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from jrl.trl.configs import DPOConfig, RewardConfig, SFTConfig
from jrl.trl.ddpo_config import DDPOConfig
from jrl.trl.field_table import FIELD_TABLE, Meaning
from jrl.trl.group_configs import GRPOConfig, RLOOConfig

CONFIGS = (RewardConfig, SFTConfig, DPOConfig, GRPOConfig, RLOOConfig, DDPOConfig)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating" / "trl_surface.md"
TABLES: Mapping[str, Mapping[str, Meaning]] = {
    "Of transformers": FIELD_TABLE["training_arguments"],
    "Of older transformers": FIELD_TABLE["old_arguments"],
    "Of several configurations": FIELD_TABLE["shared"],
    "`RewardConfig`": FIELD_TABLE["reward"],
    "`SFTConfig`": FIELD_TABLE["sft"],
    "`DPOConfig`": FIELD_TABLE["dpo"],
    "`GRPOConfig` and `RLOOConfig`": FIELD_TABLE["groups"],
    "`GRPOConfig`": FIELD_TABLE["grpo"],
    "`RLOOConfig`": FIELD_TABLE["rloo"],
    "`DDPOConfig`": FIELD_TABLE["ddpo"],
    "`project_kwargs` of `DDPOConfig`": FIELD_TABLE["project"],
}


def rendered(title: str, table: Mapping[str, Meaning]) -> str:
    """A section of the page."""
    words = {"mapped": "mapped", "ignored": "without effect", "refused": "refused"}
    rows = [f"| `{name}` | {words[meaning.kind]} | {meaning.text} |" for name, meaning in table.items()]
    return "\n".join(
        [f"### {title}", "", "| field | | where it goes, or why not |", "|---|---|---|", *rows, ""]
    )


@pytest.mark.parametrize("title", TABLES)
def test_the_page_shows_the_table(title):
    assert rendered(title, TABLES[title]) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_meaning(config):
    assert not [entry.name for entry in fields(config) if entry.name not in config.MEANINGS]


def test_no_meaning_is_of_a_field_that_there_is_not():
    known = {entry.name for config in CONFIGS for entry in fields(config)}
    tables = [table for table in TABLES.values() if table is not FIELD_TABLE["project"]]
    assert not [name for table in tables for name in table if name not in known]
    assert set(FIELD_TABLE["training_arguments"]) == {entry.name for entry in fields(TrainingArguments)}
