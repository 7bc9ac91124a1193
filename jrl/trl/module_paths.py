# SPDX-License-Identifier: Apache-2.0
"""TRL's module paths: `from jrl.trl.trainer.utils import pad_to_length` finds what `jrl.trl` has under that name.

`jrl.trl` is flat. A path here is a module without contents of its own: every public name of `jrl.trl` can be imported
from it, and a few names that mean something else there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jrl.interop import register_paths

ROOT = "jrl.trl"
PATHS = (
    "environment.base_environment",
    "extras",
    "extras.best_of_n_sampler",
    "extras.dataset_formatting",
    "models.modeling_base",
    "models.modeling_value_head",
    "models.utils",
    "scripts.utils",
    "trainer",
    "trainer.base",
    "trainer.callbacks",
    "trainer.ddpo_config",
    "trainer.ddpo_trainer",
    "trainer.dpo_config",
    "trainer.dpo_trainer",
    "trainer.grpo_config",
    "trainer.grpo_trainer",
    "trainer.iterative_sft_trainer",
    "trainer.model_config",
    "trainer.ppo_config",
    "trainer.ppo_trainer",
    "trainer.reward_config",
    "trainer.reward_trainer",
    "trainer.rloo_config",
    "trainer.rloo_trainer",
    "trainer.sft_config",
    "trainer.sft_trainer",
    "trainer.utils",
)
"""Modules of TRL, classic and modern, that `jrl.trl` has no file for."""
ELSEWHERE = {
    ("trainer.reward_trainer", "DataCollatorForPreference"): ("collators", "RewardDataCollatorForPreference"),
    ("trainer.utils", "entropy_from_logits"): ("core", "entropy_from_logits"),
}
"""(path, name) → (module of `jrl.trl`, name), where a path's name is not the one of `jrl.trl`."""


def register(find: Callable[[str], Any]) -> None:
    """Makes the modules of `PATHS`.

    Args:
      find: Gives a public name of `jrl.trl`; raises AttributeError where there is none.
    """

    def found(path: str, name: str) -> Any:
        if (path, name) in ELSEWHERE:
            home, other = ELSEWHERE[path, name]
            return getattr(importlib.import_module(f"{ROOT}.{home}"), other)
        return find(name)

    register_paths(ROOT, PATHS, found)
