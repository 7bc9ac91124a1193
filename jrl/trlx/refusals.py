# SPDX-License-Identifier: Apache-2.0
"""Methods of trlX's trainers that no run here calls and attributes that none reads, each with what to do instead.

The table is `refusals.yaml`. A subclass that overrides one is refused when it is made, and a script that sets one is
refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.trainers.config import read_yaml

_TABLE: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml"))

EVERY, COMPILED, ROLLOUTS = _TABLE["every"], _TABLE["compiled"], _TABLE["rollouts"]
NATIVE = {**EVERY, **_TABLE["native"]}
ILQL = {**NATIVE, **COMPILED, **_TABLE["loop"], **_TABLE["ilql"]}
RFT = {**NATIVE, **COMPILED, **_TABLE["loop"], **_TABLE["rft"]}
EXPERIENCE, ASSIGNED, COUNTS = _TABLE["experience"], _TABLE["assigned"], _TABLE["counts"]
PPO, ROUNDS = _TABLE["ppo"], _TABLE["rounds"]
_LIVE = {
    f"train.{name}"
    for name in (
        "total_steps",
        "epochs",
        "eval_interval",
        "checkpoint_interval",
        "resume_from_checkpoint",
        "save_best",
    )
}
"""Fields that a run reads when it begins."""


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a script set no field of a configuration that a trainer has compiled.

    Args:
      before: The configuration's dictionary when the trainer was made.
      now: The same today.
    Raises:
      ValueError: Naming the first field.
    """
    for section, fields in now.items():
        for name, value in fields.items():
            dotted = f"{section}.{name}"
            if value != before[section].get(name) and dotted not in _LIVE:
                raise ValueError(
                    f"`{dotted}` was set to {value!r} on a trainer that is made, which was built with "
                    f"{before[section].get(name)!r}: it would change nothing. Set it before, as by "
                    "`config.evolve(...)`."
                )
