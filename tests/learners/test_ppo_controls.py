# SPDX-License-Identifier: Apache-2.0
"""Whole training runs on a tabular policy: a task with a known optimum, and rewards that must not teach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.online import OnlineState
from jrl.learners.ppo import PPOConfig
from jrl.ops.rewards import place_scores
from jrl.typing import Rollouts, Sequences
from tests.learners.batches import CHUNK_BYTES, adam
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.learners.tabular import VOCAB, tabular_params, tabular_policy, tabular_rollouts

WIDTH, NUM_ROLLOUTS, NUM_SEEDS, ITERATIONS = 4, 128, 5, 100
WANTED = 5
CONFIG = PPOConfig(ppo_epochs=2, lam=1.0, init_kl_coef=0.0)


def completions(sequences: Sequences) -> jax.Array:
    """The sampled tokens (B T); they follow a prompt of one token."""
    return sequences.inputs.tokens[:, 1:]


def wanted_tokens(sequences: Sequences) -> jax.Array:
    """Share of the window filled with one token: 1 at best, 1/8 by chance."""
    return jnp.sum((completions(sequences) == WANTED) & sequences.mask, axis=1) / WIDTH


# Weights of (wanted tokens, one, length, noise): with the reward as data, all of them share one program.
REWARDS = {
    "task": (1.0, 0.0, 0.0, 0.0),
    "reversed": (-1.0, 0.0, 0.0, 0.0),
    "constant": (0.0, 1.0, 0.0, 0.0),
    "length": (0.0, 0.0, 1.0, 0.0),
    "random": (0.0, 0.0, 0.0, 1.0),
}
Curves = dict[str, dict[str, np.ndarray]]


def score_of(weights: jax.Array, sequences: Sequences, key: jax.Array) -> jax.Array:
    """The reward of each completion (B,)."""
    length = jnp.sum(sequences.mask, axis=1, dtype=jnp.float32)
    noise = jax.random.normal(key, length.shape)
    return jnp.stack([wanted_tokens(sequences), jnp.ones_like(length), length, noise], axis=1) @ weights


@pytest.fixture(scope="module")
def curves() -> Curves:
    """Reward -> task score and length (seeds, iterations), and KL of the last policy to the uniform one (seeds)."""
    optimizer = adam(0.03)
    update = ppo_update(
        tabular_policy(),
        optimizer,
        CONFIG,
        batch_size=NUM_ROLLOUTS // 2,
        minibatch_size=NUM_ROLLOUTS // 2,
        logprob_chunk_bytes=CHUNK_BYTES,
        temperature=1.0,
    )
    params, frozen = tabular_params()

    def train(weights: jax.Array, seed: jax.Array) -> dict[str, jax.Array]:
        def iteration(state: OnlineState, key: jax.Array) -> tuple[OnlineState, dict[str, jax.Array]]:
            rollout_key, score_key, update_key = jax.random.split(key, 3)
            sequences, scored = tabular_rollouts(
                state.train.params, frozen, rollout_key, num_rows=NUM_ROLLOUTS, width=WIDTH
            )
            scores = place_scores(score_of(weights, sequences, score_key), sequences.mask)
            after, _ = update(state, frozen, Rollouts(sequences, scored, scores), update_key)
            seen = {"score": wanted_tokens(sequences).mean(), "length": sequences.mask.sum(axis=1).mean()}
            return after, seen

        keys = jax.random.split(jax.random.key(seed), ITERATIONS)
        state, seen = jax.lax.scan(iteration, ppo_state(params, optimizer, CONFIG), keys)
        logprobs = jax.nn.log_softmax(state.train.params["table"]["kernel"])
        return seen | {"drift": jnp.mean(jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)) + jnp.log(VOCAB)}

    runs = jax.jit(jax.vmap(jax.vmap(train, (None, 0)), (0, None)))
    seen = jax.device_get(runs(jnp.asarray(list(REWARDS.values())), jnp.arange(NUM_SEEDS)))
    return {name: {key: values[row] for key, values in seen.items()} for row, name in enumerate(REWARDS)}


def test_lore_9_6_a_known_optimum_is_reached_by_every_seed(curves: Curves) -> None:
    score = curves["task"]["score"]
    assert np.all(score[:, 0] < 0.2)
    assert np.all(score[:, -5:].mean(axis=1) >= 0.95)


def test_lore_9_5_a_reversed_reward_makes_the_score_fall(curves: Curves) -> None:
    score = curves["reversed"]["score"]
    assert np.all(score[:, -5:].mean(axis=1) < 0.25 * score[:, :5].mean(axis=1))


def test_lore_9_5_a_reward_for_length_makes_completions_longer(curves: Curves) -> None:
    length = curves["length"]["length"]
    assert np.all(length[:, -5:].mean(axis=1) > 0.95 * WIDTH) and np.all(length[:, 0] < 0.9 * WIDTH)


def test_lore_9_5_rewards_without_information_teach_nothing(curves: Curves) -> None:
    constant, random, task = curves["constant"], curves["random"], curves["task"]
    for useless in (constant, random):
        assert useless["score"][:, -5:].mean() == pytest.approx(1 / VOCAB, abs=0.05)
    # Whitened noise makes a random walk. A constant reward goes no farther than that, and a real one far beyond it.
    assert constant["drift"].mean() < 1.5 * random["drift"].mean() < 0.5 * task["drift"].mean()
