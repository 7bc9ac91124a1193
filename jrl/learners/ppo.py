# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization of a language model: its section of a configuration, and its recipe.

Reference: Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from jrl.learners.config import OnlineConfig, check_fields, positive_or_none, refuse_methods
from jrl.learners.credit import Scaling, generalized_advantages, penalize
from jrl.learners.recipe import KLControl, Recipe
from jrl.losses.policy_gradient import PolicyLoss, ValueLoss, clipped

KL_PENALTY_NAMES = ("kl", "abs", "mse", "full")
SCALE_REWARD_MODES = ("running", "ref", "ignored", None, False)


@dataclass(kw_only=True)
class PPOConfig(OnlineConfig):
    """Proximal policy optimization of a language model against a reward, with a KL penalty to its reference.

    Attributes:
      ppo_epochs: Passes over each set of rollouts, usually 1 to 4.
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
        "ignored", None and False leave them. The mean is subtracted by `center_reward` alone.
      ref_mean: Mean of the reference scores: goes with `ref_std`, and changes nothing, as no mean is subtracted.
      ref_std: Standard deviation of the reference scores; None takes that of the first iteration's.
      center_reward: Beside `scale_reward: running`, the running mean is subtracted first, from the last action's score.
      cliprange_reward: Scores are clipped to ±this before anything else; None, False and 0 are off.
      cliprange_scaled_reward: Scores are clipped to ±this after they are scaled; None is off.
      kl_penalty: What is subtracted from rewards, weighed by the coefficient, and what the controller steers: "kl" is
        log π − log π_ref of the action, "abs" its absolute value, "mse" half its square, "full" the whole KL
        divergence of the two distributions at that state, in nats; it costs the reference's logits in the scoring pass.
      whiten_rewards: Rewards, KL penalty included, are scaled to unit variance over all rollouts; their mean stays.
      num_value_layers_unfrozen: Blocks of a separate value branch; 0 reads values from the policy's features.
      max_policy_kl: The epochs of an iteration end after one over whose actions log π_old − log π has a mean above
        this, in nats; None: all are run. The optimizer steps that are left out are counted as if they had been
        taken, by the schedule too.
      ratio_threshold: A minibatch whose mean ratio exceeds this weighs nothing in the losses, and its optimizer step
        is not taken where it is alone; None: none is left out.
    """

    name: str = "PPOConfig"
    ppo_epochs: int = 4
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
    center_reward: bool = False
    cliprange_reward: float | bool | None = 10.0
    cliprange_scaled_reward: float | None = None
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    whiten_rewards: bool = False
    num_value_layers_unfrozen: int = 0
    max_policy_kl: float | None = None
    ratio_threshold: float | None = None

    def adapt(self, recipe: Recipe) -> Recipe:
        """The recipe with the parts that the configuration brings itself; here none.

        Raises:
          TypeError: If a subclass defines a method that is only called of `jrl.trlx.PPOConfig`'s.
        """
        refuse_methods(self, ("loss", "get_advantages_and_returns"), "jrl.trlx.PPOConfig")
        return recipe

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            ("ppo_epochs", self.ppo_epochs >= 1, "at least 1"),
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
            (
                "center_reward",
                not self.center_reward or self.scale_reward == "running",
                'False unless `scale_reward` is "running"',
            ),
            ("kl_penalty", self.kl_penalty in KL_PENALTY_NAMES, f"one of {KL_PENALTY_NAMES}"),
            ("cliprange_scaled_reward", positive_or_none(self.cliprange_scaled_reward), "positive, or None"),
            ("max_policy_kl", positive_or_none(self.max_policy_kl), "positive nats, or None"),
            ("ratio_threshold", positive_or_none(self.ratio_threshold), "positive, or None"),
            ("num_value_layers_unfrozen", self.num_value_layers_unfrozen >= 0, "at least 0"),
        )


def ppo_recipe(config: PPOConfig) -> Recipe:
    """PPO as its configuration describes it: the names of trlX, bound here to the standard terms and nowhere else."""
    _warn_of_discount(config)
    recipe = Recipe(
        prefix="ppo",
        scaling=Scaling(
            clip_range=config.cliprange_reward,
            mode=config.scale_reward,
            center=config.center_reward,
            scaled_clip_range=config.cliprange_scaled_reward,
            ref_std=config.ref_std,
        ),
        kl=KLControl(config.kl_penalty, config.init_kl_coef, config.target, config.horizon),
        penalize=penalize(config.kl_penalty),
        estimate=generalized_advantages(
            gamma=config.gamma, gae_lambda=config.lam, whiten_rewards=config.whiten_rewards
        ),
        critic=True,
        num_value_layers_unfrozen=config.num_value_layers_unfrozen,
        loss=ppo_policy_loss(config),
        num_epochs=config.ppo_epochs,
        max_policy_kl=config.max_policy_kl,
    )
    return config.adapt(recipe)


def ppo_policy_loss(config: PPOConfig) -> PolicyLoss:
    """The clipped objective with a critic and an entropy bonus."""
    return PolicyLoss(
        prefix="ppo",
        surrogate=clipped(clip_range=config.cliprange),
        value_loss=ValueLoss(config.cliprange_value, config.vf_coef),
        entropy_coef=config.entropy_coef,
        ratio_threshold=config.ratio_threshold,
    )


def _warn_of_discount(config: PPOConfig) -> None:
    if config.gamma < 1:
        tokens = (config.gen_experience_kwargs or config.gen_kwargs)["max_new_tokens"]
        tokens = tokens[0] if isinstance(tokens, list | tuple) else tokens  # the first value of a sweep
        warnings.warn(
            f"`method.gamma` = {config.gamma} discounts per token: at the first of {tokens} tokens, the score of "
            f"the last counts {config.gamma**tokens:.2g}. For text, 1 is usual.",
            stacklevel=3,
        )
