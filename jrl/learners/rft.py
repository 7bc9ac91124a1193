# SPDX-License-Identifier: Apache-2.0
"""Rejection fine-tuning: its update is that of supervised fine-tuning, on samples of the policy's own that scored well.

Reference: Gulcehre et al. 2023 (ReST), arXiv:2308.08998.
"""

from __future__ import annotations

from dataclasses import dataclass

from jrl.learners.config import LanguageConfig, check_fields


@dataclass(kw_only=True)
class RFTConfig(LanguageConfig):
    """Rejection fine-tuning: generate, score, keep the best of each prompt, fine-tune on them.

    Attributes:
      start_percentile: Share of a prompt's samples that the first improve step after generating leaves out.
      end_percentile: Of the last one; in between it rises evenly.
      n_improve_steps: Passes over kept samples, each with a higher percentile, for one round of generation.
      n_generations_per_prompt: Samples of each prompt in a round.
      max_samples_per_prompt: Most samples of a prompt that are kept, the best ones; None: no limit. Without it, prompts
        with many good answers outweigh the others.
      chunk_size: Rows of a sampling call, global; None: `train.batch_size`. The reward function gets so many at a time.
    """

    name: str = "RFTConfig"
    start_percentile: float = 0.7
    end_percentile: float = 0.95
    n_improve_steps: int = 4
    n_generations_per_prompt: int = 32
    max_samples_per_prompt: int | None = None
    chunk_size: int | None = None

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            ("start_percentile", 0 <= self.start_percentile <= 1, "in [0, 1]"),
            (
                "end_percentile",
                self.start_percentile <= self.end_percentile <= 1,
                f"in [start_percentile = {self.start_percentile}, 1]",
            ),
            ("n_improve_steps", self.n_improve_steps >= 1, "at least 1"),
            ("n_generations_per_prompt", self.n_generations_per_prompt >= 1, "at least 1"),
            (
                "max_samples_per_prompt",
                self.max_samples_per_prompt is None or self.max_samples_per_prompt >= 1,
                "at least 1, or None (no limit)",
            ),
            ("chunk_size", self.chunk_size is None or self.chunk_size >= 1, "at least 1, or None"),
        )
