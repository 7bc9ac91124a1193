# SPDX-License-Identifier: Apache-2.0
"""What each estimator optimises: its expectation over all 2^G groups against the closed form."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jrl.ops import (
    group_relative_advantages,
    group_statistics,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_scaled_advantages,
)
from tests.exact.enumerable import GOLDEN, enumerated, weight_of

CHANCES = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
SIZES = [2, 4, 8]


def equal_lengths(scores, groups, valid):
    return length_weighted_advantages(scores, jnp.full_like(scores, 3.0), groups, valid)


def only_mixed(advantages, scores, groups, valid):
    """Of kept groups alone: what dynamic sampling leaves."""
    return advantages(scores, groups, valid & group_statistics(scores, groups, valid).is_mixed)


grpo = partial(group_relative_advantages, scale="group", epsilon=0.0)
ESTIMATORS = {
    "rloo": leave_one_out_advantages,
    "dr_grpo": group_relative_advantages,
    "grpo_std0": grpo,
    "grpo_std1": partial(group_relative_advantages, scale="group", ddof=1, epsilon=0.0),
    "maxrl": mean_scaled_advantages,
    "grpo_std0_dynamic": partial(only_mixed, grpo),
    "rloo_dynamic": partial(only_mixed, leave_one_out_advantages),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_weight_of_a_prompt_is_the_closed_form(name, size):
    """By enumeration of all groups, in float32 as in training."""
    advantages = enumerated(ESTIMATORS[name], size)
    for p in CHANCES:
        found, _ = weight_of(advantages, p)
        if name.endswith("dynamic"):
            found /= 1 - p**size - (1 - p) ** size
        wanted = GOLDEN["weights"][str(size)][str(p)][name]
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6), p


CLOSED = {
    "rloo": (leave_one_out_advantages, lambda size, p: 1.0),
    "dr_grpo": (group_relative_advantages, lambda size, p: (size - 1) / size),
    "opo": (equal_lengths, lambda size, p: (size - 1) / size),
    "maxrl": (mean_scaled_advantages, lambda size, p: (1 - (1 - p) ** (size - 1)) / p),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_by_hand(name, size):
    estimator, closed = CLOSED[name]
    advantages = enumerated(estimator, size)
    for p in CHANCES:
        assert weight_of(advantages, p)[0] == pytest.approx(closed(size, p), rel=1e-6), p


@pytest.mark.parametrize("size", SIZES)
def test_variances_are_those_of_the_specification(size):
    with jax.enable_x64(True):
        plain = {"reinforce": lambda scores, groups, valid: scores, **ESTIMATORS}
        for name in ("reinforce", "rloo", "dr_grpo", "grpo_std0", "maxrl"):
            advantages = enumerated(plain[name], size)
            for p in (0.1, 0.5, 0.9):
                wanted = GOLDEN["bias_variance"][f"{name}/{size}/{p}"]
                weight, variance = weight_of(advantages, p)
                assert weight == pytest.approx(wanted["weight"], abs=1e-10)
                assert variance == pytest.approx(wanted["variance"], abs=1e-10)
