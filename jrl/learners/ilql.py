# SPDX-License-Identifier: Apache-2.0
"""Implicit language Q-learning: offline, from samples with a reward each.

Reference: Snell et al. 2022, arXiv:2206.11871.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jrl.learners.config import MethodConfig, check_fields


def _steered_sampling() -> dict[str, Any]:
    return {"max_new_tokens": 56, "top_k": 20, "beta": 1.0, "temperature": 1.0}


@dataclass(kw_only=True)
class ILQLConfig(MethodConfig):
    """Implicit language Q-learning; `gen_kwargs` may hold `beta`, the weight of Q − V in sampling (default 1).

    Attributes:
      tau: Expectile of the value function, in (0, 1); above 0.5 it leans to the better actions.
      gamma: Discount per token.
      cql_scale: Weight of the conservative term, which keeps Q of unseen actions low.
      awac_scale: Weight of the behaviour's log-likelihood.
      alpha: Share of the online Q heads that a sync moves the target heads by; 1 copies.
      beta: Exponent of exp(beta · (Q − V)) that weighs the log-likelihood; 0 is plain likelihood. Not the `beta` of
        `gen_kwargs`.
      steps_for_target_q_sync: Optimizer steps between two syncs.
      two_qs: Whether there are two Q heads, of which the smaller one counts, or one.
    """

    name: str = "ILQLConfig"
    tau: float = 0.7
    gamma: float = 0.99
    cql_scale: float = 0.1
    awac_scale: float = 1.0
    alpha: float = 0.001
    beta: float = 0.0
    steps_for_target_q_sync: int = 5
    two_qs: bool = True
    gen_kwargs: dict[str, Any] = field(default_factory=_steered_sampling)

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            ("tau", 0 < self.tau < 1, "in (0, 1)"),
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("cql_scale", self.cql_scale >= 0, "at least 0"),
            ("awac_scale", self.awac_scale >= 0, "at least 0"),
            ("alpha", 0 < self.alpha <= 1, "in (0, 1]"),
            ("beta", self.beta >= 0, "at least 0"),
            ("steps_for_target_q_sync", self.steps_for_target_q_sync >= 1, "at least 1"),
        )
