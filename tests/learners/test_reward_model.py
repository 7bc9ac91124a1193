# SPDX-License-Identifier: Apache-2.0
"""The reward model's update on the smallest scorer there is: a weight for each token, summed over the text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.reward_model import make_reward_model_update, reward_model_objective
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.state import init_train_state
from jrl.ops.metrics import finalize
from jrl.typing import ComparisonBatch, ModelInputs
from tests.learners.batches import random_comparisons, sgd
from tests.tiny import VOCAB_SIZE

BATCH = random_comparisons(8)
PARAMS = {"weights": jnp.asarray(np.random.default_rng(1).normal(size=VOCAB_SIZE), jnp.float32)}


class SumScorer:
    """Scores, and what it was called with."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.keys: list[Any] = []

    def __call__(self, params: Any, frozen: Any, inputs: ModelInputs, dropout_key: Any) -> jax.Array:
        del frozen
        self.rows.append(inputs.tokens.shape[0])
        self.keys.append(dropout_key)
        noise = 0.0 if dropout_key is None else jax.random.normal(dropout_key, inputs.tokens.shape[:1])
        return jnp.where(inputs.attention_mask, params["weights"][inputs.tokens], 0.0).sum(axis=1) + noise


def run(
    batch: ComparisonBatch,
    *,
    minibatch_size: int = 8,
    batch_size: int = 8,
    scorer: Any = None,
    key: Any = None,
    **config: Any,
) -> tuple[Any, dict[str, float]]:
    """Weights after one step of gradient descent, and metrics."""
    optimizer = sgd(1.0)
    update = make_reward_model_update(
        scorer or SumScorer(),
        optimizer,
        RewardConfig(**config),
        batch_size=batch_size,
        minibatch_size=minibatch_size,
    )
    key = jax.random.key(0) if key is None else key
    state, metrics = jax.jit(update)(init_train_state(PARAMS, optimizer), {}, batch, key)
    return np.asarray(state.params["weights"]), finalize(metrics)


def by_hand(batch: ComparisonBatch, center_coef: float) -> tuple[float, np.ndarray]:
    """Loss and weights after the step, in float64, pair by pair."""
    weights = np.asarray(PARAMS["weights"], np.float64)
    loss, gradient, count = 0.0, np.zeros_like(weights), 0
    for pair in np.flatnonzero(batch.valid):
        counts = [
            np.bincount(
                np.asarray(side.tokens[pair])[np.asarray(side.attention_mask[pair])], minlength=VOCAB_SIZE
            )
            for side in (batch.chosen, batch.rejected)
        ]
        good, bad = (weights @ count for count in counts)
        x = good - bad - float(batch.margins[pair])
        loss += np.logaddexp(0.0, -x) + center_coef * (good + bad) ** 2
        gradient += -(counts[0] - counts[1]) / (1 + np.exp(x)) + 2 * center_coef * (good + bad) * sum(counts)
        count += 1
    return loss / count, weights - gradient / count


@pytest.mark.parametrize("coefficient", [None, 0.05])
def test_lore_8_4_one_step_by_hand(coefficient: float | None) -> None:
    loss, weights = by_hand(BATCH, coefficient or 0.0)
    found, metrics = run(BATCH, center_rewards_coefficient=coefficient)
    assert metrics["reward_model/loss"] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(found, weights, atol=1e-5)


@pytest.mark.parametrize("minibatch_size", [1, 2, 4])
def test_lore_5_2_microbatches_share_one_denominator(minibatch_size: int) -> None:
    """The last pair only fills the batch up, so one microbatch weighs less than the others."""
    weights, metrics = run(BATCH, center_rewards_coefficient=0.05)
    found, numbers = run(BATCH, minibatch_size=minibatch_size, center_rewards_coefficient=0.05)
    np.testing.assert_allclose(found, weights, atol=1e-5)
    assert numbers == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_lore_8_4_swapped_pairs_push_the_other_way() -> None:
    """Without margins, at scores of 0, where both steps are from the same point."""
    plain = BATCH._replace(margins=jnp.zeros(8))
    zero = {"weights": jnp.zeros(VOCAB_SIZE)}

    def gradient(batch: ComparisonBatch) -> Any:
        return jax.grad(
            lambda params: reward_model_objective(SumScorer(), params, {}, batch, center_coef=0.0)[0]
        )(zero)["weights"]

    swapped = gradient(plain._replace(chosen=plain.rejected, rejected=plain.chosen))
    np.testing.assert_allclose(gradient(plain), -swapped, atol=1e-6)
    assert np.abs(swapped).max() > 0.1


def test_both_texts_go_through_the_model_in_one_pass() -> None:
    scorer = SumScorer()
    run(BATCH, minibatch_size=2, scorer=scorer)
    assert set(scorer.rows) == {4} and set(scorer.keys) == {None}


def test_rows_of_a_pair_stand_side_by_side() -> None:
    """So that a mesh which splits the pairs need not move one text."""
    seen: list[ModelInputs] = []

    def scorer(params: Any, frozen: Any, inputs: ModelInputs, key: Any) -> jax.Array:
        seen.append(inputs)
        return SumScorer()(params, frozen, inputs, key)

    reward_model_objective(scorer, PARAMS, {}, BATCH, center_coef=0.0)
    np.testing.assert_array_equal(seen[0].tokens[0::2], BATCH.chosen.tokens)
    np.testing.assert_array_equal(seen[0].attention_mask[1::2], BATCH.rejected.attention_mask)


def test_dropout_draws_a_key_of_its_own_for_every_microbatch() -> None:
    first, _ = run(BATCH, minibatch_size=4, disable_dropout=False)
    same, _ = run(BATCH, minibatch_size=4, disable_dropout=False)
    other, _ = run(BATCH, minibatch_size=4, disable_dropout=False, key=jax.random.key(1))
    off, _ = run(BATCH, minibatch_size=4, key=jax.random.key(1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3 and np.abs(first - off).max() > 1e-3
    half = jax.tree.map(lambda x: jnp.concatenate([x[:4], x[:4]]), BATCH)
    numbers = run(half, minibatch_size=4, disable_dropout=False)[1]
    once = run(jax.tree.map(lambda x: x[:4], half), minibatch_size=4, disable_dropout=False)[1]
    assert numbers["reward_model/score_mean"] != pytest.approx(once["reward_model/score_mean"], abs=1e-6)


def test_every_width_is_compiled_once() -> None:
    optimizer = sgd()
    update = jax.jit(
        make_reward_model_update(SumScorer(), optimizer, RewardConfig(), batch_size=8, minibatch_size=4)
    )
    state = init_train_state(PARAMS, optimizer)
    for step, width in enumerate((8, 16, 8, 16)):
        state, _ = update(state, {}, random_comparisons(8, width, seed=step), jax.random.key(step))
    assert update._cache_size() == 2 and int(state.step) == 4


def test_too_many_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="`batch` must have at most `batch_size` = 4 pairs, got 8"):
        run(BATCH, batch_size=4, minibatch_size=4)


def test_minibatches_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="`minibatch_size` must divide"):
        run(BATCH, minibatch_size=3)


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`method.center_rewards_coefficient` must be at least 0, or None, got -1"
    ):
        RewardConfig(center_rewards_coefficient=-1)
