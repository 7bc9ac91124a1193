# SPDX-License-Identifier: Apache-2.0
"""Names of trlX's NeMo backend, which are refused with the advice what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from jrl.trlx.registry import register_trainer
from jrl.trlx.trainer import BaseRLTrainer


class NeMoTrainer(BaseRLTrainer):
    """Refuses to be made: Megatron's parallelism is a mesh here."""

    instead: str

    def __init__(self, config: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__, self.instead)

    def learn(self, log_fn: Any = None, save_fn: Any = None, eval_fn: Any = None) -> None:
        """Never reached."""


@register_trainer
class NeMoILQLTrainer(NeMoTrainer):
    """ILQL on NeMo."""

    instead = "AccelerateILQLTrainer"


@register_trainer
class NeMoPPOTrainer(NeMoTrainer):
    """PPO on NeMo."""

    instead = "AcceleratePPOTrainer"


@register_trainer
class NeMoSFTTrainer(NeMoTrainer):
    """Supervised fine-tuning on NeMo."""

    instead = "AccelerateSFTTrainer"


def refuse(name: str, instead: str) -> NoReturn:
    """Raises what every name of NeMo raises.

    Args:
      name: What was asked for.
      instead: What does its work here.
    Raises:
      ImportError: Always.
    """
    raise ImportError(
        f"{name} needs NeMo, which jrl does without: use {instead} and spread the model over devices with `train.mesh`."
    )
