# SPDX-License-Identifier: Apache-2.0
"""The reward model's section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from jrl.learners.config import MethodConfig, check_fields


@dataclass(kw_only=True)
class RewardConfig(MethodConfig):
    """A reward model learned from preferences. A reward model writes no text: `gen_kwargs` is not read.

    Attributes:
      center_rewards_coefficient: Weight of (r_chosen + r_rejected)², which keeps the scores around 0; None: 0.
      disable_dropout: Whether the forward pass is deterministic in training.
    """

    name: str = "RewardConfig"
    center_rewards_coefficient: float | None = None
    disable_dropout: bool = True

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        coefficient = self.center_rewards_coefficient
        check_fields(
            self,
            ("center_rewards_coefficient", coefficient is None or coefficient >= 0, "at least 0, or None"),
        )
