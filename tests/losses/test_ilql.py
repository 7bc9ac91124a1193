# SPDX-License-Identifier: Apache-2.0
"""The ILQL loss against trlX's numbers, against arithmetic by hand, and against what it must be equal to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import (
    ILQLPredictions,
    awac_weights,
    bellman_targets,
    conservative_loss,
    expectile_loss,
    ilql_loss,
    monte_carlo_targets,
    q_loss,
)
from jrl.ops import finalize, gae, logprobs_from_logits, take_targets
from jrl.ops.reductions import LossOut
from jrl.typing import Max

SETTINGS = {
    name: np.float32(value)
    for name, value in dict(gamma=0.99, expectile=0.7, cql_coef=0.1, awac_coef=1.0, awac_beta=0.5).items()
}


def wave(shape: tuple[int, ...], offset: float) -> np.ndarray:
    """sin(0.37·j + offset) at row-major index j."""
    return np.sin(0.37 * np.arange(np.prod(shape)) + offset).reshape(shape).astype(np.float32)


def trlx_problem() -> tuple[ILQLPredictions, jax.Array, jax.Array]:
    """(predictions, rewards, mask) of the batch whose terms trlX's `ILQLConfig.loss` was run on: V = 3, two rows of
    actions at columns 0 1 2 and 0 1."""
    ids = np.array([[0, 1, 2, 1], [2, 0, 1, 0]])
    columns = np.array([[0, 1, 2], [0, 1, 0]])
    actions = np.take_along_axis(ids, columns + 1, axis=1).astype(np.int32)
    logits = np.take_along_axis(wave((2, 4, 3), 0.1), columns[..., None], axis=1)
    online, target = (np.stack([wave((2, 3, 3), o) for o in offsets]) for offsets in ((0.2, 0.3), (0.4, 0.5)))
    both = jnp.asarray(np.broadcast_to(actions, (2, 2, 3)))
    predictions = ILQLPredictions(
        logprobs=logprobs_from_logits(jnp.asarray(logits), jnp.asarray(actions)),
        values=jnp.asarray(wave((2, 4, 1), 0.6)[:, :3, 0]),
        q_values=jnp.moveaxis(take_targets(jnp.asarray(online), both), 0, -1),
        q_logprobs=jnp.moveaxis(logprobs_from_logits(jnp.asarray(online), both), 0, -1),
        target_q=jnp.min(take_targets(jnp.asarray(target), both), axis=0),
    )
    mask = jnp.array([[True, True, True], [True, True, False]])
    return predictions, jnp.array([[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]), mask


PREDICTIONS, REWARDS, MASK = jax.jit(trlx_problem)()
# Compiled once: every number that a test changes is traced.
compiled = jax.jit(ilql_loss)


def loss(predictions: ILQLPredictions = PREDICTIONS, **changes: object) -> LossOut:
    arguments = dict(rewards=REWARDS, mask=MASK) | SETTINGS | changes
    return compiled(predictions, **arguments)


def numbers(predictions: ILQLPredictions = PREDICTIONS, **changes: object) -> dict[str, float]:
    """Metrics, and the loss that the learner would divide."""
    out = loss(predictions, **changes)
    return finalize(out.metrics) | {"loss": float(out.loss_sum / out.weight)}


class TestGolden:
    def test_trlx(self):
        expected = {
            "loss": 2.0256622,
            "ilql/loss": 2.0256622,
            "ilql/q_loss": 0.6740996,
            "ilql/value_loss": 0.3286962,
            "ilql/cql_loss": 2.1623032,
            "ilql/awac_loss": 0.8066360,
            "ilql/value_mean": 0.7747821,
            "ilql/q_mean": (0.0873266 + 0.0631246) / 2,
            "ilql/awac_weight_mean": 0.7164744,
            "ilql/awac_weight_max": 1.0679559,
        }
        got = numbers()
        assert {name: got[name] for name in expected} == pytest.approx(expected, abs=5e-7)

    def test_trlx_spreads(self):
        """Standard deviations (ddof 0) and the smallest weight, which are not logged here."""
        assert np.std(PREDICTIONS.values[MASK]) == pytest.approx(0.1513925, abs=1e-6)
        deviations = [np.std(PREDICTIONS.q_values[MASK][:, head]) for head in range(2)]
        assert deviations == pytest.approx([0.6658121, 0.6630692], abs=1e-6)
        weights = awac_weights(PREDICTIONS.target_q, PREDICTIONS.values, beta=0.5)[MASK]
        assert np.std(weights) == pytest.approx(0.2470330, abs=1e-6)
        assert float(jnp.min(weights)) == pytest.approx(0.4684879, abs=1e-6)

    def test_lore_8_6_targets_of_three_steps_end_without_bootstrapping(self):
        # r = (0, 0, 2), V = (0.5, 0.25, 4), γ = ½: 0 + ½·0.25, 0 + ½·4, 2 + ½·0.  The second row ends after one action:
        # its reward 3 alone, though values and rewards go on behind it. The third has none.
        rewards = jnp.array([[0.0, 0.0, 2.0], [3.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
        values = jnp.array([[0.5, 0.25, 4.0], [0.5, 8.0, 8.0], [8.0, 8.0, 8.0]])
        mask = jnp.array([[True] * 3, [True, False, False], [False] * 3])
        targets = bellman_targets(rewards, values, mask, gamma=0.5)
        assert targets.tolist() == [[0.125, 2.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    def test_lore_8_6_behind_a_row_that_goes_on_stands_the_value_of_the_next_one(self):
        # γ = ½. 0 + ½·0.25, 1 + ½·8; the second row has one action, 3 + ½·(−2); the third has none.
        rewards, values = jnp.array([[0.0, 1.0], [3.0, 7.0], [7.0, 7.0]]), jnp.array([[0.5, 0.25]] * 3)
        mask = jnp.array([[True, True], [True, False], [False, False]])
        after = jnp.array([8.0, -2.0, 7.0])
        targets = bellman_targets(rewards, values, mask, gamma=0.5, after=after)
        assert targets.tolist() == [[0.125, 5.0], [2.0, 0.0], [0.0, 0.0]]

    def test_returns_of_the_data(self):
        # γ = ½. −1 + ½·(−1 + ½·8) = 0.5; the second row has one action, 3 + ½·(−2); the third has none.
        rewards = jnp.array([[-1.0, -1.0], [3.0, 7.0], [7.0, 7.0]])
        mask = jnp.array([[True, True], [True, False], [False, False]])
        after = jnp.array([8.0, -2.0, 7.0])
        targets = monte_carlo_targets(rewards, jnp.full((3, 2), 9.0), mask, gamma=0.5, after=after)
        assert targets.tolist() == [[0.5, 3.0], [2.0, 0.0], [0.0, 0.0]]
        ended = monte_carlo_targets(rewards, jnp.full((3, 2), 9.0), mask, gamma=0.5)
        assert ended.tolist() == [[-1.5, -1.0], [3.0, 0.0], [0.0, 0.0]]

    def test_expectile(self):
        # Q − V = 2 and −2: 0.7·4 and 0.3·4. At equality the loss is 0 on either side.
        values, target_q = jnp.array([[1.0, 1.0, 1.0]]), jnp.array([[3.0, -1.0, 1.0]])
        np.testing.assert_allclose(
            expectile_loss(values, target_q, expectile=0.7), [[2.8, 1.2, 0.0]], rtol=1e-6
        )

    def test_q_loss_sums_over_heads_without_a_half(self):
        # (3 − 1)² + (0 − 1)²
        assert q_loss(jnp.array([[[3.0, 0.0]]]), jnp.array([[1.0]])).tolist() == [[5.0]]

    def test_conservative_loss_is_the_cross_entropy_of_q(self):
        # −log(e³ / (e¹ + e² + e³)) = 0.407606, and log 3 for equal values
        q_values = jnp.array([[[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]])
        q_logprobs = logprobs_from_logits(q_values, jnp.array([[2, 0]]))
        assert conservative_loss(q_logprobs[:, None, :]).tolist() == [
            [pytest.approx(0.407606 + 1.098612, abs=1e-6)]
        ]


def cut(x: jax.Array) -> jax.Array:
    """A row of six as two of three."""
    return x.reshape(2, 3, *x.shape[2:])


class TestIdentities:
    @pytest.mark.parametrize("targets", [bellman_targets, monte_carlo_targets])
    def test_lore_8_6_a_row_in_two_parts_has_the_same_targets_and_the_same_loss(self, targets):
        """What stands behind the first part is the value of the second, or its return."""
        rng = np.random.default_rng(0)
        predictions = ILQLPredictions(
            *(
                jnp.asarray(rng.normal(size=shape), jnp.float32)
                for shape in ((1, 6), (1, 6), (1, 6, 2), (1, 6, 2), (1, 6))
            )
        )
        rewards, mask = jnp.asarray(rng.normal(size=(1, 6)), jnp.float32), jnp.ones((1, 6), bool)
        settings = {name: float(value) for name, value in SETTINGS.items()}
        numbers = {"gamma": settings["gamma"]}
        whole = targets(rewards, predictions.values, mask, **numbers)
        behind = {bellman_targets: predictions.values, monte_carlo_targets: whole}[targets][0, 3]
        after = jnp.stack([behind, jnp.float32(0.0)])
        parts = targets(cut(rewards), cut(predictions.values), cut(mask), after=after, **numbers)
        np.testing.assert_allclose(parts.reshape(1, 6), whole, rtol=1e-6)

        def total(predictions: ILQLPredictions, *arrays: jax.Array, **more: jax.Array) -> float:
            return float(ilql_loss(predictions, *arrays, targets=targets, **settings, **more).loss_sum)

        in_one = total(predictions, rewards, mask)
        in_two = total(jax.tree.map(cut, predictions), cut(rewards), cut(mask), after=after)
        assert in_two == pytest.approx(in_one, rel=1e-6)
        assert total(jax.tree.map(cut, predictions), cut(rewards), cut(mask)) != pytest.approx(
            in_one, rel=1e-3
        )

    def test_lore_8_5_at_one_half_the_expectile_is_half_the_squared_error_and_gives_the_mean(self):
        rng = np.random.default_rng(0)
        values, target_q = jnp.asarray(rng.normal(size=(2, 4, 5)), jnp.float32)
        half = expectile_loss(values, target_q, expectile=0.5)
        np.testing.assert_array_equal(half, 0.5 * jnp.square(target_q - values))

        @jax.jit
        def fitted(expectile: jax.Array) -> jax.Array:
            """The one V that fits all of `target_q` best, by gradient descent."""

            def error(v: jax.Array) -> jax.Array:
                return jnp.mean(expectile_loss(jnp.broadcast_to(v, (4, 5)), target_q, expectile=expectile))

            return jax.lax.fori_loop(0, 300, lambda _, v: v - 0.5 * jax.grad(error)(v), jnp.float32(0.0))

        def best(expectile: float) -> float:
            return float(fitted(np.float32(expectile)))

        mean, highest = float(jnp.mean(target_q)), float(jnp.max(target_q))
        assert best(0.5) == pytest.approx(mean, abs=1e-5)
        assert mean + 0.3 < best(0.9) < best(0.99) < highest
        assert best(0.1) < mean - 0.3

    def test_one_head_is_two_equal_heads_but_for_the_sum_over_heads(self):
        """Q and conservative term are sums over heads, so two equal heads count twice; nothing else changes."""
        first = PREDICTIONS._replace(
            q_values=PREDICTIONS.q_values[..., :1], q_logprobs=PREDICTIONS.q_logprobs[..., :1]
        )
        twice = first._replace(
            q_values=jnp.repeat(first.q_values, 2, axis=-1),
            q_logprobs=jnp.repeat(first.q_logprobs, 2, axis=-1),
        )
        one, two = numbers(first), numbers(twice)
        for name in one:
            factor = 2.0 if name in ("ilql/q_loss", "ilql/cql_loss") else 1.0
            if name not in ("loss", "ilql/loss"):
                assert two[name] == pytest.approx(factor * one[name], rel=1e-6), name
        assert two["loss"] - one["loss"] == pytest.approx(
            one["ilql/q_loss"] + 0.1 * one["ilql/cql_loss"], rel=1e-5
        )

    def test_targets_are_one_step_returns(self):
        """GAE at λ = 0 plus the value, where actions stand one after another."""
        advantages = gae(REWARDS, PREDICTIONS.values, MASK, gamma=0.99, gae_lambda=0.0)
        targets = bellman_targets(REWARDS, PREDICTIONS.values, MASK, gamma=0.99)
        np.testing.assert_allclose(targets, jnp.where(MASK, advantages + PREDICTIONS.values, 0.0), atol=1e-6)

    def test_without_beta_the_likelihood_is_plain(self):
        got = numbers(awac_beta=np.float32(0.0))
        assert got["ilql/awac_weight_mean"] == got["ilql/awac_weight_max"] == 1.0
        assert got["ilql/awac_loss"] == pytest.approx(-float(jnp.mean(PREDICTIONS.logprobs[MASK])), rel=1e-6)

    def test_the_total_is_the_weighted_sum_of_the_terms(self):
        got = numbers(cql_coef=np.float32(0.3), awac_coef=np.float32(2.0))
        total = (
            got["ilql/q_loss"]
            + got["ilql/value_loss"]
            + 0.3 * got["ilql/cql_loss"]
            + 2 * got["ilql/awac_loss"]
        )
        assert got["loss"] == pytest.approx(total, rel=1e-6)


@jax.jit
def gradient(predictions: ILQLPredictions, **arguments: object) -> ILQLPredictions:
    return jax.grad(lambda p: ilql_loss(p, **arguments).loss_sum)(predictions)


class TestGradients:
    def gradients(self, **changes: object) -> ILQLPredictions:
        return gradient(PREDICTIONS, **(dict(rewards=REWARDS, mask=MASK) | SETTINGS | changes))

    def test_lore_8_5_targets_and_weights_pass_no_gradient(self):
        """Of each term alone: V learns only towards Q̄, Q only towards y, and the likelihood moves neither."""
        gradients = self.gradients(cql_coef=np.float32(0.0))
        np.testing.assert_array_equal(gradients.target_q, 0.0)
        # dL/dV is that of the expectile alone: 2·w·(V − Q̄); y = r + γV' and exp(β(Q̄ − V)) are constants.
        p = PREDICTIONS
        weight = jnp.where(p.target_q >= p.values, 0.7, 0.3)
        np.testing.assert_allclose(
            gradients.values, jnp.where(MASK, 2 * weight * (p.values - p.target_q), 0.0), atol=1e-6
        )
        targets = bellman_targets(REWARDS, p.values, MASK, gamma=0.99)
        expected = 2 * (p.q_values - targets[..., None])
        np.testing.assert_allclose(gradients.q_values, jnp.where(MASK[..., None], expected, 0.0), atol=1e-6)
        weights = awac_weights(p.target_q, p.values, beta=0.5)
        np.testing.assert_allclose(gradients.logprobs, jnp.where(MASK, -weights, 0.0), atol=1e-6)

    def test_lore_8_5_the_conservative_term_lowers_unseen_actions(self):
        q_values = jnp.array([[[1.0, 2.0, 3.0]]])

        def term(q_values: jax.Array) -> jax.Array:
            return jnp.sum(conservative_loss(logprobs_from_logits(q_values, jnp.array([[0]]))[..., None]))

        down = -jax.grad(term)(q_values)[0, 0]
        assert down[0] > 0 > down[1] > down[2]

    def test_lore_1_12_what_stands_outside_the_mask_is_irrelevant(self):
        heads = jnp.broadcast_to(MASK[..., None], (2, 3, 2))
        dirty = ILQLPredictions(*(jnp.where(heads if x.ndim == 3 else MASK, x, jnp.nan) for x in PREDICTIONS))
        rewards = jnp.where(MASK, REWARDS, jnp.inf)
        assert numbers(dirty, rewards=rewards) == numbers()
        gradients = gradient(dirty, rewards=rewards, mask=MASK, **SETTINGS)
        jax.tree.map(np.testing.assert_array_equal, gradients, self.gradients())

    def test_a_batch_without_actions_weighs_nothing(self):
        out = loss(PREDICTIONS, mask=jnp.zeros_like(MASK))
        assert (float(out.loss_sum), float(out.weight)) == (0.0, 0.0)
        assert all(float(m.value) == -np.inf for m in out.metrics.values() if isinstance(m, Max))

    def test_huge_advantages_keep_the_weight_finite(self):
        far = PREDICTIONS._replace(target_q=PREDICTIONS.target_q + 1e4)
        got = numbers(far)
        assert got["ilql/awac_weight_max"] == pytest.approx(np.exp(20.0))
        assert np.isfinite(list(got.values())).all()


class TestErrors:
    def test_shapes_are_checked(self):
        with pytest.raises(ValueError, match=r"`values` must have shape \(2, 3\) like `mask`, got \(2, 4\)"):
            loss(PREDICTIONS._replace(values=jnp.zeros((2, 4))))
        with pytest.raises(
            ValueError, match=r"`q_logprobs` must have shape \(2, 3, 2\) like `q_values`, got"
        ):
            loss(PREDICTIONS._replace(q_logprobs=jnp.zeros((2, 3, 1))))
