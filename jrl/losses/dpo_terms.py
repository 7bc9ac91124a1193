# SPDX-License-Identifier: Apache-2.0
"""Losses of preference pairs, each a pure function of `Pairs` that returns one value a pair, not averaged.

In every formula Δ⁺ and Δ⁻ are the log-ratios log π/π_ref of the chosen and the rejected completion, s⁺ and s⁻ what
the divergence makes of them (the same under the reverse KL), δ = s⁺ − s⁻, σ the logistic function and ε
`label_smoothing`. β is the `beta` of implicit rewards β·Δ. Where a loss has no δ in its paper but single
log-ratios, it reads Δ, whatever the divergence.

Three of them look at more than one pair at a time: `aot_loss`, `aot_unpaired_loss` and `kto_pair_loss`. What they
return of a part of a batch is not a part of what they return of the whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses.dpo_divergence import MAX_EXPONENT
from jrl.losses.dpo_pairs import Pairs
from jrl.ops.checks import Scalar, check_positive
from jrl.ops.logistic import logistic_loss, smoothed_logistic_loss
from jrl.ops.masking import masked_mean


def sigmoid_loss(pairs: Pairs, *, beta: Scalar, label_smoothing: Scalar) -> Float[Array, "B"]:
    """ℓ = −(1 − ε)·log σ(βδ) − ε·log σ(−βδ): DPO, and cDPO where ε > 0. log 2 at π = π_ref.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      label_smoothing: ε in [0, 0.5).
    Returns:
      Loss >= 0 per pair, log 2 where δ = 0. Not averaged.
    Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ε: Mitchell 2023, "A note on DPO with noisy
    preferences and relationship to IPO".
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(sigmoid_loss(pairs, beta=1.0, label_smoothing=0.0)[0]), 4)  # −log σ(2)
      0.1269
    """
    return smoothed_logistic_loss(beta * pairs.margins, label_smoothing=label_smoothing)


def hinge_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = max(0, 1 − βδ), the loss of SLiC on log-ratios.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss >= 0 per pair, 1 where δ = 0. Not averaged.
    Reference: Zhao et al. 2023 (SLiC), arXiv:2305.10425.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(hinge_loss(pairs, beta=0.25)[0]), 4)  # 1 − 0.25·2
      0.5
    """
    return jax.nn.relu(1 - beta * pairs.margins)


def ipo_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = (s⁺/n⁺ − s⁻/n⁻ − 1/(2β))², n the number of tokens; β is the paper's τ.

    Deviates from the paper's formula, which has no lengths, as the paper's own experiments do: without them the
    target 1/(2β) is one of sums, and what it asks of a token depends on how many there are.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss >= 0 per pair, in squared nats. Not averaged.
    Reference: Azar et al. 2023, arXiv:2310.12036, eq. 17.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(ipo_loss(pairs, beta=1.0)[0]), 4)  # (2 − ½)², one token each
      2.25
    """
    return jnp.square(_mean_margins(pairs) - 1 / (2 * beta))


def kto_pair_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = ½·[1 − σ(β(Δ⁺ − K⁻))] + ½·[1 − σ(β(K⁺ − Δ⁻))],  K = max(0, mean of Δ over the batch).

    The zero point of each half is estimated from the other half of the batch. Deviates from the paper, which stops
    the gradient at K: here it flows, as in TRL 0.7.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss in [0, 1] per pair. Not averaged.
    Reference: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7, for pairs.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(kto_pair_loss(pairs, beta=1.0)[0]), 4)  # ½·(1 − σ(1)) + ½·(1 − σ(2))
      0.1941
    """
    chosen_kl, rejected_kl = (
        jnp.maximum(masked_mean(ratios, pairs.valid), 0)
        for ratios in (pairs.chosen_ratios, pairs.rejected_ratios)
    )
    desirable = jax.nn.sigmoid(beta * (pairs.chosen_ratios - rejected_kl))
    undesirable = jax.nn.sigmoid(beta * (chosen_kl - pairs.rejected_ratios))
    return (2 - desirable - undesirable) / 2


def exo_pair_loss(pairs: Pairs, *, beta: Scalar, label_smoothing: Scalar) -> Float[Array, "B"]:
    """ℓ = KL(q ‖ p) of q = (σ(βδ), σ(−βδ)) from p = (1 − ε, ε): the reverse of cDPO's direction. Needs ε > 0.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      label_smoothing: ε in (0, 0.5).
    Returns:
      Loss >= 0 per pair, but for rounding. Not averaged.
    Raises:
      ValueError: If it is not positive, or 1: the logarithms of ε and of 1 − ε are in the loss.
    Reference: EXO, Ji et al. 2024, arXiv:2402.00856, eq. 16.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(exo_pair_loss(pairs, beta=1.0, label_smoothing=0.5)[0]), 4)  # log 2 − H(σ(2))
      0.3278
    """
    check_positive("label_smoothing", label_smoothing)
    _check_below("label_smoothing", label_smoothing, 1.0)
    logits = beta * pairs.margins
    right = jax.nn.sigmoid(logits) * (jax.nn.log_sigmoid(logits) - jnp.log1p(-label_smoothing))
    return right + jax.nn.sigmoid(-logits) * (jax.nn.log_sigmoid(-logits) - jnp.log(label_smoothing))


def nca_pair_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = −log σ(βΔ⁺) − ½·log σ(−βΔ⁺) − ½·log σ(−βΔ⁻): it holds the chosen likelihood up.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss > 0 per pair. Not averaged.
    Reference: Chen et al. 2024, arXiv:2402.05369, for pairs.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(nca_pair_loss(pairs, beta=1.0)[0]), 4)  # −log σ(1) − ½·log σ(−1) − ½·log σ(1)
      1.1265
    """
    chosen, rejected = beta * pairs.chosen_ratios, beta * pairs.rejected_ratios
    return logistic_loss(chosen) + (logistic_loss(-chosen) + logistic_loss(-rejected)) / 2


def robust_loss(pairs: Pairs, *, beta: Scalar, label_smoothing: Scalar) -> Float[Array, "B"]:
    """ℓ = [−(1 − ε)·log σ(βδ) + ε·log σ(−βδ)]/(1 − 2ε): DPO's loss, unbiased where a share ε of labels is flipped.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      label_smoothing: ε in [0, 0.5).
    Returns:
      Loss per pair, which may fall below 0 where ε > 0. Not averaged.
    Raises:
      ValueError: If it is 0.5 or more: labels that say nothing, or the opposite, cannot be corrected for.
    Reference: Ray Chowdhury et al. 2024, arXiv:2403.00409.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(robust_loss(pairs, beta=1.0, label_smoothing=0.25)[0]), 4)  # (¾·0.1269 − ¼·2.1269)/½
      -0.8731
    """
    _check_below("label_smoothing", label_smoothing, 0.5)
    logits = beta * pairs.margins
    kept, flipped = logistic_loss(logits), logistic_loss(-logits)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def bco_pair_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = −log σ(βΔ⁺) − log σ(−βΔ⁻): a classifier whose logit is the implicit reward.

    Deviates from the paper, which subtracts a running mean of the rewards: here the logit 0 is π = π_ref.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss > 0 per pair, 2·log 2 where both log-ratios are 0. Not averaged.
    Reference: Jung et al. 2024, arXiv:2404.04656.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(bco_pair_loss(pairs, beta=1.0)[0]), 4)  # −2·log σ(1)
      0.6265
    """
    return logistic_loss(beta * pairs.chosen_ratios) + logistic_loss(-beta * pairs.rejected_ratios)


def sppo_hard_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = (Δ⁺ − 1/(2β))² + (Δ⁻ + 1/(2β))²: the win rate taken to be 1 for the chosen, 0 for the rejected one.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss >= 0 per pair, in squared nats. Not averaged.
    Reference: Wu et al. 2024, arXiv:2405.00675, eq. 4.7.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(sppo_hard_loss(pairs, beta=1.0)[0]), 4)  # ½² + ½²
      0.5
    """
    target = 0.5 / beta
    return jnp.square(pairs.chosen_ratios - target) + jnp.square(pairs.rejected_ratios + target)


def aot_loss(pairs: Pairs, *, beta: Scalar, label_smoothing: Scalar) -> Float[Array, "B"]:
    """cDPO's loss of d = sort(log π(y⁺)/π(y⁻)) − sort(log π_ref(y⁺)/π_ref(y⁻)), sorted over the batch.

    The distribution of the policy's margins is to dominate that of the reference's; which pair a margin comes from
    does not matter. The loss of rank k stands at the pair whose policy margin has rank k.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      label_smoothing: ε in [0, 0.5).
    Returns:
      Loss >= 0 per pair. Not averaged.
    Reference: Melnyk et al. 2024, arXiv:2406.05882.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(aot_loss(pairs, beta=1.0, label_smoothing=0.0)[0]), 4)  # one pair: as `sigmoid_loss`
      0.1269
    """
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return _of_ranks(policy, reference, pairs.valid, beta=beta, label_smoothing=label_smoothing)


def aot_unpaired_loss(pairs: Pairs, *, beta: Scalar, label_smoothing: Scalar) -> Float[Array, "B"]:
    """cDPO's loss of d = sort(Δ⁺) − sort(Δ⁻), sorted over the batch.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      label_smoothing: ε in [0, 0.5).
    Returns:
      Loss >= 0 per pair. Not averaged.
    Reference: Melnyk et al. 2024, arXiv:2406.05882.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(aot_unpaired_loss(pairs, beta=1.0, label_smoothing=0.0)[0]), 4)  # one pair: as `sigmoid_loss`
      0.1269
    """
    chosen, rejected = pairs.chosen_ratios, pairs.rejected_ratios
    return _of_ranks(chosen, rejected, pairs.valid, beta=beta, label_smoothing=label_smoothing)


def apo_zero_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = 1 − σ(βΔ⁺) + σ(βΔ⁻): chosen up, rejected down, for chosen ones better than what the policy writes.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss in [0, 2] per pair, 1 where both log-ratios are 0. Not averaged.
    Reference: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(apo_zero_loss(pairs, beta=1.0)[0]), 4)  # 1 − σ(1) + σ(−1)
      0.5379
    """
    return 1 - jax.nn.sigmoid(beta * pairs.chosen_ratios) + jax.nn.sigmoid(beta * pairs.rejected_ratios)


def apo_down_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = σ(βΔ⁺) + 1 − σ(β(Δ⁺ − Δ⁻)): both down, for chosen ones worse than what the policy writes.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss in [0, 2] per pair, 1 where both log-ratios are 0. Not averaged.
    Reference: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(apo_down_loss(pairs, beta=1.0)[0]), 4)  # σ(1) + 1 − σ(2)
      0.8503
    """
    ratios = pairs.chosen_ratios - pairs.rejected_ratios
    return jax.nn.sigmoid(beta * pairs.chosen_ratios) + 1 - jax.nn.sigmoid(beta * ratios)


def discopop_loss(pairs: Pairs, *, beta: Scalar, discopop_tau: Scalar) -> Float[Array, "B"]:
    """ℓ = (1 − w)·(−log σ(u)) + w·e^(−u),  u = βδ, w = σ(u/τ): found by a search over programs, not convex.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
      discopop_tau: τ > 0, in units of βδ.
    Returns:
      Loss >= 0 per pair. Not averaged.
    Reference: Lu et al. 2024, arXiv:2406.08414, eq. 5.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(discopop_loss(pairs, beta=1.0, discopop_tau=1.0)[0]), 4)  # w = σ(2): 0.1192·0.1269 + 0.8808·e^−2
      0.1343
    """
    logits = beta * pairs.margins
    modulation = jax.nn.sigmoid(logits / discopop_tau)
    # Where the exponent is clamped, the weight beside it has long been 0.
    exponential = jnp.exp(jnp.minimum(-logits, MAX_EXPONENT))
    return (1 - modulation) * logistic_loss(logits) + modulation * exponential


def sft_term(pairs: Pairs) -> Float[Array, "B"]:
    """ℓ = −log π(y⁺|x)·(pairs/tokens): its mean over pairs is the cross-entropy per chosen token.

    Both counts are those of the whole optimizer batch, so that microbatches add up exactly.

    Args:
      pairs: Sums and log-ratios of each pair.
    Returns:
      Loss >= 0 per pair. Not averaged.
    Reference: none; maximum likelihood.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(sft_term(pairs)[0]), 4)  # −log π(y⁺) of one token
      1.0
    """
    return pairs.chosen_nll * pairs.pairs_per_token


def sigmoid_norm_loss(pairs: Pairs, *, beta: Scalar) -> Float[Array, "B"]:
    """ℓ = −log σ(β(s⁺/n⁺ − s⁻/n⁻)), n the number of tokens: DPO on means.

    Args:
      pairs: Sums and log-ratios of each pair.
      beta: β > 0.
    Returns:
      Loss >= 0 per pair, log 2 for equal means. Not averaged.
    Reference: Lambert et al. 2024 (Tülu 3), arXiv:2411.15124, section 5.1.2.
    Example:
      >>> from jrl.losses.dpo_pairs import pairs_from_logprobs
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # Δ⁺ = 1, Δ⁻ = −1
      >>> round(float(sigmoid_norm_loss(pairs, beta=1.0)[0]), 4)  # −log σ(2), one token each
      0.1269
    """
    return logistic_loss(beta * _mean_margins(pairs))


def _check_below(name: str, value: Scalar, bound: float) -> None:
    """Raises ValueError if a Python number is not < bound; a traced scalar cannot be looked at and passes."""
    if isinstance(value, int | float) and not value < bound:
        raise ValueError(f"`{name}` must be < {bound}, got {value}.")


def _mean_margins(pairs: Pairs) -> Float[Array, "B"]:
    """s⁺/n⁺ − s⁻/n⁻: differences of means over tokens."""
    return pairs.chosen_scores / pairs.chosen_lengths - pairs.rejected_scores / pairs.rejected_lengths


def _of_ranks(
    upper: Float[Array, "B"],
    lower: Float[Array, "B"],
    valid: Bool[Array, "B"],
    *,
    beta: Scalar,
    label_smoothing: Scalar,
) -> Float[Array, "B"]:
    """cDPO's loss of the difference of the k-th smallest of each, at the row of the k-th smallest `upper`."""
    order = jnp.argsort(jnp.where(valid, upper, jnp.inf))
    lower_order = jnp.argsort(jnp.where(valid, lower, jnp.inf))
    # Rows that do not count come last on both sides, so that they only meet each other.
    losses = smoothed_logistic_loss(
        beta * (upper[order] - lower[lower_order]), label_smoothing=label_smoothing
    )
    return losses[jnp.argsort(order)]
