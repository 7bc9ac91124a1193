# SPDX-License-Identifier: Apache-2.0
"""PPO's section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jrl.learners.config import MethodConfig, check_fields

SCALE_REWARD_MODES = ("running", "ref", "ignored", None, False)


@dataclass(kw_only=True)
class PPOConfig(MethodConfig):
    """Proximal policy optimization of a language model against a reward, with a KL penalty to its reference.

    Attributes:
      ppo_epochs: Passes over each set of rollouts, usually 1 to 4.
      num_rollouts: Rollouts collected for one iteration, over all devices.
      chunk_size: Prompts of one generation call, over all devices; also the batch of an evaluation.
      init_kl_coef: Weight of the KL penalty in the reward at the start.
      target: KL per sequence, in nats, that the adaptive controller steers to; None keeps the weight fixed.
      horizon: Rollouts over which the adaptive controller may move the weight by 20 %.
      gamma: Discount per token; 1 unless argued.
      lam: λ of generalised advantage estimation.
      cliprange: Half-width of the ratio clip.
      cliprange_value: Half-width of the value clip.
      vf_coef: Weight of the value loss.
      entropy_coef: Weight of the entropy bonus; 0 only reports the entropy.
      scale_reward: "running" divides scores by their running standard deviation, "ref" by `ref_std`;
        "ignored", None and False leave them. The mean is never subtracted.
      ref_mean: Mean of the reference scores: goes with `ref_std`, and changes nothing, as no mean is subtracted.
      ref_std: Standard deviation of the reference scores; None takes that of the first iteration's.
      cliprange_reward: Scores are clipped to ±this before anything else; None, False and 0 are off.
      missing_eos_penalty: Part of the score of a completion that `max_new_tokens` cut, with a minus sign, before
        clipping; None: nothing.
      gen_experience_kwargs: Used instead of `gen_kwargs` for rollouts; evaluation keeps `gen_kwargs`.
      num_value_layers_unfrozen: Blocks of a separate value branch; 0 reads values from the policy's features.
    """

    name: str = "PPOConfig"
    ppo_epochs: int = 4
    num_rollouts: int = 128
    chunk_size: int = 128
    init_kl_coef: float = 0.001
    target: float | None = None
    horizon: int = 10000
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1.0
    entropy_coef: float = 0.0
    scale_reward: str | bool | None = "ignored"
    ref_mean: float | None = None
    ref_std: float | None = None
    cliprange_reward: float | bool | None = 10.0
    missing_eos_penalty: float | None = None
    gen_experience_kwargs: dict[str, Any] | None = None
    num_value_layers_unfrozen: int = 0

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        experience, penalty = self.gen_experience_kwargs, self.missing_eos_penalty
        check_fields(
            self,
            ("ppo_epochs", self.ppo_epochs >= 1, "at least 1"),
            ("num_rollouts", self.num_rollouts >= 1, "at least 1"),
            ("chunk_size", self.chunk_size >= 1, "at least 1"),
            ("init_kl_coef", self.init_kl_coef >= 0, "at least 0"),
            ("target", self.target is None or self.target > 0, "positive nats per sequence, or None"),
            ("horizon", self.horizon > 0, "positive"),
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("lam", 0 <= self.lam <= 1, "in [0, 1]"),
            ("cliprange", self.cliprange > 0, "positive"),
            ("cliprange_value", self.cliprange_value > 0, "positive"),
            ("vf_coef", self.vf_coef >= 0, "at least 0"),
            ("scale_reward", self.scale_reward in SCALE_REWARD_MODES, f"one of {SCALE_REWARD_MODES}"),
            ("ref_std", (self.ref_mean is None) == (self.ref_std is None), "given together with `ref_mean`"),
            ("ref_std", self.ref_std is None or self.ref_std > 0, "positive, or None"),
            ("cliprange_reward", not self.cliprange_reward or self.cliprange_reward > 0, "positive, or off"),
            ("missing_eos_penalty", penalty is None or penalty >= 0, "at least 0, or None"),
            (
                "gen_experience_kwargs",
                experience is None or "max_new_tokens" in experience,
                "a mapping that holds `max_new_tokens` (it replaces `gen_kwargs` for rollouts), or None",
            ),
            ("num_value_layers_unfrozen", self.num_value_layers_unfrozen >= 0, "at least 0"),
        )
