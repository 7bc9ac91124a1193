# SPDX-License-Identifier: Apache-2.0
"""Published policy gradients without a critic, as values of `GRPOConfig`: GRPO, RLOO, DAPO, GSPO and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jrl.learners.grpo_config import GRPOConfig, check_switch

_SCALED: Mapping[str, Any] = {"scale_rewards": "group", "dual_clip": None}
_KL_IN_REWARD: Mapping[str, Any] = {"beta": 0.05, "kl_placement": "reward", "kl_estimator": "k1"}
_SYMMETRIC: Mapping[str, Any] = {"epsilon_high": 0.2, "dual_clip": None}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    # Shao et al. 2024, arXiv:2402.03300.
    "grpo": {**_SCALED, **_SYMMETRIC, "reduction": "sequence", "beta": 0.04, "kl_estimator": "k3"},
    # Liu et al. 2025, arXiv:2503.20783.
    "dr_grpo": _SYMMETRIC,
    # Yu et al. 2025, arXiv:2503.14476; mean over all tokens, as its users have it. The paper samples until a batch is
    # full, however often; ten rounds leave it empty only where fewer than a tenth of the prompts teach anything.
    "dapo": {**_SCALED, "reduction": "token", "drop_uniform_groups": True, "max_sampling_rounds": 10},
    # TRL's name for the reduction alone.
    "bnpo": {**_SCALED, **_SYMMETRIC, "reduction": "token"},
    # Zheng et al. 2025, arXiv:2507.18071.
    "gspo": {
        **_SCALED,
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence",
    },
    "gspo_token": {
        **_SCALED,
        "importance_sampling_level": "sequence_token",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence",
    },
    # MiniMax 2025, arXiv:2506.13585.
    "cispo": {**_SCALED, "surrogate": "cispo", "reduction": "token"},
    # Ahmadian et al. 2024, arXiv:2402.14740, with the ratio of the token in the place of the whole completion's.
    "rloo": {
        **_SYMMETRIC,
        **_KL_IN_REWARD,
        "estimator": "leave_one_out",
        "num_generations": 4,
        "reduction": "token",
    },
    # Hu et al. 2025, arXiv:2501.03262.
    "reinforce_pp": {
        **_SYMMETRIC,
        **_KL_IN_REWARD,
        "estimator": "returns_to_go",
        "num_generations": 1,
        "reduction": "token",
    },
    "reinforce_pp_baseline": {
        **_SYMMETRIC,
        "estimator": "group_then_batch",
        "reduction": "token",
        "beta": 0.01,
        "kl_estimator": "k2",
    },
    # Li et al. 2023, arXiv:2310.10505.
    "remax": {
        **_KL_IN_REWARD,
        "estimator": "greedy",
        "num_generations": 1,
        "surrogate": "reinforce",
        "reduction": "sequence_sum",
    },
    # Hao et al. 2025, arXiv:2505.23585.
    "opo": {"estimator": "length_weighted", "surrogate": "reinforce", "reduction": "token"},
    # Qwen 2025, arXiv:2511.20347.
    "sapo": {**_SCALED, "surrogate": "sapo", "reduction": "sequence"},
    # Zhao et al. 2025, arXiv:2507.20673.
    "gmpo": {
        **_SCALED,
        "importance_sampling_level": "geometric",
        "surrogate": "plain",
        "epsilon": 0.4,
        "epsilon_high": 0.4,
        "reduction": "sequence",
    },
    # Tajwar, Zeng et al. 2026, arXiv:2602.02710.
    "maxrl": {**_SYMMETRIC, "estimator": "mean_scaled", "num_generations": 16, "reduction": "token"},
    # arXiv:2602.05261.
    "luspo": {
        **_SCALED,
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "reduction": "sequence_sum",
    },
    # arXiv:2602.10693.
    "vespo": {
        **_SCALED,
        "importance_sampling_level": "product",
        "surrogate": "vespo",
        "reduction": "token",
    },
    # arXiv:2602.04879.
    "dppo": {**_SCALED, "surrogate": "dppo_tv", "reduction": "token"},
    # Shrivastava et al. 2025, arXiv:2508.09726.
    "gfpo": {**_SCALED, "num_generations": 16, "num_kept": 8, "reduction": "token"},
}
"""Fields of `GRPOConfig` in which a published algorithm differs from the defaults."""


def algorithm(name: str, **fields: Any) -> GRPOConfig:
    """The configuration of a published algorithm.

    Args:
      name: A name of `ALGORITHMS`.
      **fields: Of `GRPOConfig`, in the place of the algorithm's own.
    Raises:
      ValueError: If there is no algorithm of this name, naming the closest; or as the configuration refuses its fields.
    """
    check_switch("name", name, tuple(ALGORITHMS))
    return GRPOConfig(**{**ALGORITHMS[name], **fields})


def switches(name: str) -> dict[str, Any]:
    """All fields that tell the algorithms apart, as this one has them: what to lay over a recipe of any other.

    `num_generations` is a size and stays the recipe's, unless the algorithm has a number of its own.

    Args:
      name: A name of `ALGORITHMS`.
    Raises:
      ValueError: As `algorithm`.
    """
    chosen = vars(algorithm(name))
    told = {field: None for fields in ALGORITHMS.values() for field in fields if field != "num_generations"}
    return {field: chosen[field] for field in told} | dict(ALGORITHMS[name])
