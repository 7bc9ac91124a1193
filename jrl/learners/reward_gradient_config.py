# SPDX-License-Identifier: Apache-2.0
"""Section of a configuration for gradients of a reward (DRaFT)."""

from __future__ import annotations

from dataclasses import dataclass

from jrl.learners.config import check_fields
from jrl.learners.diffusion_config import DiffusionConfig


@dataclass(kw_only=True)
class RewardGradientConfig(DiffusionConfig):
    """Gradients of a differentiable reward through the last denoising steps (DRaFT-K).

    An iteration draws `train.batch_size` images and takes one optimizer step; `train.minibatch_size` of them are
    differentiated at a time.

    Attributes:
      num_last_steps: K in 1..T, denoising steps that gradients pass; the memory of an image grows with them.
    """

    name: str = "RewardGradientConfig"
    num_last_steps: int = 1

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            (
                "num_last_steps",
                1 <= self.num_last_steps <= self.sample_num_steps,
                f"in 1..{self.sample_num_steps}, the denoising steps (`sample_num_steps`)",
            ),
        )
