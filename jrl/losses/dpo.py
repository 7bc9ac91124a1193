# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: a weighted sum of losses of pairs, with metrics of the implicit rewards.

The policy is its own reward model, r(x, y) = β·log π(y|x)/π_ref(y|x), and the losses fit that reward to the
preferences. Log-probabilities are summed over the completion, the prompt is not counted, and at π = π_ref both
rewards are 0 and the loss of DPO is log 2.

Reference: Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses.dpo_divergence import DIVERGENCES, Divergence
from jrl.losses.dpo_pairs import (
    Completion,
    Pairs,
    completion_logprobs,
    make_pairs,
    pairs_from_logprobs,
    pairs_per_chosen_token,
    wpo_weights,
)
from jrl.losses.dpo_terms import (
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    discopop_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    kto_pair_loss,
    nca_pair_loss,
    robust_loss,
    sft_term,
    sigmoid_loss,
    sigmoid_norm_loss,
    sppo_hard_loss,
)
from jrl.ops.checks import Scalar, check_positive, check_same_floats, check_share
from jrl.ops.masking import masked_sum
from jrl.ops.metrics import mean_metric
from jrl.ops.reductions import LossOut
from jrl.suggestions import did_you_mean
from jrl.typing import Metrics

__all__ = [
    "DIVERGENCES",
    "LOSSES",
    "Completion",
    "PairLoss",
    "Pairs",
    "completion_logprobs",
    "dpo_loss",
    "implicit_rewards",
    "make_pairs",
    "pairs_from_logprobs",
    "pairs_per_chosen_token",
    "wpo_weights",
]


@dataclass(frozen=True)
class PairLoss:
    """An entry of `LOSSES`.

    Attributes:
      function: `(pairs, *, settings) -> one value a pair`.
      settings: Names of the numbers it takes beside the pairs, those of `DPOConfig`.
      whole_batch: Whether the value of a pair depends on the others, so that no batch may be computed in parts.
      takes_divergence: Whether it reads what the divergence makes of the log-ratios, or the log-ratios themselves.
    Example:
      >>> loss = PairLoss(lambda pairs, *, beta: beta * pairs.margins, settings=("beta",))
      >>> pairs = pairs_from_logprobs(*jnp.array([[-1.0], [-3.0], [-2.0], [-2.0]]))  # δ = 2
      >>> loss(pairs, {"beta": 0.5, "label_smoothing": 0.0}).tolist()
      [1.0]
    """

    function: Callable[..., Float[Array, "B"]]
    settings: tuple[str, ...] = ("beta",)
    whole_batch: bool = False
    takes_divergence: bool = True

    def __call__(self, pairs: Pairs, settings: Mapping[str, Scalar]) -> Float[Array, "B"]:
        """The loss with what it takes of all settings."""
        return self.function(pairs, **{name: settings[name] for name in self.settings})


_SMOOTHED = ("beta", "label_smoothing")
LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid_loss, _SMOOTHED),
    "hinge": PairLoss(hinge_loss),
    "ipo": PairLoss(ipo_loss),
    "kto_pair": PairLoss(kto_pair_loss, whole_batch=True, takes_divergence=False),
    "exo_pair": PairLoss(exo_pair_loss, _SMOOTHED),
    "nca_pair": PairLoss(nca_pair_loss, takes_divergence=False),
    "robust": PairLoss(robust_loss, _SMOOTHED),
    "bco_pair": PairLoss(bco_pair_loss, takes_divergence=False),
    "sppo_hard": PairLoss(sppo_hard_loss, takes_divergence=False),
    "aot": PairLoss(aot_loss, _SMOOTHED, whole_batch=True, takes_divergence=False),
    "aot_unpaired": PairLoss(aot_unpaired_loss, _SMOOTHED, whole_batch=True, takes_divergence=False),
    "apo_zero": PairLoss(apo_zero_loss, takes_divergence=False),
    "apo_down": PairLoss(apo_down_loss, takes_divergence=False),
    "discopop": PairLoss(discopop_loss, ("beta", "discopop_tau")),
    "sft": PairLoss(sft_term, ()),
    "sigmoid_norm": PairLoss(sigmoid_norm_loss),
}
"""DPO's relatives by the names of TRL's `loss_type`."""


def implicit_rewards(
    logprobs: Float[Array, "B"], ref_logprobs: Float[Array, "B"], *, beta: Scalar
) -> Float[Array, "B"]:
    """r = β·log π(y|x)/π_ref(y|x), up to a number of x alone. No gradient.

    Args:
      logprobs: log π(y|x), summed over the completion, in nats.
      ref_logprobs: log π_ref(y|x), likewise.
      beta: β > 0.
    Returns:
      One a completion, of any sign.
    Raises:
      ValueError: If the shapes differ.
      TypeError: If either is not of a float dtype.
    Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 5.
    Example:
      >>> implicit_rewards(jnp.array([-10.0]), jnp.array([-11.0]), beta=0.5).tolist()
      [0.5]
    """
    check_same_floats("ref_logprobs", ref_logprobs, "logprobs", logprobs)
    return jax.lax.stop_gradient(beta * (logprobs - ref_logprobs))


def dpo_loss(
    chosen: Completion,
    rejected: Completion,
    valid: Bool[Array, "B"],
    *,
    terms: Sequence[tuple[str, float]],
    beta: Scalar,
    label_smoothing: Scalar,
    discopop_tau: Scalar,
    divergence: Divergence,
    alpha: Scalar,
    reference_free: bool,
    ld_alpha: Scalar | None,
    use_weighting: bool,
    pairs_per_token: Float[Array, ""] | None = None,
) -> LossOut:
    """DPO's loss, or a weighted sum of its relatives, summed over pairs.

    Args:
      chosen: The preferred completion of each pair; its `logprobs` are to be differentiated.
      rejected: The other one, in arrays of the same shape.
      valid: False on copies that only fill the batch up.
      terms: (name of `LOSSES`, weight) of each loss.
      beta: β > 0 of the implicit rewards.
      label_smoothing: ε in [0, 0.5).
      discopop_tau: τ > 0 of `discopop`.
      divergence: One of `DIVERGENCES`.
      alpha: α of the α-divergence, other than 1; other divergences do not read it.
      reference_free: Takes the reference to find all completions equally likely, its log-probabilities to be 0, in
        the losses; rewards keep the real one.
      ld_alpha: Weight, in [0, 1], of tokens beyond the shorter completion; None: 1.
      use_weighting: Weighs pairs as WPO does; `sft` too, pair by pair.
      pairs_per_token: Valid pairs over their chosen tokens in the whole optimizer batch, of which these rows may be
        a part; None: these rows are the whole.
    Returns:
      The sum over pairs, their number, and the metrics; all 0 without a valid pair.
    Raises:
      ValueError: If shapes differ, a term has no known name, or a number is outside its range.
      TypeError: If a mask is not boolean.
    Reference: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; the other losses: `jrl.losses.dpo_terms`.
    Example:
      >>> zero = jnp.zeros((1, 2))
      >>> rejected = Completion(zero, zero, zero, zero, zero, is_top=zero > 0, mask=zero == 0)
      >>> chosen = rejected._replace(ref_logprobs=zero - 0.5)  # log π/π_ref = 2·0.5
      >>> loss = dpo_loss(
      ...     chosen, rejected, jnp.ones(1, bool), terms=[("sigmoid", 1.0)], beta=1.0, label_smoothing=0.0,
      ...     discopop_tau=0.05, divergence=DIVERGENCES["reverse_kl"], alpha=1.0, reference_free=False,
      ...     ld_alpha=None, use_weighting=False,
      ... )
      >>> round(float(loss.loss_sum), 4)  # −log σ(1)
      0.3133
    """
    _check_names([name for name, _ in terms])
    check_positive("beta", beta)
    check_positive("discopop_tau", discopop_tau)
    check_share("label_smoothing", label_smoothing)
    if ld_alpha is not None:
        check_share("ld_alpha", ld_alpha)
    if divergence.takes_alpha and isinstance(alpha, int | float) and alpha == 1:
        raise ValueError(
            "`alpha` must not be 1 beside the α-divergence, whose formula divides by 1 − α, got 1: it becomes the "
            "reverse KL there, which is a divergence of its own."
        )
    chosen, rejected = (side._replace(mask=side.mask & valid[:, None]) for side in (chosen, rejected))
    num_pairs = jnp.sum(valid, dtype=jnp.float32)
    if pairs_per_token is None:
        pairs_per_token = pairs_per_chosen_token(chosen.mask, valid)

    pairs_of = partial(
        make_pairs,
        valid=valid,
        divergence=divergence,
        alpha=alpha,
        ld_alpha=ld_alpha,
        pairs_per_token=pairs_per_token,
    )
    compared = pairs_of(chosen, rejected)
    pairs = pairs_of(*map(_without_reference, (chosen, rejected))) if reference_free else compared
    settings = {"beta": beta, "label_smoothing": label_smoothing, "discopop_tau": discopop_tau}
    weights = wpo_weights(chosen, rejected) if use_weighting else jnp.ones_like(pairs.chosen)
    found = [(name, weight, weights * LOSSES[name](pairs, settings)) for name, weight in terms]
    losses = sum((weight * values for _, weight, values in found), start=jnp.zeros_like(weights))
    metrics: Metrics = {"dpo/loss": mean_metric(losses, valid), **_pair_metrics(compared, beta)}
    if len(found) > 1:
        metrics |= {f"dpo/{name}_loss": mean_metric(values, valid) for name, _, values in found}
    metrics |= _token_metrics(chosen, rejected)
    return LossOut(masked_sum(losses, valid), num_pairs, jax.lax.stop_gradient(metrics))


def _check_names(names: Sequence[str]) -> None:
    """Refuses names that `LOSSES` does not have."""
    unknown = [name for name in names if name not in LOSSES]
    if unknown:
        near = did_you_mean(unknown[0], LOSSES)
        raise ValueError(f"`terms` must name losses of {sorted(LOSSES)}, got {unknown}.{near}")


def _without_reference(side: Completion) -> Completion:
    return side._replace(ref_logprobs=jnp.zeros_like(side.ref_logprobs))


def _pair_metrics(pairs: Pairs, beta: Scalar) -> Metrics:
    """Implicit rewards and log-probabilities, over pairs."""
    chosen = implicit_rewards(pairs.chosen, pairs.ref_chosen, beta=beta)
    rejected = implicit_rewards(pairs.rejected, pairs.ref_rejected, beta=beta)
    valid = pairs.valid
    return {
        "rewards/chosen": mean_metric(chosen, valid),
        "rewards/rejected": mean_metric(rejected, valid),
        "rewards/margins": mean_metric(chosen - rejected, valid),
        "rewards/accuracies": mean_metric(chosen > rejected, valid),
        # Preferred to the other one, and yet less likely than under the reference.
        "rewards/displaced": mean_metric((chosen > rejected) & (chosen < 0), valid),
        "logps/chosen": mean_metric(pairs.chosen, valid),
        "logps/rejected": mean_metric(pairs.rejected, valid),
    }


def _token_metrics(chosen: Completion, rejected: Completion) -> Metrics:
    """Statistics of the policy's distributions at the completions' tokens."""
    both = [
        jnp.concatenate([x, y]) for x, y in ((chosen.entropy, rejected.entropy), (chosen.mask, rejected.mask))
    ]
    return {
        "logits/chosen": mean_metric(chosen.mean_logits, chosen.mask),
        "logits/rejected": mean_metric(rejected.mean_logits, rejected.mask),
        "dpo/entropy": mean_metric(both[0], both[1]),
        "dpo/token_accuracy": mean_metric(chosen.is_top, chosen.mask),
    }
