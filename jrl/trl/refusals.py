# SPDX-License-Identifier: Apache-2.0
"""Methods of transformers' `Trainer` and of TRL's that no run here calls, each with what to do instead.

The table is `refusals.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jrl.trainers.config import read_yaml

_TABLE: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml"))

TRAINER = _TABLE["trainer"]
SFT = {**TRAINER, **_TABLE["sft"]}
ITERATIVE = {**SFT, **_TABLE["iterative_sft"]}
GROUPS = {**TRAINER, **_TABLE["groups"]}
_CALLED = {"get_batch_samples"}
DPO = {**{name: cure for name, cure in TRAINER.items() if name not in _CALLED}, **_TABLE["dpo"]}
DDPO, PPO, IN_A_RUN = _TABLE["ddpo"], _TABLE["ppo"], _TABLE["in_a_run"]
