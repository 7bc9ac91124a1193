# SPDX-License-Identifier: Apache-2.0
"""Preferences drawn from a known reward: DPO finds all that can be found of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.dpo import dpo_objective, init_dpo_state, make_dpo_update, reference_logprobs
from jrl.learners.dpo_config import DPOConfig
from jrl.ops.metrics import finalize
from jrl.typing import PreferenceBatch
from tests.learners.batches import CHUNK_BYTES, adam
from tests.learners.tabular import EOS, START, VOCAB, tabular_params, tabular_policy, tabular_sequences

pytestmark = pytest.mark.slow

WIDTH, TRAINED, HELD_OUT, BATCH = 6, 4096, 4096, 256
CONFIG = DPOConfig(beta=0.5)


def drawn_pairs(
    rng: np.random.Generator, table: np.ndarray, count: int
) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """(chosen, rejected, their rewards): labels follow σ(r − r′), rewards are sums of `table` over the tokens."""
    tokens = rng.integers(2, VOCAB, (2, count, WIDTH))
    lengths = rng.integers(2, WIDTH + 1, (2, count))
    # Every completion ends with EOS: then a policy can express any sum of rewards of its steps.
    np.put_along_axis(tokens, lengths[..., None] - 1, EOS, axis=2)
    before = np.concatenate([np.full((2, count, 1), START), tokens[..., :-1]], axis=2)
    mask = np.arange(WIDTH) < lengths[..., None]
    rewards = np.where(mask, table[before, tokens], 0).sum(axis=2)
    first_wins = rng.random(count) < 1 / (1 + np.exp(rewards[1] - rewards[0]))
    order = np.where(first_wins, [[0], [1]], [[1], [0]])
    rows = np.arange(count)
    sides = [tabular_sequences(tokens[side, rows], lengths[side, rows]) for side in order]
    return sides[0], sides[1], rewards[order[0], rows], rewards[order[1], rows]


def test_held_out_accuracy_comes_near_that_of_the_true_reward() -> None:
    """Labels are noisy, so that the reward itself is right in 0.72 of the held-out pairs and nothing can be better."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, VOCAB)) * 0.6
    policy, (params, frozen) = tabular_policy(), tabular_params(seed=1)
    score = jax.jit(
        functools.partial(reference_logprobs, Reader(policy, chunk_bytes=CHUNK_BYTES), minibatch_size=BATCH)
    )

    def pairs(count: int) -> tuple[PreferenceBatch, np.ndarray, np.ndarray]:
        chosen, rejected, high, low = drawn_pairs(rng, table, count)
        zeros = jnp.zeros(chosen.mask.shape)
        batch = PreferenceBatch(chosen, rejected, jnp.ones(count, bool), zeros, zeros)
        ref = score(params, frozen, batch)
        return batch._replace(ref_chosen_logprobs=ref[0], ref_rejected_logprobs=ref[1]), high, low

    trained, _, _ = pairs(TRAINED)
    held_out, high, low = pairs(HELD_OUT)
    best = float(np.mean(high > low))
    optimizer = adam(0.02)
    update = jax.jit(
        make_dpo_update(
            Reader(policy, chunk_bytes=CHUNK_BYTES), optimizer, CONFIG, batch_size=BATCH, minibatch_size=BATCH
        )
    )
    measure = jax.jit(
        functools.partial(dpo_objective, Reader(policy, chunk_bytes=CHUNK_BYTES), config=CONFIG)
    )
    state = init_dpo_state(params, optimizer)
    start = finalize(measure(params, frozen, held_out).metrics)
    for step in range(20 * TRAINED // BATCH):
        rows = rng.permutation(TRAINED)[:BATCH]
        batch = jax.tree.map(lambda x, rows=rows: x[rows], trained)
        state, _ = update(state, frozen, batch, jax.random.key(step))
    end = finalize(measure(state.train.params, frozen, held_out).metrics)
    print(f"best {best:.4f}, start {start['rewards/accuracies']:.4f}, end {end['rewards/accuracies']:.4f}")
    assert start["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert 0.65 < best < 0.9
    assert end["rewards/accuracies"] > best - 0.015
    # The margin of a pair is the difference of its rewards, in nats of the labels.
    entropy = float(np.mean(np.log1p(np.exp(-(high - low)))))
    assert end["dpo/loss"] == pytest.approx(entropy, abs=0.02)
