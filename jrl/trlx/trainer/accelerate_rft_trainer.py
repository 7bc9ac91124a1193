# SPDX-License-Identifier: Apache-2.0
"""trlX's trainer of rejection fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jrl.trainers.rft import RFTTrainer
from jrl.trlx.data.configs import RFTConfig
from jrl.trlx.functions import seed_rewards
from jrl.trlx.refusals import RFT, ROUNDS
from jrl.trlx.registry import register_trainer
from jrl.trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer

__all__ = ["AccelerateRFTTrainer", "RFTConfig"]


@register_trainer
class AccelerateRFTTrainer(AccelerateSFTTrainer):
    """Rejection fine-tuning: rounds of sampling, scoring and keeping the best, while it learns."""

    native_class = RFTTrainer
    REFUSED = RFT

    @property
    def native_rft(self) -> RFTTrainer:
        """jrl's own trainer."""
        return cast(RFTTrainer, self.native)

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Sets what is sampled from.

        Raises:
          ValueError: If the trainer has no `reward_fn`.
        """
        if self.reward_fn is None:
            raise ValueError("AccelerateRFTTrainer scores its own samples: give it a `reward_fn`.")
        prompts = self._prompt_set(pipeline, self.native.settings.max_new_tokens)
        self.native_rft.add_prompt_set(prompts, seed_rewards(self.reward_fn))

    def _hand_over(self) -> None:
        super()._hand_over()
        if "prompts" in vars(self.native):
            self.native_rft.add_prompt_set(self.native_rft.prompts, seed_rewards(self.reward_fn))

    def _unread(self) -> Mapping[str, str]:
        return {**super()._unread(), **ROUNDS}

    def make_experience(self) -> None:  # type: ignore[override]  # the seed's own signature
        """Nothing to do: `learn` samples a round whenever the last one is used up."""
        self._require_data()

    def _fill_store(self) -> None:
        """A round's samples stay in the trainer."""

    def _require_data(self) -> None:
        if "prompts" not in vars(self.native):
            raise ValueError("AccelerateRFTTrainer has no prompts yet: `add_prompt_pipeline` sets them.")

    def _total_steps(self) -> int:
        return self.config.train.total_steps
