# SPDX-License-Identifier: Apache-2.0
"""Meaning of each field of the flat configurations in jrl: mapped, accepted without effect, or refused.

Every field of transformers' `TrainingArguments` and of `RewardConfig`, `SFTConfig`, `DPOConfig`, `GRPOConfig`,
`RLOOConfig` and `DDPOConfig` has an entry in `field_table.yaml`; `docs/migrating/trl_surface.md` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from jrl.trainers.config import read_yaml


class Meaning(NamedTuple):
    """Meaning of a field.

    Attributes:
      kind: "mapped": it does what it says. "ignored": another value than the default warns once and changes nothing.
        "refused": another value than the default is an error.
      text: Where it goes, or why it means nothing here.
    """

    kind: Literal["mapped", "ignored", "refused"]
    text: str


FIELD_TABLE: Mapping[str, Mapping[str, Meaning]] = {
    table: {name: Meaning(*entry) for name, entry in fields.items()}
    for table, fields in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
"""Name of a table → field → meaning."""
TRAINER_FIELDS = {
    name: meaning
    for table in ("training_arguments", "old_arguments", "shared")
    for name, meaning in FIELD_TABLE[table].items()
}
"""What the configurations of trainers over a data set share."""
