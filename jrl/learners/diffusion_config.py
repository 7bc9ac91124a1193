# SPDX-License-Identifier: Apache-2.0
"""Options that all algorithms share that train a diffusion model: how it is sampled and evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from jrl.learners.config import MethodConfig, check_fields


@dataclass(kw_only=True)
class DiffusionConfig(MethodConfig):
    """Options of all algorithms that train a diffusion model; `gen_kwargs` is not read.

    Attributes:
      sample_num_steps: T, denoising steps.
      sample_eta: η in [0, 1], the share of the reverse process's noise, or a flow's noise level.
      sample_guidance_scale: w of classifier-free guidance; at most 1: none.
      guidance_rescale: φ in [0, 1] of guidance, in sampling and training.
      negative_prompts: The negative prompt of all samples.
      sample_height: Height of the images in pixels; None: the model's own.
      sample_width: Width of the images in pixels; None: the model's own.
      eval_prompts: Prompts of the images drawn at each evaluation, always from the same noise.
      eval_eta: η of those.
      eval_num_steps: T of those; None: that of sampling. A flow may learn from fewer steps than it is used with.
    """

    sample_num_steps: int = 50
    sample_eta: float = 1.0
    sample_guidance_scale: float = 5.0
    guidance_rescale: float = 0.0
    negative_prompts: str = ""
    sample_height: int | None = None
    sample_width: int | None = None
    eval_prompts: list[str] = field(default_factory=list)
    eval_eta: float = 0.0
    eval_num_steps: int | None = None

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            ("sample_num_steps", self.sample_num_steps >= 1, "at least 1"),
            ("sample_eta", 0 <= self.sample_eta <= 1, "in [0, 1]"),
            ("guidance_rescale", 0 <= self.guidance_rescale <= 1, "in [0, 1]"),
            ("eval_eta", 0 <= self.eval_eta <= 1, "in [0, 1]"),
        )
        for name, size in (
            ("sample_height", self.sample_height),
            ("sample_width", self.sample_width),
            ("eval_num_steps", self.eval_num_steps),
        ):
            check_fields(self, (name, size is None or size >= 1, "at least 1, or None"))
