# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO and RLOO as the faces bind them, against the values that TRL 1.16's own loss gave (`tests/losses`).

`tests/losses/test_policy_gradient_trl.py` compares far more of them where TRL is installed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import Targets
from jrl.trl.group_method import (
    GRPOMethod,
    RLOOMethod,
    grpo_advantages,
    grpo_loss,
    grpo_recipe,
    rloo_advantages,
    rloo_loss,
    rloo_recipe,
)
from jrl.typing import Predictions, SamplingRules
from tests.losses.policy_gradient_cases import (
    ADVANTAGES,
    BATCH,
    CASES,
    GROUPS,
    MASK,
    advantages_of,
    without_row,
)

NO_KL = {"loss_type": "grpo", "beta": 0.0}
GSPO = {"importance_sampling_level": "sequence"}
WIDE = {"epsilon": 0.1, "epsilon_high": 0.1}
# Golden case -> fields of TRL's configuration.
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "grpo_kl_ratio": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "two_sided": {"epsilon_high": 0.28, "delta": 4.0},
    "gspo": {**NO_KL, **GSPO, "epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo_wide": {**NO_KL, **GSPO, **WIDE},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "cispo_cap5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", **GSPO, **WIDE},
    "vespo": {"loss_type": "vespo"},
    "dapo_off_policy_mask": {"epsilon_high": 0.28, "off_policy_mask_threshold": -0.099},
    "masked_row_grpo": NO_KL,
    "masked_row_dr_grpo": {"loss_type": "dr_grpo"},
    "masked_row_dapo": {},
}
SCALINGS = {"grpo_std1": "group", "batch_std1": "batch", "centred": "none"}


def method(**fields: Any) -> GRPOMethod:
    return GRPOMethod(gen_kwargs={"max_new_tokens": BATCH["constant_length"]}, num_generations=4, **fields)


def loss_and_gradient(loss: Any, advantages: np.ndarray, mask: np.ndarray) -> tuple[float, np.ndarray]:
    def hidden(name: str) -> jax.Array:
        return jnp.asarray(np.where(mask, BATCH[name], np.nan))

    def of(logprobs: jax.Array) -> jax.Array:
        targets = Targets(
            hidden("old_logprobs"),
            None,
            jnp.asarray(advantages),
            None,
            jnp.asarray(mask),
            ref_logprobs=hidden("ref_logprobs"),
            sampler_logprobs=hidden("sampler_logprobs"),
        )
        out = loss(Predictions(logprobs, None, None, lambda: logprobs[..., None]), targets)
        return out.loss_sum / out.weight.astype(logprobs.dtype)

    found, gradient = jax.value_and_grad(of)(hidden("logprobs"))
    return float(found), np.asarray(gradient)


@pytest.mark.parametrize("name", GRPO)
def test_golden_losses_of_grpo(name):
    """In double precision, 1e-10. Of a masked row TRL's value is 11/12 of jrl's: it counts that row."""
    case, mask = CASES[name], without_row(6) if name.startswith("masked_row") else MASK
    of_trl = case.get("loss_trl", case["loss"])
    with jax.enable_x64(True):
        found, gradient = loss_and_gradient(
            grpo_loss(method(**GRPO[name])), advantages_of(case["advantages"], mask), mask
        )
    assert found == pytest.approx(of_trl, rel=1e-10)
    wanted = np.asarray(case["grad"]) * (of_trl / case["loss"])
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-10)


def test_golden_loss_of_rloo():
    case = CASES["rloo_trl"]
    with jax.enable_x64(True):
        found, gradient = loss_and_gradient(rloo_loss(RLOOMethod()), advantages_of(case["advantages"]), MASK)
    assert found == pytest.approx(case["loss"], rel=1e-10)
    np.testing.assert_allclose(gradient, case["grad"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SCALINGS)
def test_golden_advantages_of_grpo(name):
    given = jnp.asarray(BATCH["scores"]), None, jnp.asarray(GROUPS), jnp.ones(12, bool)
    found = grpo_advantages(method(scale_rewards=SCALINGS[name]), *given)
    np.testing.assert_allclose(found, ADVANTAGES[name]["value"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "normalize"), [("rloo", False), ("rloo_normalized", True)])
def test_golden_advantages_of_rloo(name, normalize):
    given = jnp.asarray(BATCH["scores"]), None, jnp.asarray(GROUPS), jnp.ones(12, bool)
    found = rloo_advantages(RLOOMethod(normalize_advantages=normalize), *given)
    np.testing.assert_allclose(found, ADVANTAGES[name]["value"], rtol=1e-5, atol=1e-6)


def test_recipes_hold_a_reference_where_there_is_a_kl():
    assert grpo_recipe(method()).kl is None and rloo_recipe(RLOOMethod(beta=0.0)).kl is None
    assert (
        grpo_recipe(method(beta=0.04)).compares_scores and rloo_recipe(RLOOMethod(beta=0.0)).compares_scores
    )
    assert not rloo_recipe(RLOOMethod(beta=0.04)).compares_scores, "the KL is a part of the score"
    assert grpo_recipe(method(beta=0.04)).kl == rloo_recipe(RLOOMethod(beta=0.04)).kl
    assert (
        grpo_recipe(method(num_iterations=3)).num_epochs
        == rloo_recipe(RLOOMethod(num_iterations=3)).num_epochs
    )


@pytest.mark.parametrize(("make", "config"), [(grpo_recipe, GRPOMethod), (rloo_recipe, RLOOMethod)])
def test_completions_that_were_cut_are_left_out_where_that_is_asked_for(make, config):
    assert make(config(mask_truncated_completions=True)).sampling == SamplingRules(mask_truncated=True)
    assert make(config()).sampling == SamplingRules()


def test_rows_that_are_counted_are_shuffled_among_the_others():
    assert grpo_recipe(method(loss_type="grpo")).spread_empty and rloo_recipe(RLOOMethod()).spread_empty


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "gspo"}, "`method.loss_type` must be one of"),
        ({"importance_sampling_level": "row"}, "must be one of \\('token', 'sequence'\\)"),
        ({"scale_rewards": "all"}, "`method.scale_rewards`"),
        ({"multi_objective_aggregation": "sum"}, "`method.multi_objective_aggregation`"),
        ({"loss_type": "sapo", "delta": 4.0}, "has no clip to reach beyond"),
        ({"delta": 1.1}, "above 1 \\+ `epsilon_high` = 1.2"),
        ({"loss_type": "vespo", **GSPO}, "whole completion in any case"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "a mean over tokens"),
        ({"entropy_coef": -0.1}, "`method.entropy_coef` must be at least 0"),
        ({"beta": -1.0}, "`method.beta`"),
        ({"num_iterations": 0}, "`method.num_iterations`"),
        ({"epsilon": 0.0}, "`method.epsilon`"),
        ({"epsilon_high": 0.0}, "`method.epsilon_high`"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        method(**fields)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"`method.num_generations` must be at least 2"):
        RLOOMethod(num_generations=1)
