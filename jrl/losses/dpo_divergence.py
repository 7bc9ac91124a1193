# SPDX-License-Identifier: Apache-2.0
"""f-divergences in DPO: transforms of the log-ratios that the losses compare.

With t = π/π_ref and log t = Δ, each is f′(t) of the divergence D_f(π ‖ π_ref) that keeps the policy near its
reference, the constant such that f′(1) = 0. Only differences of two of them enter most losses, but those that
divide each by its completion's length see the constant.

Reference: Wang et al. 2023, arXiv:2309.16240.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.ops.checks import Scalar, check_float

MAX_EXPONENT = 80.0
"""Exponents are clamped at this: e^80 still is a float32, and a log-ratio beyond it teaches nothing further."""


def reverse_kl(log_ratios: Float[Array, "B"]) -> Float[Array, "B"]:
    """f′ = log t, the log-ratio itself: plain DPO. (The constant of f′ = log t + 1 is left out.)

    Args:
      log_ratios: log π/π_ref, in nats.
    Returns:
      Score of each completion, of any sign, in nats.
    Reference: Wang et al. 2023, arXiv:2309.16240, table 1.
    Example:
      >>> reverse_kl(jnp.array([0.5])).tolist()
      [0.5]
    """
    check_float("log_ratios", log_ratios)
    return log_ratios


def forward_kl(log_ratios: Float[Array, "B"]) -> Float[Array, "B"]:
    """f′ = 1 − 1/t, at most 1.

    Args:
      log_ratios: log π/π_ref, in nats.
    Returns:
      Score of each completion, at most 1.
    Reference: Wang et al. 2023, arXiv:2309.16240, table 1.
    Example:
      >>> forward_kl(jnp.log(jnp.array([1.0, 2.0]))).tolist()
      [0.0, 0.5]
    """
    check_float("log_ratios", log_ratios)
    return 1 - _exp(-log_ratios)


def js_divergence(log_ratios: Float[Array, "B"]) -> Float[Array, "B"]:
    """f′ = log(2t/(1 + t)), at most log 2: the Jensen-Shannon divergence, without its factor ½.

    Args:
      log_ratios: log π/π_ref, in nats.
    Returns:
      Score of each completion, at most log 2.
    Reference: Wang et al. 2023, arXiv:2309.16240, table 1.
    Example:
      >>> [round(float(x), 4) for x in js_divergence(jnp.log(jnp.array([1.0, 3.0])))]  # log 1, log 1.5
      [0.0, 0.4055]
    """
    check_float("log_ratios", log_ratios)
    return math.log(2) + jax.nn.log_sigmoid(log_ratios)


def alpha_divergence(log_ratios: Float[Array, "B"], *, alpha: Scalar) -> Float[Array, "B"]:
    """f′ = (t^(α−1) − 1)/(α − 1): the forward KL at α = 0, towards the reverse KL as α → 1.

    Deviates from the paper, whose α stands where 1 − α does here.

    Args:
      log_ratios: log π/π_ref, in nats.
      alpha: α, other than 1.
    Returns:
      Score of each completion, of any sign; at most 1/(1 − α) for α < 1.
    Reference: Wang et al. 2023, arXiv:2309.16240, table 1.
    Example:
      >>> round(float(alpha_divergence(jnp.log(jnp.array([3.0])), alpha=2.0)[0]), 4)  # (3 − 1)/1
      2.0
    """
    check_float("log_ratios", log_ratios)
    return (_exp((alpha - 1) * log_ratios) - 1) / (alpha - 1)


def _exp(x: Float[Array, "B"]) -> Float[Array, "B"]:
    return jnp.exp(jnp.minimum(x, MAX_EXPONENT))


@dataclass(frozen=True)
class Divergence:
    """An entry of `DIVERGENCES`.

    Attributes:
      function: Of the log-ratios.
      takes_alpha: Whether it takes `alpha`, too.
    Example:
      >>> Divergence(reverse_kl)(jnp.array([0.5]), alpha=1.0).tolist()
      [0.5]
    """

    function: Callable[..., Float[Array, "B"]]
    takes_alpha: bool = False

    def __call__(self, log_ratios: Float[Array, "B"], *, alpha: Scalar) -> Float[Array, "B"]:
        """f′ at these log-ratios; `alpha` is read only where the divergence has one."""
        return self.function(log_ratios, alpha=alpha) if self.takes_alpha else self.function(log_ratios)


DIVERGENCES: Mapping[str, Divergence] = {
    "reverse_kl": Divergence(reverse_kl),
    "forward_kl": Divergence(forward_kl),
    "js_divergence": Divergence(js_divergence),
    "alpha_divergence": Divergence(alpha_divergence, takes_alpha=True),
}
"""Divergences by the names of TRL's `f_divergence_type`."""
