# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on a tabular policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.sft import SFTConfig, make_sft_update
from jrl.learners.state import init_train_state
from jrl.losses.sft import dft
from jrl.models.noise import EmbeddingNoise
from jrl.ops.metrics import finalize
from jrl.typing import Mean, ModelInputs, Sequences
from tests.data.demonstrations.packed import packed_set, rows_of
from tests.learners.batches import CHUNK_BYTES, sgd
from tests.learners.tabular import VOCAB, tabular_params, tabular_policy
from tests.tiny import tiny_lm

PARAMS, FROZEN = tabular_params(seed=3)
# Two rows of unequal weight: prompt 2 5 | 3 4 1, and prompt 6 | 1.
TOKENS = jnp.array([[2, 5, 3, 4, 1], [6, 1, 0, 0, 0]])
BATCH = Sequences(
    ModelInputs(TOKENS, jnp.array([[True] * 5, [True, True, False, False, False]])),
    starts=jnp.zeros(2, jnp.int32),
    mask=jnp.array([[False, True, True, True], [True, False, False, False]]),
)


def run(
    batch: Sequences, *, batch_size: int = 8, minibatch_size: int = 8, policy: Any = None, **options: Any
) -> tuple[Any, dict[str, float]]:
    """Parameters after one step of gradient descent, and metrics."""
    optimizer = sgd(1.0)
    update = make_sft_update(
        Reader(policy or tabular_policy(), chunk_bytes=CHUNK_BYTES),
        optimizer,
        batch_size=batch_size,
        minibatch_size=minibatch_size,
        **options,
    )
    state, metrics = jax.jit(update)(init_train_state(PARAMS, optimizer), FROZEN, batch, jax.random.key(0))
    return state.params, finalize(metrics)


def by_hand(pairs: list[tuple[int, int]]) -> tuple[float, np.ndarray]:
    """Mean −log softmax(table[s])[a] over (s, a), and the table after one step, in float64."""
    table = np.asarray(PARAMS["table"]["kernel"], np.float64)
    probs = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    after = table.copy()
    for s, a in pairs:
        after[s] -= (probs[s] - np.eye(VOCAB)[a]) / len(pairs)
    return float(np.mean([-np.log(probs[s, a]) for s, a in pairs])), after


def test_lore_5_12_only_completions_are_learned_as_a_mean_over_all_tokens() -> None:
    loss, table = by_hand([(5, 3), (3, 4), (4, 1), (6, 1)])
    params, metrics = run(BATCH)
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(params["table"]["kernel"], table, rtol=1e-5, atol=1e-6)


def test_lore_5_12_the_prompt_does_not_choose_what_is_learned() -> None:
    changed = BATCH._replace(inputs=BATCH.inputs._replace(tokens=TOKENS.at[0, 0].set(7)))
    jax.tree.map(np.testing.assert_array_equal, run(changed), run(BATCH))


@pytest.mark.parametrize("minibatch_size", [1, 2])
def test_lore_5_2_microbatches_of_unequal_weight_share_one_denominator(minibatch_size: int) -> None:
    params, metrics = run(BATCH, batch_size=2, minibatch_size=minibatch_size)
    loss, table = by_hand([(5, 3), (3, 4), (4, 1), (6, 1)])
    np.testing.assert_allclose(params["table"]["kernel"], table, rtol=1e-5, atol=1e-6)
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-6)


def test_what_is_watched_speaks_of_learned_tokens() -> None:
    table = np.asarray(PARAMS["table"]["kernel"], np.float64)
    probs = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    pairs = [(5, 3), (3, 4), (4, 1), (6, 1)]
    _, metrics = run(BATCH)
    entropy = np.mean([-(probs[s] * np.log(probs[s])).sum() for s, _ in pairs])
    assert metrics["sft/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["sft/token_accuracy"] == np.mean([probs[s].argmax() == a for s, a in pairs])


def test_dynamic_fine_tuning_weighs_each_token_by_its_probability() -> None:
    table = np.asarray(PARAMS["table"]["kernel"], np.float64)
    probs = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    pairs, after = [(5, 3), (3, 4), (4, 1), (6, 1)], table.copy()
    for s, a in pairs:
        after[s] -= probs[s, a] * (probs[s] - np.eye(VOCAB)[a]) / len(pairs)
    params, metrics = run(BATCH, token_loss=dft)
    np.testing.assert_allclose(params["table"]["kernel"], after, rtol=1e-5, atol=1e-6)
    assert metrics["sft/loss"] == pytest.approx(
        np.mean([-probs[s, a] * np.log(probs[s, a]) for s, a in pairs])
    )


@pytest.mark.parametrize(
    ("options", "draws"), [({}, False), ({"noise": True}, True), ({"dropout": True}, True)]
)
def test_lore_2_6_nothing_is_drawn_unless_asked(options: dict[str, bool], draws: bool) -> None:
    keys = []

    def branch(params: Any, frozen: Any, trunk: Any, inputs: Any, dropout_key: Any) -> Any:
        keys.append(dropout_key)
        return tabular_policy().branch(params, frozen, trunk, inputs, None)

    run(BATCH, policy=replace(tabular_policy(), branch=branch), **options)
    assert keys and all((key is not None) == draws for key in keys)


@pytest.mark.slow
def test_lore_5_2_packed_rows_with_noise_in_microbatches_are_one_batch() -> None:
    lm, params = tiny_lm("gpt2", 1)
    policy, optimizer = lm.policy(noise=EmbeddingNoise(5.0)), sgd(0.5)
    # 14 1 | 9 5 | 8 3, and a copy that weighs nothing.
    batch = packed_set(rows_of(5, 9, 3, 8, 14)).batch_of(np.array([0, 1, 2, 2]), np.arange(4) < 3)
    found = []
    for minibatch_size in (4, 1):
        update = make_sft_update(
            Reader(policy, chunk_bytes=CHUNK_BYTES),
            optimizer,
            batch_size=4,
            minibatch_size=minibatch_size,
            noise=True,
        )
        state, metrics = jax.jit(update)(init_train_state(params, optimizer), {}, batch, jax.random.key(5))
        found.append((state.params, finalize(metrics)))
    (whole, whole_metrics), (parts, parts_metrics) = found
    for got, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-5)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"`method.loss_type` must be one of \('nll', 'dft'\), got 'mse'"):
        SFTConfig(loss_type="mse")
    with pytest.raises(ValueError, match=r"`method.packing_strategy` must be one of .* got 'ffd'"):
        SFTConfig(packing_strategy="ffd")
    with pytest.raises(ValueError, match=r"`method.neftune_noise_alpha` must be positive, or None, got 0"):
        SFTConfig(neftune_noise_alpha=0)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="`batch` must have at most `batch_size` = 1 rows, got 2"):
        run(BATCH, batch_size=1, minibatch_size=1)


def test_minibatches_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="`minibatch_size` must divide"):
        run(BATCH, batch_size=8, minibatch_size=3)


def test_config_needs_the_length_of_generation() -> None:
    assert SFTConfig().gen_kwargs["max_new_tokens"] == 40
    with pytest.raises(
        ValueError, match=r"`method.gen_kwargs` must be a mapping that holds `max_new_tokens`"
    ):
        SFTConfig(gen_kwargs={"top_k": 0})


@pytest.mark.parametrize(("num_rows", "sizes"), [(7, [4, 3]), (8, [4]), (3, [3]), (5, [4, 1])])
def test_an_objective_of_ones_own_reads_whole_minibatches_and_what_is_left(
    num_rows: int, sizes: list[int]
) -> None:
    """A mean over rows: 7 of them in minibatches of 4 are 4 and 3, and add up to the mean of all."""
    rows = jnp.arange(num_rows)
    tokens = jnp.full((num_rows, 5), 2)
    batch = Sequences(ModelInputs(tokens, tokens > 0), rows, jnp.ones((num_rows, 4), bool))
    seen: list[int] = []

    def mean_of_starts(params: Any, frozen: Any, part: Sequences) -> Any:
        count = part.starts.shape[0]
        seen.append(count)
        slope = jnp.mean(part.starts.astype(jnp.float32))
        loss = slope * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))
        return loss * count, jnp.float32(count), {"slope": Mean(slope * count, jnp.float32(count))}

    after, metrics = run(batch, minibatch_size=4, objective=mean_of_starts)
    assert sorted(set(seen), reverse=True) == sizes
    assert metrics["slope"] == pytest.approx(rows.mean())
    moved = jax.tree.map(lambda new, old: old - new, after, PARAMS)
    for leaf in jax.tree.leaves(moved):
        np.testing.assert_allclose(leaf, rows.mean(), rtol=1e-5)
