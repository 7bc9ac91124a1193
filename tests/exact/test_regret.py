# SPDX-License-Identifier: Apache-2.0
"""Training in the enumerable world: what each algorithm comes to, and where its expected gradient is 0."""

import pytest

from jrl.ops import kl_k2, kl_k3
from tests.exact.regret import (
    HELD_TO_REFERENCE,
    RIGHT_OR_WRONG,
    SHORT,
    Budget,
    fixed_point,
    regrets,
)


def test_every_algorithm_of_the_table_is_trained():
    assert len(RIGHT_OR_WRONG) == 20


def test_an_untrained_table_is_wrong_more_often_than_not():
    (left,) = regrets(RIGHT_OR_WRONG["rloo"], binary=True, budget=Budget(1, 1, 0.0), num_seeds=1)
    assert left > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT_OR_WRONG)
def test_every_algorithm_finds_what_is_right(name):
    (left,) = regrets(RIGHT_OR_WRONG[name], binary=True, budget=SHORT, num_seeds=1)
    # GFPO learns from the shortest samples alone, right or wrong: what it climbs is not the chance to be right.
    assert left < (0.06 if name == "gfpo" else 0.02)


@pytest.mark.slow
class TestFixedPoints:
    def test_k1_in_the_reward_ends_at_the_optimum(self):
        assert fixed_point(None, weight=1.0) == pytest.approx(0.0, abs=1e-10)

    @pytest.mark.parametrize(("estimator", "regret"), [(kl_k2, 0.020657), (kl_k3, 0.018746)])
    def test_a_kl_in_the_loss_ends_elsewhere(self, estimator, regret):
        assert fixed_point(estimator, weight=7 / 8) == pytest.approx(regret, rel=1e-3)

    def test_training_comes_near_to_them(self):
        budget = Budget(1500, 128, 0.05)
        (of_reward,) = regrets(HELD_TO_REFERENCE["rloo"], binary=False, budget=budget, num_seeds=1)
        (of_loss,) = regrets(
            HELD_TO_REFERENCE["GRPOConfig(), k2 in the loss"], binary=False, budget=budget, num_seeds=1
        )
        assert of_reward < 0.006 < 0.015 < of_loss < 0.04
