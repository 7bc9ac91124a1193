# SPDX-License-Identifier: Apache-2.0
"""Reductions from one loss per action to one number, chosen by passing the function.

Each returns `(loss_sum, weight)` and never divides: the learner does so once, by the summed weight of the
whole optimizer batch, which makes accumulation over microbatches and devices exact. A row without actions
adds 0 to both.

| | Σ loss / Σ weight | who is heard |
|---|---|---|
| `token_mean` | Σ ℓ / Σ length | long completions, in proportion to their length |
| `sequence_mean` | mean of per-completion means | every completion alike, so a token of a long one less |
| `constant_mean` | Σ ℓ / (N·L) | every token alike, whatever the lengths of the batch |
| `sequence_sum_mean` | mean of per-completion sums | every token alike: a completion is one action |
| `shared_mean` | Σ f·ℓ / Σ f | as the shares f say: `group_token_shares` hears every prompt alike |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.ops.checks import check_batch, check_mask, check_same_shape
from jrl.ops.groups import sum_of_group
from jrl.ops.masking import masked_mean, masked_sum, zero_masked
from jrl.ops.metrics import mean_metric
from jrl.typing import Mean, Metrics


class LossOut(NamedTuple):
    """Result of an objective: an undivided loss, its weight, and metrics.

    Attributes:
      loss_sum: Undivided loss; differentiate this.
      weight: What to divide by, once it is summed over the whole optimizer batch.
      metrics: What to log, as sums with weights.
    Example:
      >>> float(LossOut(jnp.float32(6), jnp.float32(4), {}).mean)
      1.5
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: Metrics

    @property
    def mean(self) -> Float[Array, ""]:
        """The loss, where these rows are the whole batch: the sum by its weight, and by 1 where that is below 1."""
        return self.loss_sum / jnp.maximum(self.weight, 1.0)


def token_mean(
    losses: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Every action weighs 1: `(Σ ℓ, number of actions)`.

    Args:
      losses: One value per action.
      mask: True on actions.
    Returns:
      Sum and weight.
    Reference: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3.
    Example:
      >>> loss_sum, weight = token_mean(jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[True, True, False]]))
      >>> float(loss_sum), float(weight)
      (3.0, 2.0)
    """
    check_batch(mask, losses=losses)
    return masked_sum(losses, mask), jnp.sum(mask, dtype=jnp.float32)


def sequence_mean(
    losses: Float[Array, "B T"], mask: Bool[Array, "B T"], *, count_empty: bool = False
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Every completion weighs 1, however long: `(Σ over rows of the mean ℓ, number of rows with actions)`.

    Args:
      losses: One value per action.
      mask: True on actions.
      count_empty: Whether rows without actions count, too, as TRL counts completions that it masks: a learner's rows of
        padding count then as well.
    Returns:
      Sum and weight.
    Reference: Shao et al. 2024, arXiv:2402.03300, eq. 3: the mean over tokens inside the mean over completions.
    Example:
      >>> losses, mask = jnp.array([[1.0, 3.0], [4.0, 9.0]]), jnp.array([[True, True], [True, False]])
      >>> [float(x) for x in sequence_mean(losses, mask)]  # 2 + 4, two rows
      [6.0, 2.0]
    """
    check_batch(mask, losses=losses)
    return jnp.sum(masked_mean(losses, mask, axis=1)), _num_rows(mask, count_empty)


def constant_mean(
    losses: Float[Array, "B T"], mask: Bool[Array, "B T"], *, length: int, count_empty: bool = False
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Every action weighs 1 against a fixed denominator: `(Σ ℓ, length · number of rows with actions)`.

    Args:
      losses: One value per action.
      mask: True on actions.
      length: L, usually the most tokens a completion may have.
      count_empty: As of `sequence_mean`.
    Returns:
      Sum and weight.
    Reference: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO), section 3.2.
    Example:
      >>> losses, mask = jnp.array([[1.0, 3.0], [4.0, 9.0]]), jnp.array([[True, True], [True, False]])
      >>> [float(x) for x in constant_mean(losses, mask, length=5)]
      [8.0, 10.0]
    """
    check_batch(mask, losses=losses)
    return masked_sum(losses, mask), length * _num_rows(mask, count_empty)


def sequence_sum_mean(
    losses: Float[Array, "B T"], mask: Bool[Array, "B T"], *, count_empty: bool = False
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A completion is one action, whose loss is that of all its tokens: `(Σ ℓ, number of rows with actions)`.

    The gradient of a sequence's log-probability has this form; its scale grows with the length.

    Args:
      losses: One per action.
      mask: True on actions.
      count_empty: As of `sequence_mean`.
    Returns:
      (sum of the losses, number of rows): scalars, to be added up before they are divided.
    Reference: Ahmadian et al. 2024, arXiv:2402.14740, section 2.
    Example:
      >>> mask = jnp.array([[True, True], [True, False]])
      >>> loss_sum, weight = sequence_sum_mean(jnp.array([[1.0, 2.0], [4.0, 9.0]]), mask)
      >>> float(loss_sum), float(weight)
      (7.0, 2.0)
    """
    return constant_mean(losses, mask, length=1, count_empty=count_empty)


def group_token_shares(mask: Bool[Array, "N T"], groups: Int[Array, "N"]) -> Float[Array, "N T"]:
    """Share of each action in the actions of its prompt: 1/Σ length over the group; those of a group add up to 1.

    Made of all rollouts before they are cut into minibatches, so that `shared_mean` adds up over them.

    Args:
      mask: True on actions.
      groups: Equal numbers are samples of one prompt.
    Returns:
      In [0, 1]; 0 where `mask` is False.
    Reference: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 8: the mean over tokens is within each prompt's group.
    Example:
      >>> mask = jnp.array([[True, True], [True, True], [True, False]])
      >>> group_token_shares(mask, jnp.array([7, 7, 2])).tolist()
      [[0.25, 0.25], [0.25, 0.25], [1.0, 0.0]]
    """
    check_mask(mask)
    check_same_shape("groups", groups, "mask[:, 0]", mask[:, 0])
    num_actions = sum_of_group(jnp.sum(mask, axis=1, dtype=float), groups)
    return jnp.where(mask, 1.0 / jnp.maximum(num_actions, 1.0)[:, None], 0.0)


def shared_mean(
    losses: Float[Array, "B T"], mask: Bool[Array, "B T"], shares: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Every action weighs its share f: `(Σ f·ℓ, Σ f)`.

    Args:
      losses: One per action.
      mask: True on actions.
      shares: f ≥ 0, such as `group_token_shares`.
    Returns:
      (sum, weight): scalars, to be added up before they are divided.
    Reference: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 8, in parts that add up.
    Example:
      >>> loss_sum, weight = shared_mean(jnp.array([[2.0, 4.0]]), jnp.ones((1, 2), bool), jnp.array([[0.5, 0.25]]))
      >>> float(loss_sum), float(weight)
      (2.0, 0.75)
    """
    check_batch(mask, losses=losses, shares=shares)
    shares = zero_masked(shares, mask)
    return jnp.sum(shares * zero_masked(losses, mask)), jnp.sum(shares)


def loss_of_mean(mean: Any, shown: Mapping[str, Any], mask: Bool[Array, "*B"]) -> LossOut:
    """A loss that is a mean over the entries of a mask, as one that adds up over minibatches: `(n·L, n)`.

    So several minibatches together learn from Σ n_i·L_i / Σ n_i, which of a mean over entries is the mean over all of
    them. Where no entry is True the loss weighs nothing, whatever it is.

    Args:
      mean: L.
      shown: Numbers to show. One is averaged as L is, an array of the mask's shape over its entries, any other array
        as its own mean.
      mask: True on actions, or on rows.
    Returns:
      The sum n·L, the weight n, and the metrics.
    Reference: none; a mean undone.
    Example:
      >>> loss = loss_of_mean(0.5, {"accuracy": 1.0}, jnp.array([True, True, False]))
      >>> float(loss.loss_sum), float(loss.weight)
      (1.0, 2.0)
    """
    weight = jnp.sum(mask, dtype=jnp.float32)

    def total(number: Any) -> Float[Array, ""]:
        return jnp.where(weight > 0, jnp.mean(jnp.asarray(number, jnp.float32)), 0.0) * weight

    def metric(value: Any) -> Mean:
        array = jnp.asarray(value, jnp.float32)
        return mean_metric(array, mask) if array.shape == mask.shape else Mean(total(array), weight)

    metrics: Metrics = {name: metric(value) for name, value in shown.items()}
    return LossOut(total(mean), weight, jax.lax.stop_gradient(metrics))


def _num_rows(mask: Bool[Array, "B T"], count_empty: bool) -> Float[Array, ""]:
    """Rows with at least one action: the others are padding of the batch, unless they count, too."""
    return jnp.sum(jnp.any(mask, axis=1) | count_empty, dtype=jnp.float32)
