# SPDX-License-Identifier: Apache-2.0
"""The KL of whole distributions in the loss: value, gradient, memory, and whose parameters it reads."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import algorithm
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.online import init_online_state, make_online_update, online_objective
from jrl.losses import KLTerm, Targets, clipped, policy_gradient_loss
from jrl.models.adapters.config import LoraConfig
from jrl.models.policy import init_reference
from jrl.ops import finalize, kl_from_logits
from jrl.typing import Rollouts
from tests.learners.batches import PADDED_VOCAB, random_sequences, sgd
from tests.learners.tabular import VOCAB, tabular_batch, tabular_params, tabular_policy
from tests.tiny import tiny_lm, tiny_policy

BETA, TEMPERATURE = 0.3, 0.7
AT_ONCE, IN_CHUNKS = 1 << 28, 4 * VOCAB * 2 * 3
"""Bytes for everything together, and for three positions of two models."""
PARAMS, FROZEN = tabular_params(seed=3)
REFERENCE = {"table": tabular_params(seed=4)[0]["table"]}


def config_of(**fields: Any) -> GRPOConfig:
    sizes = {"num_generations": 4, "num_rollouts": 8, "gen_kwargs": {"max_new_tokens": 4}}
    return algorithm(
        "dr_grpo", **{"beta": BETA, "kl_estimator": "full", "reduction": "token", **sizes, **fields}
    )


@pytest.fixture(scope="module")
def batch() -> Rollouts:
    """Eight ragged rows of two prompts."""
    rollouts = tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=8)
    return rollouts._replace(groups=jnp.arange(8) // 4)


def divergence(batch: Rollouts) -> tuple[float, np.ndarray]:
    """By hand, in float64: the mean of KL(π ‖ π_ref) over the states before all actions, and its ∂/∂table."""
    table, ref_table = (
        np.asarray(tree["table"]["kernel"], np.float64) / TEMPERATURE for tree in (PARAMS, REFERENCE)
    )
    value, gradient = 0.0, np.zeros_like(table)
    mask, tokens = np.asarray(batch.sequences.mask), np.asarray(batch.sequences.inputs.tokens)
    for row, column in np.argwhere(mask):
        state = tokens[row, column]
        p, q = (np.exp(x[state]) / np.exp(x[state]).sum() for x in (table, ref_table))
        kl = sum(p[v] * (math.log(p[v]) - math.log(q[v])) for v in range(VOCAB))
        value += kl
        gradient[state] += p * (np.log(p) - np.log(q) - kl) / TEMPERATURE
    return value / mask.sum(), gradient / mask.sum()


def mean_loss(params: Any, reference: Any, batch: Rollouts, *, chunk_bytes: int) -> tuple[Any, Any]:
    """(loss, metrics) of a minibatch without advantages: what is left is the KL term."""
    targets = Targets(batch.scored.logprobs, None, 0.0 * batch.rewards, None, batch.sequences.mask)
    recipe, reader = grpo_recipe(config_of()), Reader(tabular_policy(), TEMPERATURE, chunk_bytes=chunk_bytes)
    loss_sum, weight, metrics = online_objective(
        reader,
        params,
        FROZEN,
        batch.sequences,
        targets,
        loss=recipe.loss,
        prefix="grpo",
        reference=reference,
    )
    return loss_sum / weight, metrics


@pytest.mark.parametrize("chunk_bytes", [AT_ONCE, IN_CHUNKS])
def test_value_and_gradient_are_those_of_a_sum_by_hand(batch: Rollouts, chunk_bytes: int) -> None:
    value, gradient = divergence(batch)
    loss = jax.value_and_grad(partial(mean_loss, chunk_bytes=chunk_bytes), argnums=(0, 1), has_aux=True)
    (found, metrics), (of_policy, of_reference) = jax.jit(loss)(PARAMS, REFERENCE, batch)
    assert float(found) == pytest.approx(BETA * value, rel=1e-6)
    assert finalize(metrics)["grpo/kl_term"] == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(
        of_policy["table"]["kernel"], BETA * gradient, atol=1e-6 * np.abs(gradient).max()
    )
    assert not np.any(of_reference["table"]["kernel"])


def test_in_double_precision(batch: Rollouts) -> None:
    value, gradient = divergence(batch)
    mask = np.asarray(batch.sequences.mask)
    states = np.asarray(batch.sequences.inputs.tokens)[:, :-1]
    with jax.enable_x64(True):
        tables = (jnp.asarray(tree["table"]["kernel"], float) / TEMPERATURE for tree in (PARAMS, REFERENCE))
        logits, ref_logits = (table[states] for table in tables)

        def loss(logits: Any) -> Any:
            zeros = jnp.zeros(mask.shape)
            return policy_gradient_loss(
                zeros,
                Targets(zeros, None, zeros, None, jnp.asarray(mask)),
                surrogate=clipped(clip_range=0.2),
                kl=KLTerm(BETA, None),
                full_kl=jnp.where(mask, kl_from_logits(logits, ref_logits), jnp.nan),
            ).loss_sum

        found, slopes = jax.value_and_grad(loss)(logits)
        summed = np.zeros((VOCAB, VOCAB))
        np.add.at(summed, states, np.asarray(slopes) / TEMPERATURE)
    assert float(found) / mask.sum() == pytest.approx(BETA * value, rel=1e-12)
    np.testing.assert_allclose(summed / mask.sum(), BETA * gradient, atol=1e-12)


def test_where_policy_and_reference_are_one_the_gradient_is_zero() -> None:
    """Exactly: of what rounding leaves, Adam would make a whole step. Excluded tokens have none either."""
    logits = 3 * jax.random.normal(jax.random.key(0), (5, 40)).at[:, 33:].set(-jnp.inf)
    first, second = jax.grad(lambda x, y: kl_from_logits(x, y).sum(), argnums=(0, 1))(logits, logits)
    assert not np.any(first) and not np.any(second)
    other = logits + jnp.cos(jnp.arange(40.0))[None, :]
    first, second = jax.grad(lambda x, y: kl_from_logits(x, y).sum(), argnums=(0, 1))(logits, other)
    np.testing.assert_allclose(second, jax.nn.softmax(other) - jax.nn.softmax(logits), atol=1e-6)
    assert np.isfinite(first).all() and not np.any(first[:, 33:])


def test_no_array_of_the_update_is_as_wide_as_the_vocabulary_times_the_window() -> None:
    """Of the policy's logits or the reference's, forward or backward: a chunk is 8 positions of either."""
    policy, params, frozen, reference = tiny_policy("gpt2")
    sequences = random_sequences(8, width=24)
    reader = Reader(policy, chunk_bytes=4 * PADDED_VOCAB * 2 * 8)
    targets = Targets(jnp.zeros((8, 24)), None, jnp.ones((8, 24)), None, sequences.mask)

    def gradient(params: Any, reference: Any) -> Any:
        def loss(params: Any) -> Any:
            return online_objective(
                reader,
                params,
                frozen,
                sequences,
                targets,
                loss=grpo_recipe(config_of()).loss,
                prefix="grpo",
                reference=reference,
            )[0]

        return jax.grad(loss)(params)

    text = jax.jit(gradient).lower(params, reference).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    # The embedding and its like are of the vocabulary, too, and have nothing of rows.
    wide = {shape for shape in shapes if PADDED_VOCAB in shape and 32 not in shape}
    assert max(map(math.prod, wide)) == 16 * PADDED_VOCAB


def train(batch: Rollouts, config: GRPOConfig, *, minibatch_size: int, reference: Any = REFERENCE) -> Any:
    recipe, optimizer = grpo_recipe(config), sgd(lr=100.0)
    update = make_online_update(
        Reader(tabular_policy(), TEMPERATURE, chunk_bytes=AT_ONCE),
        optimizer,
        recipe,
        batch_size=8,
        minibatch_size=minibatch_size,
    )
    state = init_online_state(jax.tree.map(jnp.copy, PARAMS), optimizer, recipe)
    jitted = jax.jit(update, donate_argnums=0)
    state, metrics = jitted(state, FROZEN, batch, jax.random.key(0), jnp.int32(9), reference)
    return np.asarray(state.train.params["table"]["kernel"] - PARAMS["table"]["kernel"]), finalize(metrics)


def test_the_step_is_the_same_for_every_number_of_microbatches(batch: Rollouts) -> None:
    """1, 2, 4 and 8; the state's donation leaves the reference alone."""
    blank = batch._replace(scored=batch.scored._replace(ref_logprobs=batch.scored.logprobs))
    whole, metrics = train(blank, config_of(), minibatch_size=8)
    assert metrics["grpo/kl_term"] == pytest.approx(divergence(batch)[0], rel=1e-6)
    for size in (4, 2, 1):
        cut, _ = train(blank, config_of(), minibatch_size=size)
        np.testing.assert_allclose(cut, whole, atol=1e-6 * np.abs(whole).max())
    without, _ = train(blank, config_of(beta=0.0), minibatch_size=8, reference=None)
    np.testing.assert_allclose(whole - without, -100 * BETA * divergence(batch)[1], atol=1e-4)


def test_a_reference_is_there_where_it_is_read_and_nowhere_else(batch: Rollouts) -> None:
    with pytest.raises(
        ValueError, match="`reference` of an update must be the reference's own parameters, got"
    ):
        train(batch, config_of(), minibatch_size=8, reference=None)
    with pytest.raises(
        ValueError, match="`reference` of an update must be None: the loss reads no reference"
    ):
        train(batch, config_of(kl_estimator="k2"), minibatch_size=8)
    assert [grpo_recipe(config_of(**fields)).reads_reference for fields in ({}, {"beta": 0.0})] == [
        True,
        False,
    ]


def moved(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), tree)


@pytest.mark.parametrize("kind", ["copy", "hydra", "lora"])
def test_the_reference_is_the_model_as_it_began(kind: str) -> None:
    """A copy of all, of the branch that trains, or nothing: under an adapter the frozen model."""
    lm, start = tiny_lm("llama")
    split: dict[str, Any] = {"num_layers_unfrozen": 1 if kind == "hydra" else -1}
    if kind == "lora":
        split = {"adapter": LoraConfig(r=2)}
    params, frozen = lm.split_params(start, key=jax.random.key(1), **split)
    policy, reference, sequences = (
        lm.policy(**split),
        init_reference(params),
        random_sequences(family="llama"),
    )
    assert (reference == {}) is (kind == "lora")
    params = moved(params)
    reader = Reader(policy, TEMPERATURE, chunk_bytes=4 * PADDED_VOCAB * 16)

    @jax.jit
    def read(params: Any) -> tuple[Any, Any]:
        found = reader(params, frozen, sequences, ref_params=reference)
        return found.full_kl, found.logits()

    whole_params, whole_frozen = lm.split_params(start, num_layers_unfrozen=-1)
    whole = Reader(lm.policy(num_layers_unfrozen=-1), TEMPERATURE, chunk_bytes=AT_ONCE)
    found, logits = read(params)
    ref_logits = jax.jit(lambda tree: whole(tree, whole_frozen, sequences).logits())(whole_params)
    mask = np.asarray(sequences.mask)
    expected = np.asarray(kl_from_logits(logits, ref_logits))[mask]
    np.testing.assert_allclose(np.asarray(found)[mask], expected, rtol=1e-4, atol=1e-6)
    assert expected.min() > 0


def test_a_term_that_estimates_nothing_has_no_sampler_to_correct_for() -> None:
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    loss = partial(
        policy_gradient_loss, x, Targets(x, None, x, None, mask), surrogate=clipped(clip_range=0.2)
    )
    with pytest.raises(ValueError, match="`off_policy` of a `KLTerm` must be False without an `estimator`"):
        loss(kl=KLTerm(0.1, None, off_policy=True), full_kl=x)
    with pytest.raises(
        ValueError, match="`full_kl` must be given beside `kl` without an `estimator`, got None"
    ):
        loss(kl=KLTerm(0.1, None))


def test_in_the_reward_it_is_refused_with_the_reason() -> None:
    said = "the KL of a state does not depend on the action drawn there"
    with pytest.raises(ValueError, match=rf'`method.kl_estimator` must be "k1" in the reward: {said}'):
        config_of(kl_placement="reward")
    with pytest.raises(ValueError, match=r"`method\.use_bias_correction_kl` must be False unless"):
        config_of(use_bias_correction_kl=True)
