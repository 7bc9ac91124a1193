# SPDX-License-Identifier: Apache-2.0
"""Objectives: pure functions of arrays that return `(loss_sum, weight, metrics)`."""

from jrl.losses.ddpo import ddpo_loss
from jrl.losses.dpo import Completion, Pairs, dpo_loss, implicit_rewards, pairs_from_logprobs
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
from jrl.losses.ilql import (
    ILQLPredictions,
    awac_weights,
    bellman_targets,
    conservative_loss,
    expectile_loss,
    ilql_loss,
    q_loss,
)
from jrl.losses.policy_gradient import (
    KLTerm,
    PolicyLoss,
    Surrogate,
    Targets,
    ValueLoss,
    clipped,
    policy_gradient_loss,
    reinforce,
)
from jrl.losses.ppo import ppo_loss
from jrl.losses.reward_model import centering_loss, pairwise_loss, reward_model_loss
from jrl.losses.sft import sft_loss
from jrl.losses.surrogates import cispo, dppo_kl, dppo_tv, plain_ratio, sapo, vespo
from jrl.ops.ratios import token_ratio

__all__ = [
    "Completion",
    "ILQLPredictions",
    "KLTerm",
    "Pairs",
    "PolicyLoss",
    "Surrogate",
    "Targets",
    "ValueLoss",
    "aot_loss",
    "aot_unpaired_loss",
    "apo_down_loss",
    "apo_zero_loss",
    "awac_weights",
    "bco_pair_loss",
    "bellman_targets",
    "centering_loss",
    "cispo",
    "clipped",
    "conservative_loss",
    "ddpo_loss",
    "discopop_loss",
    "dpo_loss",
    "dppo_kl",
    "dppo_tv",
    "exo_pair_loss",
    "expectile_loss",
    "hinge_loss",
    "ilql_loss",
    "implicit_rewards",
    "ipo_loss",
    "kto_pair_loss",
    "nca_pair_loss",
    "pairs_from_logprobs",
    "pairwise_loss",
    "plain_ratio",
    "policy_gradient_loss",
    "ppo_loss",
    "q_loss",
    "reinforce",
    "reward_model_loss",
    "robust_loss",
    "sapo",
    "sft_loss",
    "sft_term",
    "sigmoid_loss",
    "sigmoid_norm_loss",
    "sppo_hard_loss",
    "token_ratio",
    "vespo",
]
