# SPDX-License-Identifier: Apache-2.0
"""trlX's NeMo trainers: their names, and what to use instead."""

from __future__ import annotations

from typing import Any

from jrl.trlx.base import BaseRLTrainer
from jrl.trlx.registry import register_trainer


class _NeMoTrainer(BaseRLTrainer):
    """Refuses to be made: Megatron's parallelism is a mesh here."""

    instead: str

    def __init__(self, config: Any, **kwargs: Any) -> None:
        raise ImportError(
            f"{type(self).__name__} needs NeMo, which jrl does without: use {self.instead} and spread the model over "
            "devices with `train.mesh`."
        )

    def learn(self, log_fn: Any = None, save_fn: Any = None, eval_fn: Any = None) -> None:
        """Never reached."""


@register_trainer
class NeMoPPOTrainer(_NeMoTrainer):
    """PPO on NeMo."""

    instead = "AcceleratePPOTrainer"


@register_trainer
class NeMoILQLTrainer(_NeMoTrainer):
    """ILQL on NeMo."""

    instead = "AccelerateILQLTrainer"


@register_trainer
class NeMoSFTTrainer(_NeMoTrainer):
    """Supervised fine-tuning on NeMo."""

    instead = "AccelerateSFTTrainer"
