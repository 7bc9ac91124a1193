# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation on tabular and tiny policies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.dpo import (
    dpo_objective,
    init_dpo_state,
    make_dpo_update,
    reference_logprobs,
)
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.forward import interleave, separate
from jrl.losses.dpo import LOSSES
from jrl.ops.metrics import finalize
from jrl.typing import PreferenceBatch
from tests.learners.batches import CHUNK_BYTES, random_preferences, sgd
from tests.learners.tabular import VOCAB, tabular_params, tabular_policy, tabular_sequences
from tests.tiny import tiny_policy

PARAMS, FROZEN = tabular_params(seed=3)
NUM_ROWS, WIDTH = 8, 4


def tabular_preferences(seed: int = 0, copies: int = 0) -> PreferenceBatch:
    """Random ragged completions behind [START], with a random reference."""
    rng = np.random.default_rng(seed)
    chosen, rejected = (
        tabular_sequences(rng.integers(1, VOCAB, (NUM_ROWS, WIDTH)), rng.integers(1, WIDTH + 1, NUM_ROWS))
        for _ in range(2)
    )
    ref = [
        jnp.asarray(np.where(side.mask, rng.normal(-2, 0.5, size=side.mask.shape), 0), jnp.float32)
        for side in (chosen, rejected)
    ]
    return PreferenceBatch(chosen, rejected, jnp.arange(NUM_ROWS) < NUM_ROWS - copies, *ref)


def run(
    batch: PreferenceBatch, config: DPOConfig, *, minibatch_size: int = NUM_ROWS, steps: int = 1
) -> tuple[Any, dict[str, float]]:
    """(state after so many steps of gradient descent, metrics of the last one); a reference where it is synced."""
    optimizer = sgd(0.5)
    update = make_dpo_update(
        Reader(tabular_policy(), chunk_bytes=CHUNK_BYTES),
        optimizer,
        config,
        batch_size=NUM_ROWS,
        minibatch_size=minibatch_size,
    )
    state = init_dpo_state(PARAMS, optimizer, PARAMS if config.sync_ref_model else None)
    jitted = jax.jit(update)
    for step in range(steps):
        state, metrics = jitted(state, FROZEN, batch, jax.random.key(step))
    assert jitted._cache_size() == 1
    return state, finalize(metrics)


def test_one_step_by_hand() -> None:
    # One pair behind [2]: chosen 5, rejected 4, reference 0 on both sides; β = 0.5.
    rows = tabular_sequences([[5], [4]], [1, 1])
    first, second = (jax.tree.map(lambda x, i=i: x[i : i + 1], rows) for i in (0, 1))
    batch = PreferenceBatch(first, second, jnp.ones(1, bool), jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    state, metrics = run(batch, DPOConfig(beta=0.5))
    table = np.asarray(PARAMS["table"]["kernel"], np.float64)
    margin = 0.5 * (table[2, 5] - table[2, 4])  # the normaliser cancels
    assert metrics["dpo/loss"] == pytest.approx(np.log1p(np.exp(-margin)), rel=1e-5)
    push = 0.5 * 0.5 / (1 + np.exp(margin))  # rate · β · σ(−margin)
    table[2, 5] += push
    table[2, 4] -= push
    np.testing.assert_allclose(state.train.params["table"]["kernel"], table, atol=1e-6)


@pytest.mark.parametrize("minibatch_size", [2, 4])
def test_lore_5_2_microbatches_of_unequal_weight_share_one_denominator(minibatch_size: int) -> None:
    """Pairs and, for `sft`, chosen tokens of the whole optimizer batch; two of the rows are copies."""
    config = DPOConfig(loss_type=["sigmoid", "sft", "ipo"], loss_weights=[1.0, 0.5, 0.01], ld_alpha=0.5)
    batch = tabular_preferences(copies=3)
    whole, wanted = run(batch, config)
    state, metrics = run(batch, config, minibatch_size=minibatch_size)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), state.train.params, whole.train.params
    )
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    tokens = np.asarray(batch.chosen.mask & batch.valid[:, None])
    assert len(set(tokens.reshape(4, 2, WIDTH).sum((1, 2)))) > 1


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.whole_batch))
def test_losses_that_compare_pairs_refuse_microbatches(name: str) -> None:
    with pytest.raises(ValueError, match=f"`minibatch_size` must be `batch_size` = 8 with the loss '{name}'"):
        run(tabular_preferences(), DPOConfig(loss_type=[name]), minibatch_size=4)


def test_too_many_rows_are_refused() -> None:
    update = make_dpo_update(
        Reader(tabular_policy(), chunk_bytes=CHUNK_BYTES), sgd(), DPOConfig(), batch_size=4, minibatch_size=4
    )
    with pytest.raises(ValueError, match="`batch` must have at most `batch_size` = 4 rows, got 8"):
        update(init_dpo_state(PARAMS, sgd()), FROZEN, tabular_preferences(), jax.random.key(0))


class TestReference:
    def test_it_moves_every_so_many_steps(self) -> None:
        config = DPOConfig(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
        batch = tabular_preferences()
        still, one = run(batch, config)
        assert one["dpo/ref_sync"] == 0
        jax.tree.map(np.testing.assert_array_equal, still.ref_params, PARAMS)
        moved, two = run(batch, config, steps=2)
        assert two["dpo/ref_sync"] == 1
        wanted = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, moved.train.params, PARAMS)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), moved.ref_params, wanted)

    def test_it_moves_as_far_as_alpha_says_at_the_ends(self) -> None:
        batch = tabular_preferences()
        for alpha in (0.0, 1.0):
            config = DPOConfig(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=alpha)
            state, _ = run(batch, config)
            jax.tree.map(
                np.testing.assert_array_equal, state.ref_params, state.train.params if alpha else PARAMS
            )

    @pytest.mark.parametrize("minibatch_size", [3, 8])
    def test_lore_8_2_its_logprobs_are_those_that_the_objective_reads(self, minibatch_size: int) -> None:
        """Scored in parts, with other neighbours and other padding, the policy against itself gives log 2."""
        _, params, frozen, _ = tiny_policy("llama", 1, None)
        batch = random_preferences(copies=1)
        chosen, rejected = _scorer(minibatch_size)(params, frozen, batch)
        assert np.all(np.asarray(chosen)[~np.asarray(batch.chosen.mask)] == 0)
        np.testing.assert_array_equal(np.asarray(chosen) != 0, batch.chosen.mask)
        scored = batch._replace(ref_chosen_logprobs=chosen, ref_rejected_logprobs=rejected)
        out = _objective()(params, frozen, scored)
        assert float(out.loss_sum / out.weight) == pytest.approx(0.693147, abs=1e-5)
        got = finalize(out.metrics)
        assert abs(got["rewards/chosen"]) < 1e-5 and abs(got["rewards/rejected"]) < 1e-5


@functools.cache
def _scorer(minibatch_size: int) -> Any:
    policy, *_ = tiny_policy("llama", 1, None)
    return jax.jit(
        functools.partial(
            reference_logprobs, Reader(policy, chunk_bytes=CHUNK_BYTES), minibatch_size=minibatch_size
        )
    )


@functools.cache
def _objective() -> Any:
    policy, *_ = tiny_policy("llama", 1, None)
    return jax.jit(
        functools.partial(dpo_objective, Reader(policy, chunk_bytes=CHUNK_BYTES), config=DPOConfig())
    )


def test_lore_8_1_padding_of_either_side_of_the_prompt_changes_nothing() -> None:
    """Wider rows and windows, and columns before the prompt, of a real decoder."""
    _, params, frozen, _ = tiny_policy("llama", 1, None)
    batch = random_preferences()

    def pad(side: Any) -> Any:
        tokens, mask = (jnp.pad(x, ((0, 0), (3, 2))) for x in side.inputs[:2])
        inputs = side.inputs._replace(tokens=tokens, attention_mask=mask)
        return side._replace(inputs=inputs, starts=side.starts + 3, mask=jnp.pad(side.mask, ((0, 0), (0, 2))))

    refs = [jnp.pad(x, ((0, 0), (0, 2))) for x in (batch.ref_chosen_logprobs, batch.ref_rejected_logprobs)]
    padded = PreferenceBatch(pad(batch.chosen), pad(batch.rejected), batch.valid, *refs)
    narrow, wide = (finalize(_objective()(params, frozen, x).metrics) for x in (batch, padded))
    assert wide == pytest.approx(narrow, rel=1e-5, abs=1e-5)


def test_both_completions_of_a_pair_stand_side_by_side() -> None:
    batch = random_preferences(4)
    both = interleave(batch.chosen, batch.rejected)
    np.testing.assert_array_equal(both.inputs.tokens[4], batch.chosen.inputs.tokens[2])
    np.testing.assert_array_equal(both.inputs.tokens[5], batch.rejected.inputs.tokens[2])
    again = separate(both)
    jax.tree.map(np.testing.assert_array_equal, again, (batch.chosen, batch.rejected))


def test_dropout_draws_by_the_key_where_it_is_on() -> None:
    """A policy that says whether it got a key, and which."""
    asked: list[Any] = []
    policy = tabular_policy()

    def branch(params: Any, frozen: Any, trunk: Any, inputs: Any, dropout_key: Any) -> Any:
        asked.append(dropout_key)
        return policy.branch(params, frozen, trunk, inputs, None)

    watched = dataclasses.replace(policy, branch=branch)
    for config in (DPOConfig(), DPOConfig(disable_dropout=False)):
        update = make_dpo_update(
            Reader(watched, chunk_bytes=CHUNK_BYTES), sgd(), config, batch_size=NUM_ROWS, minibatch_size=4
        )
        jax.eval_shape(
            update, init_dpo_state(PARAMS, sgd()), FROZEN, tabular_preferences(), jax.random.key(0)
        )
        assert (asked[-1] is None) == config.disable_dropout


class TestConfig:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"beta": 0.0}, "`method.beta` must be positive"),
            ({"loss_type": ["sigmoyd"]}, "`method.loss_type` must be a list of names among"),
            ({"loss_type": "sigmoid"}, "`method.loss_type` must be a list of names among"),
            (
                {"loss_weights": [1.0, 2.0]},
                r"`method.loss_weights` must be one number for each of \['sigmoid'\]",
            ),
            ({"label_smoothing": 0.5}, r"`method.label_smoothing` must be in \[0, 0.5\)"),
            (
                {"loss_type": ["exo_pair"]},
                "`method.label_smoothing` must be above 0 with the loss 'exo_pair'",
            ),
            (
                {"loss_type": ["aot"], "use_weighting": True},
                "`method.use_weighting` must be False with losses",
            ),
            (
                {"loss_type": ["nca_pair"], "f_divergence_type": "js_divergence"},
                "`method.f_divergence_type` must be 'reverse_kl' with",
            ),
            ({"f_divergence_type": "kl"}, "`method.f_divergence_type` must be one of"),
            (
                {"sync_ref_model": True, "precompute_ref_log_probs": True},
                "`method.precompute_ref_log_probs` must be False or None where `sync_ref_model`",
            ),
        ],
    )
    def test_bad_values_are_named(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DPOConfig(**fields)
