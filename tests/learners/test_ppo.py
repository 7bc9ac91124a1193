# SPDX-License-Identifier: Apache-2.0
"""The PPO update on a tabular policy: every rule that needs a real update, none that needs a transformer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.online import OnlineState
from jrl.learners.ppo import PPOConfig
from jrl.ops.metrics import finalize
from jrl.typing import Rollouts
from tests.learners.batches import CHUNK_BYTES, adam, sgd
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.learners.tabular import (
    EOS,
    tabular_batch,
    tabular_params,
    tabular_policy,
    tabular_scored,
    tabular_sequences,
)

PARAMS, FROZEN = tabular_params(seed=3)
NUM_ROWS = 16
# Two epochs of two steps with everything that moves; and one step of gradient descent on the policy alone.
FULL = PPOConfig(
    ppo_epochs=2, init_kl_coef=0.1, target=1.0, horizon=100, scale_reward="running", cliprange_reward=None
)
ONE_STEP = PPOConfig(ppo_epochs=1, init_kl_coef=0.0, vf_coef=0.0)
FULL_OPTIMIZER, ONE_STEP_OPTIMIZER = adam(0.05), sgd()
Update = Callable[..., tuple[OnlineState, dict[str, float]]]


def make(config: PPOConfig, optimizer: Any, **sizes: Any) -> Update:
    """`(batch, seed, kl_coef) -> (state, metrics)` after one update from `PARAMS`; compiled on first use."""
    update = jax.jit(
        ppo_update(tabular_policy(), optimizer, config, logprob_chunk_bytes=CHUNK_BYTES, **sizes)
    )

    def run(
        batch: Rollouts,
        seed: int = 0,
        kl_coef: float | None = None,
        frozen: Any = FROZEN,
        params: Any = PARAMS,
    ) -> tuple[OnlineState, dict[str, float]]:
        state = ppo_state(params, optimizer, config)
        if kl_coef is not None:
            state = state.replace(kl_coef=jnp.float32(kl_coef))
        state, metrics = update(state, frozen, batch, jax.random.key(seed))
        return state, finalize(metrics)

    return run


@pytest.fixture(scope="module")
def batch() -> Rollouts:
    return tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def full(batch: Rollouts) -> Update:
    update = make(FULL, FULL_OPTIMIZER, batch_size=8, minibatch_size=4, temperature=1.0)
    update(batch)
    return update


@pytest.fixture(scope="module")
def hot(batch: Rollouts) -> Update:
    update = make(FULL, FULL_OPTIMIZER, batch_size=8, minibatch_size=4, temperature=2.0)
    update(batch)
    return update


@pytest.fixture(scope="module")
def one_step(batch: Rollouts) -> Update:
    update = make(ONE_STEP, ONE_STEP_OPTIMIZER, batch_size=16, minibatch_size=4, temperature=1.0)
    update(batch)
    return update


@pytest.fixture(scope="module")
def unaccumulated(batch: Rollouts) -> Update:
    """The same step in one microbatch; also compiled for three more rows."""
    update = make(ONE_STEP, ONE_STEP_OPTIMIZER, batch_size=16, minibatch_size=16, temperature=1.0)
    update(batch)
    update(with_padding(batch))
    return update


def with_padding(batch: Rollouts) -> Rollouts:
    """Three rows without actions in front, NaN where floats allow it."""

    def pad(x: jax.Array) -> jax.Array:
        garbage = jnp.full((3, *x.shape[1:]), jnp.nan) if x.dtype == jnp.float32 else x[:3]
        return jnp.concatenate([garbage, x]).astype(x.dtype)

    padded = jax.tree.map(pad, batch)
    mask = padded.sequences.mask.at[:3].set(False)
    return padded._replace(sequences=padded.sequences._replace(mask=mask))


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_lore_2_3_the_first_ratio_is_one(batch: Rollouts, full: Update, hot: Update) -> None:
    _, metrics = full(batch)
    ulp = np.spacing(np.float32(jnp.max(jnp.abs(batch.scored.logprobs))))
    assert metrics["ppo/ratio_max_dev_first_minibatch"] <= 4 * ulp
    assert metrics["ppo/log_ratio_abs_max"] > 0.01  # later steps have moved
    # A temperature that is not the rollouts' own shows at once.
    assert hot(batch)[1]["ppo/ratio_max_dev_first_minibatch"] > 0.01


def test_lore_2_1_the_update_divides_logits_by_the_temperature(hot: Update) -> None:
    cooler = PARAMS | {"table": {"kernel": PARAMS["table"]["kernel"] / 2.0}}
    rollouts = tabular_batch(cooler, FROZEN, jax.random.key(7), num_rows=NUM_ROWS)
    assert hot(rollouts)[1]["ppo/ratio_max_dev_first_minibatch"] < 1e-5


def test_lore_1_4_a_reward_for_stopping_raises_the_logit_of_eos(one_step: Update) -> None:
    half = NUM_ROWS // 2
    stopped = tabular_sequences([[3, EOS, 0, 0]] * half + [[3, 4, 5, 6]] * half, [2] * half + [4] * half)
    scores = jnp.zeros((NUM_ROWS, 4)).at[:half, 1].set(1.0)
    scored = tabular_scored(PARAMS, FROZEN, stopped)
    state, _ = one_step(Rollouts(stopped, scored._replace(values=jnp.zeros_like(scores)), scores))
    change = state.train.params["table"]["kernel"] - PARAMS["table"]["kernel"]
    assert change[3, EOS] > 0 and change[3, EOS] == jnp.max(change[3])


def test_lore_5_5_the_first_loss_is_zero_and_its_gradient_is_not(batch: Rollouts, one_step: Update) -> None:
    _, metrics = one_step(batch)
    assert abs(metrics["ppo/policy_loss"]) < 1e-6
    assert metrics["optim/grad_norm"] > 0.01


def test_lore_5_9_old_logprobs_are_those_of_the_rollouts_in_every_epoch(
    batch: Rollouts, full: Update
) -> None:
    state, metrics = full(batch)
    assert metrics["ppo/log_ratio_abs_max"] > 1e-3
    # From the parameters after the update, the rollouts' own log-probabilities are still what counts ...
    _, stale = full(batch, params=state.train.params)
    assert stale["ppo/ratio_max_dev_first_minibatch"] > 1e-2
    # ... and only fresh ones make a first epoch again.
    fresh = batch._replace(scored=tabular_scored(state.train.params, FROZEN, batch.sequences))
    _, again = full(fresh, params=state.train.params)
    assert again["ppo/ratio_max_dev_first_minibatch"] < 1e-5


def test_lore_5_2_accumulation_changes_nothing(
    batch: Rollouts, one_step: Update, unaccumulated: Update
) -> None:
    expected, whole = unaccumulated(batch)
    state, metrics = one_step(batch)
    assert_close(state.train.params, expected.train.params, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_lore_1_12_rows_without_actions_change_nothing(batch: Rollouts, unaccumulated: Update) -> None:
    expected, plain = unaccumulated(batch)
    state, metrics = unaccumulated(with_padding(batch))
    assert_close(state.train.params, expected.train.params, rtol=1e-5, atol=1e-6)
    assert_close(state.moments, expected.moments, rtol=1e-6)
    assert metrics == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert int(state.train.step) == 2  # 19 rows in batches of 16: the second, of padding alone, moves nothing


class TestKLController:
    def test_lore_3_8_it_moves_once_an_iteration_by_the_number_of_rollouts(
        self, batch: Rollouts, full: Update
    ) -> None:
        k1 = batch.scored.logprobs - batch.scored.ref_logprobs
        kl = float(jnp.sum(jnp.where(batch.sequences.mask, k1, 0)) / NUM_ROWS)
        state, metrics = full(batch)
        error = np.clip(kl / FULL.target - 1, -0.2, 0.2)
        assert error != 0
        assert float(state.kl_coef) == pytest.approx(0.1 * (1 + error * NUM_ROWS / FULL.horizon), rel=1e-5)
        assert metrics["kl/coef"] == pytest.approx(0.1)  # the one these rewards were made with

    def test_without_a_target_the_weight_is_fixed(self, batch: Rollouts, one_step: Update) -> None:
        state, _ = one_step(batch, kl_coef=0.3)
        assert float(state.kl_coef) == np.float32(0.3)

    def test_lore_3_3_the_penalty_enters_the_rewards(self, batch: Rollouts, one_step: Update) -> None:
        free, bound = one_step(batch)[0], one_step(batch, kl_coef=1.0)[0]
        assert not np.allclose(free.train.params["table"]["kernel"], bound.train.params["table"]["kernel"])


class TestNonFinite:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_lore_7_6_a_bad_reward_leaves_parameters_moments_and_controller(
        self, batch: Rollouts, full: Update, bad: float
    ) -> None:
        state, metrics = full(batch._replace(rewards=batch.rewards.at[0, 0].set(bad)))
        before = ppo_state(PARAMS, FULL_OPTIMIZER, FULL)
        assert_equal(state.train.params, before.train.params)
        assert_equal(state.train.opt_state.inner_state, before.train.opt_state.inner_state)
        assert_equal(state.moments, before.moments)
        assert metrics["optim/skipped_in_a_row"] == metrics["optim/skipped_steps"] == 4
        assert int(state.train.step) == 4 and np.isfinite(float(state.kl_coef))

    def test_lore_7_6_infinite_logits_leave_the_parameters(self, batch: Rollouts, full: Update) -> None:
        after, metrics = full(batch, frozen={"bias": FROZEN["bias"].at[4].set(jnp.inf)})
        assert_equal(after.train.params, PARAMS)
        assert metrics["optim/skipped_steps"] == int(after.train.step) == 4


def test_lore_9_2_the_same_key_gives_the_same_bits(batch: Rollouts, full: Update) -> None:
    first, again, other = full(batch, seed=5), full(batch, seed=5), full(batch, seed=6)
    assert_equal(first, again)
    # The key orders the minibatches: another key, another order.
    assert np.any(first[0].train.params["table"]["kernel"] != other[0].train.params["table"]["kernel"])


def test_lore_5_10_the_entropy_bonus_raises_the_entropy(batch: Rollouts) -> None:
    zeros = jnp.zeros_like(batch.rewards)
    still = batch._replace(rewards=zeros, scored=batch.scored._replace(values=zeros))
    config = replace(ONE_STEP, entropy_coef=1.0)
    update = make(config, sgd(1.0), batch_size=16, minibatch_size=16, temperature=1.0)
    params, entropies = PARAMS, []
    for _ in range(5):
        state, metrics = update(still, params=params)
        params = state.train.params
        entropies.append(metrics["ppo/entropy"])
    assert all(later > earlier for earlier, later in itertools.pairwise(entropies))


def test_lore_4_18_a_discount_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"`method.gamma` = 0.99 discounts per token: at the first of 40 tokens"
    ):
        make(PPOConfig(gamma=0.99), sgd(), batch_size=8, minibatch_size=4, temperature=1.0)


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
            make(PPOConfig(), sgd(), batch_size=8, minibatch_size=4, temperature=0.0)
