# SPDX-License-Identifier: Apache-2.0
"""DDPO's update on a policy simple enough to be worked out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ddpo import DDPOState, init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.ddpo_loss_scale import LARGEST, init_loss_scale, next_loss_scale
from jrl.ops.metrics import finalize
from jrl.typing import DDPOBatch
from tests.diffusion_toy import SD_SCHEDULE
from tests.learners.batches import copied, sgd
from tests.learners.ddpo_bandit import (
    FROZEN,
    SIZE,
    STEPS,
    bandit,
    bandit_config,
    sampled,
    sampler,
    slopes_and_noise,
    theta,
)

NUM_SAMPLES = 4


@functools.cache
def diffuse() -> Any:
    return sampler(bandit_config())


@functools.cache
def batch() -> DDPOBatch:
    """Four samples of `theta()`."""
    return sampled(theta(), NUM_SAMPLES, diffuse=diffuse())


def run(
    config: DDPOConfig,
    *,
    samples: DDPOBatch | None = None,
    minibatch_size: int = NUM_SAMPLES,
    dtype: Any = jnp.float32,
) -> tuple[DDPOState, dict[str, float]]:
    """The state behind an update of `theta()`, and its metrics."""
    optimizer = sgd(1.0)
    update = jax.jit(
        make_ddpo_update(
            bandit(dtype),
            SD_SCHEDULE,
            optimizer,
            config,
            batch_size=NUM_SAMPLES,
            minibatch_size=minibatch_size,
        ),
        donate_argnums=0,
    )
    state = init_ddpo_state(copied(theta()), optimizer, config)
    state, metrics = update(state, FROZEN, batch() if samples is None else samples, jax.random.key(0))
    return state, finalize(metrics)


@functools.cache
def plain() -> tuple[DDPOState, dict[str, float]]:
    """One step on all samples."""
    return run(bandit_config())


@functools.cache
def two_passes() -> tuple[DDPOState, dict[str, float]]:
    """A step on all samples in each of two passes."""
    return run(bandit_config(train_num_inner_epochs=2))


def moved(state: DDPOState) -> np.ndarray:
    return np.asarray(state.train.params["theta"] - theta()["theta"])


class TestBandit:
    def test_lore_8_8_the_gradient_is_the_noise_over_the_deviation(self) -> None:
        """∇L = −mean over samples and steps of A·(c/σ)·z/D, and the first step goes down it."""
        state, metrics = plain()
        slopes, noise = slopes_and_noise(theta(), batch())
        weights = np.asarray(batch().advantages)[:, None] * slopes[None, :]
        wanted = np.mean(weights[:, :, None, None, None] * noise, axis=(0, 1)) / SIZE
        np.testing.assert_allclose(moved(state), wanted, rtol=2e-4, atol=1e-7)
        assert metrics["optim/grad_norm"] == pytest.approx(np.linalg.norm(wanted), rel=2e-4)
        assert metrics["ddpo/loss"] == pytest.approx(-float(np.mean(batch().advantages)), rel=1e-5)

    @pytest.mark.slow
    def test_lore_9_5_reward_raises_negated_reward_lowers_and_none_leaves_it(self) -> None:
        """Reward = the mean of the clean latents, 32 samples an epoch."""
        config = bandit_config(train_clip_range=0.05)
        update = jax.jit(
            make_ddpo_update(bandit(), SD_SCHEDULE, sgd(20.0), config, batch_size=32, minibatch_size=32)
        )
        brightness = {}
        for sign in (1.0, -1.0, 0.0):
            state = init_ddpo_state(theta(), sgd(20.0), config)
            curve = []
            for epoch in range(6):
                samples = sampled(state.train.params, 32, epoch, diffuse=diffuse())
                rewards = jnp.mean(samples.trajectories.latents[:, -1], axis=(1, 2, 3))
                advantages = sign * (rewards - jnp.mean(rewards)) / jnp.std(rewards)
                state, _ = update(
                    state, FROZEN, samples._replace(advantages=advantages), jax.random.key(epoch)
                )
                curve.append(float(jnp.mean(rewards)))
            brightness[sign] = curve[-1] - curve[0], float(jnp.std(rewards))
            still = np.abs(moved(state)).max()
        rise, fall = brightness[1.0][0], brightness[-1.0][0]
        deviation = brightness[0.0][1]
        assert rise > deviation and fall < -deviation, (brightness, deviation)
        assert still == 0.0


class TestExactness:
    def test_lore_5_2_microbatches_do_not_change_the_step(self) -> None:
        (whole, wanted), (parts, metrics) = plain(), run(bandit_config(), minibatch_size=1)
        np.testing.assert_allclose(moved(parts), moved(whole), rtol=0, atol=1e-6 * np.abs(moved(whole)).max())
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)

    @pytest.mark.slow
    def test_lore_2_3_before_the_first_step_the_ratio_is_one(self) -> None:
        _, metrics = two_passes()
        assert metrics["ddpo/pre_update_ratio_max_dev"] <= 1e-6
        assert metrics["ddpo/pre_update_clip_fraction"] == 0.0
        assert metrics["ddpo/ratio_max_dev"] > 1e-3

    @pytest.mark.slow
    def test_lore_5_9_old_log_probabilities_are_those_of_the_sampler_in_every_pass(self) -> None:
        """One step a pass: the second pass sees exactly the ratio that the first step made."""
        slopes, noise = slopes_and_noise(theta(), batch())
        shift = slopes[None, :, None, None, None] * moved(plain()[0])[None, None]
        change = np.mean(noise * shift - shift**2 / 2, axis=(2, 3, 4))
        found = two_passes()[1]["ddpo/ratio_max_dev"]
        assert found == pytest.approx(np.abs(np.exp(change) - 1).max(), rel=1e-3)


class TestOptions:
    @pytest.mark.slow
    def test_recomputed_log_probabilities_repair_wrong_ones(self) -> None:
        trajectories = batch().trajectories
        wrong = batch()._replace(trajectories=trajectories._replace(logprobs=trajectories.logprobs + 0.01))
        state, metrics = run(bandit_config(old_log_probs="recompute"), samples=wrong)
        assert metrics["ddpo/pre_update_ratio_max_dev"] <= 1e-6
        assert metrics["ddpo/recomputed_logprob_max_dev"] == pytest.approx(0.01, rel=1e-3)
        np.testing.assert_allclose(moved(state), moved(plain()[0]), rtol=1e-4, atol=1e-8)

    @pytest.mark.slow
    def test_the_kl_pulls_towards_the_reference(self) -> None:
        """∇KL = mean over steps of (c/σ)²·(θ − θ_ref)/D, with θ_ref = 0 and no advantage."""
        quiet = batch()._replace(advantages=jnp.zeros(NUM_SAMPLES))
        state, metrics = run(bandit_config(beta_kl=0.5), samples=quiet)
        slopes, _ = slopes_and_noise(theta(), quiet)
        wanted = -0.5 * np.mean(slopes**2) * np.asarray(theta()["theta"]) / SIZE
        np.testing.assert_allclose(moved(state), wanted, rtol=1e-4)
        kl = 0.5 * np.mean(slopes**2) * np.mean(np.square(theta()["theta"]))
        assert metrics["ddpo/kl"] == pytest.approx(kl, rel=1e-4)

    @pytest.mark.slow
    def test_samples_left_out_are_as_if_they_were_not_there(self) -> None:
        """In the loss, its weight, the KL and every metric."""
        kept = jnp.array([0, 2])
        trajectories = jax.tree.map(lambda x: x[kept], batch().trajectories)
        alone = DDPOBatch(trajectories, batch().negative, batch().advantages[kept])
        among = batch()._replace(valid=jnp.array([True, False, True, False]))
        (wanted, figures), (found, metrics) = (
            run(bandit_config(beta_kl=0.5), samples=samples) for samples in (alone, among)
        )
        np.testing.assert_allclose(moved(found), moved(wanted), rtol=1e-5, atol=1e-9)
        assert metrics == pytest.approx(figures, rel=1e-5, abs=1e-6)

    def test_guidance_in_sampling_alone_is_said_aloud(self) -> None:
        config = bandit_config(sample_guidance_scale=5.0, train_cfg=False)
        with pytest.warns(UserWarning, match=r"`method.train_cfg` is False, but sampling guides with 5"):
            make_ddpo_update(bandit(), SD_SCHEDULE, sgd(), config, batch_size=2, minibatch_size=2)

    def test_trajectories_of_another_length_are_refused(self) -> None:
        with pytest.raises(
            ValueError, match=f"must have `sample_num_steps` = {STEPS + 1} steps, got {STEPS}"
        ):
            run(bandit_config(sample_num_steps=STEPS + 1))


class TestLossScale:
    @pytest.mark.slow
    def test_an_overflow_skips_the_step_and_halves_the_factor(self) -> None:
        config = bandit_config(loss_scaling=float(LARGEST))
        loud = batch()._replace(advantages=5.0 * jnp.sign(batch().advantages))
        state, metrics = run(config, samples=loud, dtype=jnp.float16)
        assert state.loss_scale is not None
        assert float(state.loss_scale.factor) == LARGEST / 2 and int(state.loss_scale.good_steps) == 0
        assert not moved(state).any() and metrics["optim/skipped_steps"] == 1
        assert metrics["ddpo/loss_scale"] == LARGEST

    @pytest.mark.slow
    def test_a_scaled_step_is_that_of_the_unscaled_loss_and_the_average_follows_it(self) -> None:
        state, metrics = run(bandit_config(loss_scaling=4096.0, ema_decay=0.75))
        np.testing.assert_allclose(moved(state), moved(plain()[0]), rtol=1e-6)
        assert metrics["ddpo/loss"] == plain()[1]["ddpo/loss"]
        assert metrics["optim/grad_norm"] == pytest.approx(plain()[1]["optim/grad_norm"], rel=1e-6)
        assert state.ema is not None
        average = state.ema["theta"] - theta()["theta"]
        np.testing.assert_allclose(average, 0.25 * moved(state), rtol=1e-4, atol=1e-7)

    def test_it_grows_after_enough_good_steps_and_keeps_its_range(self) -> None:
        state = init_loss_scale(LARGEST / 2)
        factors = []
        for finite in (True, True, True, True, False, True):
            state = next_loss_scale(state, jnp.array(finite), growth_every=2)
            factors.append(float(state.factor) / LARGEST)
        assert factors == [0.5, 1.0, 1.0, 1.0, 0.5, 0.5]
        assert float(next_loss_scale(init_loss_scale(1.0), jnp.array(False), growth_every=2).factor) == 1.0
