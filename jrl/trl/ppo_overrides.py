# SPDX-License-Identifier: Apache-2.0
"""Methods that a subclass of `PPOTrainer` overrides, as the functions of which the compiled update is made.

Arrays are windows (B, T): column t speaks of response token t, and everything is 0 where the mask is. An override is
called while the update is traced, not at every step, so what it reads of `self` is a constant. The KL coefficient is
the present one in `compute_rewards`; the other two may not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.interop import checked_array, checked_scalar, flat_names, own_methods, traced
from jrl.learners.credit import KL_PENALTIES, Credit, penalize
from jrl.learners.ppo import PPOConfig, ppo_policy_loss
from jrl.learners.recipe import Recipe, mean_loss
from jrl.losses.policy_gradient import Targets
from jrl.ops.masking import masked_sum, zero_masked
from jrl.typing import Predictions, Scored

OWN = "own/"
"""How the metrics of an overridden loss begin."""
TRACED = ("compute_rewards", "compute_advantages", "loss")
LIVE = "`compute_rewards` may read `kl_ctl.value`."
"""What the refusal of values that change says."""
_PER_ACTION = ("policy/advantages", "policy/ratio")
"""Statistics that a step shows per action, as the update has them."""


class RewardParts(NamedTuple):
    """Rewards (B, T), the same without the scores, and the KL that they are penalised by; 0 at mask 0."""

    rewards: Float[Array, "B T"]
    non_score: Float[Array, "B T"]
    kl: Float[Array, "B T"]


class OverriddenMaths:
    """The maths of an update: a subclass's methods where it has its own, jrl's functions elsewhere.

    Args:
      owner: The trainer of TRL's shape; its `kl_ctl` answers with the traced coefficient during a call.
      base: jrl's class.
      config: The method's section.
      default: PPO's recipe, as configured.
      vocab_size: Of the model, whose logits may be padded.

    Attributes:
      running: The method that is being traced; None: none is.
    """

    def __init__(
        self, owner: Any, base: type, config: PPOConfig, default: Recipe, *, vocab_size: Callable[[], int]
    ) -> None:
        self._owner, self._base, self._config, self._vocab_size = owner, base, config, vocab_size
        self._default = default

    @property
    def own(self) -> dict[str, Callable[..., Any]]:
        """The methods that are overridden now."""
        return own_methods(self._owner, self._base, TRACED)

    def recipe(self) -> Recipe:
        """Recipe for the learner; which methods are the script's own is looked up while it is traced."""
        return replace(
            self._default,
            penalize=lambda *given: self.reward_parts(*given).rewards,
            estimate=self._estimate,
            loss=self._loss,
        )

    def _estimate(self, rewards: Array, values: Array | None, mask: Array, groups: Any) -> Credit:
        del groups
        assert values is not None, "PPO has a critic"
        return Credit(*self.advantage_parts(rewards, values, mask)[1:])

    def reward_parts(self, scores: Array, scored: Scored, mask: Array, kl_coef: Array) -> RewardParts:
        """Rewards and penalties of the rollouts; see `RewardParts`."""
        kl = zero_masked(KL_PENALTIES[self._config.kl_penalty](scored), mask)
        own = self.own.get("compute_rewards")
        if own is None:
            penalized = penalize(self._config.kl_penalty)
            rewards = penalized(scores, scored, mask, kl_coef)
            return RewardParts(rewards, penalized(jnp.zeros_like(scores), scored, mask, kl_coef), kl)
        assert scored.ref_logprobs is not None, "PPO has a reference"
        given = (zero_masked(x, mask) for x in (scored.logprobs, scored.ref_logprobs))
        with self._owner.kl_ctl.bound(kl_coef):
            found = self._call(
                "compute_rewards", own, masked_sum(scores, mask, axis=1), *given, _as_ids(mask)
            )
        parts = found if isinstance(found, tuple | list) else (found, jnp.zeros_like(scores))
        names = ("rewards", "rewards without the scores", "KL")
        arrays = [
            zero_masked(checked_array(self._name("compute_rewards"), what, part, mask), mask)
            for what, part in zip(names, parts, strict=False)
        ]
        return RewardParts(arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else kl)

    def advantage_parts(self, rewards: Array, values: Array, mask: Array) -> tuple[Array, Array, Array]:
        """(values, advantages, returns)."""
        own = self.own.get("compute_advantages")
        if own is None:
            credit = self._default.estimate(rewards, values, mask, None)
            assert credit.returns is not None, "PPO has a critic"
            return values, credit.advantages, credit.returns
        given = zero_masked(values, mask), rewards, _as_ids(mask)
        found = self._call("compute_advantages", own, *given)
        name = self._name("compute_advantages")
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise ValueError(f"`{name}` must return (values, advantages, returns).")
        whats = ("values", "advantages", "returns")
        parts = [
            zero_masked(checked_array(name, what, x, mask), mask)
            for what, x in zip(whats, found, strict=True)
        ]
        return parts[0], parts[1], parts[2]

    def _loss(self, now: Predictions, targets: Targets) -> Any:
        own = self.own.get("loss")
        if own is None:
            return self._default.loss(now, targets)

        def loss(now: Predictions, targets: Targets) -> tuple[Array, dict[str, Any]]:
            mask, logits = targets.mask, now.logits()[..., : self._vocab_size()]
            assert now.values is not None, "PPO has a critic"
            assert targets.old_values is not None and targets.returns is not None, "PPO has a critic"
            old, old_values, vpreds, new, advantages, returns = (
                zero_masked(x, mask)
                for x in (
                    targets.old_logprobs,
                    targets.old_values,
                    now.values,
                    now.logprobs,
                    targets.advantages,
                    targets.returns,
                )
            )
            found = self._call(
                "loss", own, old, old_values, logits, vpreds, new, _as_ids(mask), advantages, returns
            )
            name = self._name("loss")
            if not isinstance(found, tuple | list) or len(found) != 3:
                raise ValueError(f"`{name}` must return (policy loss, value loss, statistics).")
            policy, value = (checked_scalar(name, "each loss", x) for x in found[:2])
            shown = {"loss/policy": policy, "loss/value": value, "loss/total": policy + value} | flat_names(
                found[2] or {}
            )
            kept = {OWN + key: x for key, x in shown.items() if key not in _PER_ACTION}
            return policy + value, kept

        return mean_loss(loss, ppo_policy_loss(self._config))(now, targets)

    def _name(self, method: str) -> str:
        return f"{type(self._owner).__name__}.{method}"

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        return traced(self._name(name), method, *arguments)


def _as_ids(mask: Array) -> Array:
    """A mask of ones and zeros, as scripts compute with."""
    return mask.astype(jnp.int32)
