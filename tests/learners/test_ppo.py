# SPDX-License-Identifier: Apache-2.0
"""The PPO update on a tabular policy: every rule that needs a real update, none that needs a transformer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ppo import PPOConfig, PPOState, init_ppo_state, make_ppo_update
from jrl.ops.metrics import finalize
from jrl.typing import Frozen, PPOBatch
from tests.learners.batches import CHUNK_BYTES, adam, sgd
from tests.learners.tabular import (
    EOS,
    VOCAB,
    tabular_batch,
    tabular_params,
    tabular_policy,
    tabular_rollouts,
    tabular_scored,
    tabular_sequences,
)

PARAMS, FROZEN = tabular_params(seed=3)


def update_of(config: PPOConfig, optimizer: Any, **sizes: Any) -> Any:
    """The jitted update of a tabular policy; batches of 8 in microbatches of 4 unless told otherwise."""
    arguments = dict(batch_size=8, minibatch_size=4, temperature=1.0) | sizes
    return jax.jit(
        make_ppo_update(
            tabular_policy(),
            optimizer,
            config,
            logprob_chunk_bytes=CHUNK_BYTES,
            vocab_size=VOCAB,
            **arguments,
        )
    )


def one_update(
    config: PPOConfig, batch: PPOBatch, optimizer: Any = None, seed: int = 0, **sizes: Any
) -> tuple[PPOState, dict[str, float]]:
    """The state after one update from `PARAMS`, and its metrics as numbers."""
    optimizer = sgd() if optimizer is None else optimizer
    state = init_ppo_state(PARAMS, optimizer, config)
    state, metrics = update_of(config, optimizer, **sizes)(state, FROZEN, batch, jax.random.key(seed))
    return state, finalize(metrics)


@pytest.fixture(scope="module")
def batch() -> PPOBatch:
    return tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=16)


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def test_lore_2_3_the_first_ratio_is_one(batch: PPOBatch) -> None:
    _, metrics = one_update(PPOConfig(), batch)
    ulp = np.spacing(np.float32(jnp.max(jnp.abs(batch.scored.logprobs))))
    assert metrics["ppo/ratio_max_dev_first_minibatch"] <= 4 * ulp
    assert metrics["ppo/log_ratio_abs_max"] > 0.01  # later steps have moved
    # A temperature that is not the rollouts' own shows at once.
    _, hot = one_update(PPOConfig(), batch, temperature=1.1)
    assert hot["ppo/ratio_max_dev_first_minibatch"] > 0.01


def test_lore_2_1_the_update_divides_logits_by_the_temperature() -> None:
    hot = jax.tree.map(lambda x: x, PARAMS) | {"table": {"kernel": PARAMS["table"]["kernel"] / 2.0}}
    sequences, scored = tabular_rollouts(hot, FROZEN, jax.random.key(0))
    batch = PPOBatch(sequences, scored, jnp.zeros_like(scored.logprobs))
    _, metrics = one_update(PPOConfig(), batch, temperature=2.0)
    assert metrics["ppo/ratio_max_dev_first_minibatch"] < 1e-5


def test_lore_1_4_a_reward_for_stopping_raises_the_logit_of_eos() -> None:
    stopped = tabular_sequences([[3, EOS, 0]] * 4 + [[3, 4, 5]] * 4, [2] * 4 + [3] * 4)
    scores = jnp.zeros((8, 3)).at[:4, 1].set(1.0)
    scored = tabular_scored(PARAMS, FROZEN, stopped)
    batch = PPOBatch(stopped, scored._replace(values=jnp.zeros_like(scores)), scores)
    state, _ = one_update(PPOConfig(ppo_epochs=1, vf_coef=0.0, init_kl_coef=0.0), batch)
    change = state.train.params["table"]["kernel"] - PARAMS["table"]["kernel"]
    assert change[3, EOS] > 0 and change[3, EOS] == jnp.max(change[3])


def test_lore_5_5_the_first_loss_is_zero_and_its_gradient_is_not(batch: PPOBatch) -> None:
    config = PPOConfig(ppo_epochs=1, vf_coef=0.0)
    _, metrics = one_update(config, batch, batch_size=16)
    assert abs(metrics["ppo/policy_loss"]) < 1e-6
    assert metrics["optim/grad_norm"] > 0.01


def test_lore_5_9_old_logprobs_are_those_of_the_rollouts_in_every_epoch(batch: PPOBatch) -> None:
    # One step an epoch: from the second on, the ratio is measured from the rollouts.
    _, once = one_update(PPOConfig(ppo_epochs=1), batch, batch_size=16)
    assert once["ppo/ratio_mean"] == pytest.approx(1, abs=1e-6)
    state, twice = one_update(PPOConfig(ppo_epochs=2), batch, batch_size=16)
    assert twice["ppo/log_ratio_abs_max"] > 1e-3
    # An update with fresh log-probabilities is a first epoch again: its ratio is 1.
    fresh = batch._replace(scored=tabular_scored(state.train.params, FROZEN, batch.sequences))
    config, optimizer = PPOConfig(ppo_epochs=1), sgd()
    _, metrics = update_of(config, optimizer, batch_size=16)(state, FROZEN, fresh, jax.random.key(0))
    assert finalize(metrics)["ppo/log_ratio_abs_max"] < 1e-5


@pytest.mark.parametrize("minibatch_size", [1, 8])
def test_lore_5_2_accumulation_changes_nothing(batch: PPOBatch, minibatch_size: int) -> None:
    config = PPOConfig(ppo_epochs=1)
    expected, whole = one_update(config, batch, minibatch_size=4)
    state, metrics = one_update(config, batch, minibatch_size=minibatch_size)
    assert_close(state.train.params, expected.train.params, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_lore_1_12_rows_without_actions_change_nothing(batch: PPOBatch) -> None:
    config = PPOConfig(ppo_epochs=1, scale_reward="running", target=1.0)
    expected, plain = one_update(config, batch, batch_size=16)

    def with_padding(x: jax.Array) -> jax.Array:  # garbage rows in front, NaN where floats allow it
        garbage = jnp.full((3, *x.shape[1:]), jnp.nan) if x.dtype == jnp.float32 else x[:3]
        return jnp.concatenate([garbage, x]).astype(x.dtype)

    padded = jax.tree.map(with_padding, batch)
    mask = padded.sequences.mask.at[:3].set(False)
    padded = padded._replace(sequences=padded.sequences._replace(mask=mask))
    state, metrics = one_update(config, padded, batch_size=16)
    assert_close(state.train.params, expected.train.params, rtol=1e-5, atol=1e-6)
    assert float(state.kl_coef) == pytest.approx(float(expected.kl_coef))
    assert metrics == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_a_ragged_last_minibatch_is_trained_on_and_counted() -> None:
    batch = tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=10)
    state, metrics = one_update(PPOConfig(ppo_epochs=3), batch)
    assert int(state.train.step) == 3 * math.ceil(10 / 8)
    assert metrics["completion/length_mean"] == pytest.approx(float(batch.sequences.mask.sum(axis=1).mean()))


class TestKLController:
    def test_lore_3_8_it_moves_once_an_iteration_by_the_number_of_rollouts(self, batch: PPOBatch) -> None:
        k1 = (
            np.where(batch.sequences.mask, batch.scored.logprobs - batch.scored.ref_logprobs, 0)
            .sum(axis=1)
            .mean()
        )
        config = PPOConfig(init_kl_coef=0.1, target=float(k1 / 1.1), horizon=100, ppo_epochs=3)
        state, metrics = one_update(config, batch)
        assert float(state.kl_coef) == pytest.approx(0.1 * (1 + 0.1 * 16 / 100), rel=1e-5)
        assert metrics["kl/coef"] == pytest.approx(0.1)  # the one these rewards were made with

    def test_without_a_target_the_weight_is_fixed(self, batch: PPOBatch) -> None:
        state, _ = one_update(PPOConfig(init_kl_coef=0.1), batch)
        assert float(state.kl_coef) == np.float32(0.1)

    def test_lore_3_3_the_penalty_enters_the_rewards(self, batch: PPOBatch) -> None:
        free, _ = one_update(PPOConfig(init_kl_coef=0.0, ppo_epochs=1), batch)
        bound, _ = one_update(PPOConfig(init_kl_coef=1.0, ppo_epochs=1), batch)
        assert not np.allclose(free.train.params["table"]["kernel"], bound.train.params["table"]["kernel"])


class TestNonFinite:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_lore_7_6_a_bad_reward_leaves_parameters_moments_and_controller(
        self, batch: PPOBatch, bad: float
    ) -> None:
        config = PPOConfig(ppo_epochs=2, scale_reward="running", cliprange_reward=None)
        optimizer = adam()
        state, metrics = one_update(config, batch._replace(scores=batch.scores.at[0, 0].set(bad)), optimizer)
        before = init_ppo_state(PARAMS, optimizer, config)
        jax.tree.map(np.testing.assert_array_equal, state.train.params, before.train.params)
        jax.tree.map(
            np.testing.assert_array_equal,
            state.train.opt_state.inner_state,
            before.train.opt_state.inner_state,
        )
        jax.tree.map(np.testing.assert_array_equal, state.moments, before.moments)
        assert metrics["optim/skipped_in_a_row"] == metrics["optim/skipped_steps"] == 4
        assert int(state.train.step) == 4 and np.isfinite(float(state.kl_coef))

    def test_lore_7_6_infinite_logits_leave_the_parameters(self, batch: PPOBatch) -> None:
        config, optimizer = PPOConfig(), sgd()
        frozen: Frozen = {"bias": FROZEN["bias"].at[4].set(jnp.inf)}
        state = init_ppo_state(PARAMS, optimizer, config)
        after, metrics = update_of(config, optimizer)(state, frozen, batch, jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, after.train.params, PARAMS)
        assert finalize(metrics)["optim/skipped_steps"] == int(after.train.step) == 8


def test_lore_5_10_the_entropy_bonus_raises_the_entropy(batch: PPOBatch) -> None:
    still = batch._replace(scores=jnp.zeros_like(batch.scores))
    config = PPOConfig(entropy_coef=1.0, vf_coef=0.0, init_kl_coef=0.0, lam=0.0, ppo_epochs=1)
    flat = still._replace(scored=still.scored._replace(values=jnp.zeros_like(still.scored.values)))
    optimizer = sgd(1.0)
    state = init_ppo_state(PARAMS, optimizer, config)
    update, entropies = update_of(config, optimizer, batch_size=16), []
    for seed in range(5):
        state, metrics = update(state, FROZEN, flat, jax.random.key(seed))
        entropies.append(finalize(metrics)["ppo/entropy"])
    assert all(later > earlier for earlier, later in itertools.pairwise(entropies))


def test_lore_9_2_the_same_key_gives_the_same_bits(batch: PPOBatch) -> None:
    first = one_update(PPOConfig(), batch, seed=5)
    again = one_update(PPOConfig(), batch, seed=5)
    other = one_update(PPOConfig(), batch, seed=6)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # The key orders the minibatches: another key, another order.
    assert np.any(first[0].train.params["table"]["kernel"] != other[0].train.params["table"]["kernel"])


def test_lore_4_18_a_discount_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"`method.gamma` = 0.99 discounts per token: at the first of 40 tokens"
    ):
        update_of(PPOConfig(gamma=0.99), sgd())


class TestConfig:
    def test_defaults_are_those_of_trlx(self) -> None:
        config = PPOConfig()
        assert (config.ppo_epochs, config.num_rollouts, config.chunk_size) == (4, 128, 128)
        assert (config.init_kl_coef, config.target, config.horizon) == (0.001, None, 10000)
        assert (config.gamma, config.lam, config.cliprange, config.cliprange_value) == (1, 0.95, 0.2, 0.2)
        assert (config.vf_coef, config.scale_reward, config.cliprange_reward) == (1, "ignored", 10)
        assert config.gen_kwargs == dict(max_new_tokens=40, top_k=0, top_p=1.0, do_sample=True)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("ppo_epochs", 0),
            ("num_rollouts", 0),
            ("chunk_size", 0),
            ("init_kl_coef", -0.1),
            ("target", 0.0),
            ("horizon", 0),
            ("gamma", 1.5),
            ("lam", -0.1),
            ("cliprange", 0.0),
            ("cliprange_value", 0.0),
            ("vf_coef", -1.0),
            ("scale_reward", "runing"),
            ("ref_std", 2.0),
            ("cliprange_reward", -1.0),
            ("gen_kwargs", {}),
            ("gen_experience_kwargs", {"top_k": 3}),
            ("num_value_layers_unfrozen", -1),
        ],
    )
    def test_values_out_of_range_are_named(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"`method.{field}` must be"):
            PPOConfig(**{field: value})

    def test_an_edited_config_is_checked_again(self) -> None:
        config = replace(PPOConfig(), gamma=0.5)
        config.gamma = 2.0
        with pytest.raises(ValueError, match=r"`method.gamma` must be in \[0, 1\], got 2.0"):
            config.validate()

    def test_a_temperature_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`temperature` must be that of the rollouts"):
            update_of(PPOConfig(), sgd(), temperature=0.0)
