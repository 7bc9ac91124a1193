# SPDX-License-Identifier: Apache-2.0
"""Which denoising steps each microbatch of a DDPO update trains on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.accumulate import Rows
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.ddpo_objective import rows_of_batch
from jrl.learners.ddpo_order import Order, microbatches, shuffled_order
from jrl.typing import DDPOBatch, Trajectories

STEPS, SAMPLES = 10, 6


def order(num_samples: int = SAMPLES, **options: object) -> Order:
    config = DDPOConfig(sample_num_steps=STEPS, **options)
    return jax.jit(lambda key: shuffled_order(key, num_samples, config))(jax.random.key(0))


@functools.cache
def two_passes() -> tuple[Order, Rows]:
    """Two passes in batches of four samples, two a microbatch."""
    found = order(train_num_inner_epochs=2)
    lay_out = jax.jit(lambda found: microbatches(found, num_steps=STEPS, batch_size=4, minibatch_size=2))
    return jax.device_get((found, lay_out(found)))


class TestOrder:
    def test_each_pass_visits_every_step_of_every_sample_once(self) -> None:
        found, rows = two_passes()
        # Six samples in batches of four: a full step of 2 · 10 microbatches and one that is half padding, twice.
        assert rows.ids.shape == (4, 20, 2)
        assert sorted(rows.ids[:2][rows.valid[:2]]) == list(range(SAMPLES * STEPS))
        assert rows.valid.sum() == 2 * SAMPLES * STEPS
        assert np.any(found.samples[0] != found.samples[1])
        assert np.any(found.steps[0] != found.steps[1])

    def test_columns_of_the_same_samples_follow_one_another(self) -> None:
        samples = two_passes()[1].ids // STEPS
        assert (samples[0, :STEPS] == samples[0, :1]).all()
        assert not set(samples[0, 0]) & set(samples[0, STEPS])

    def test_lore_8_8_fewer_steps_are_random_ones_of_those_allowed(self) -> None:
        found = order(train_timestep_fraction=0.5, train_skip_last_steps=2, train_timestep_range=(1, STEPS))
        steps = np.asarray(found.steps[0])
        assert steps.shape == (SAMPLES, 3)  # half of the seven steps 1 to 7, rounded down
        assert all(len(set(row)) == 3 for row in steps)
        assert set(steps.ravel()) <= set(range(1, 8))
        assert len({tuple(sorted(row)) for row in steps}) > 1

    def test_lore_9_1_a_samples_steps_do_not_depend_on_how_many_there_are(self) -> None:
        few = order(3, train_num_inner_epochs=2)
        np.testing.assert_array_equal(few.steps, two_passes()[0].steps[:, :3])


def test_a_row_keeps_all_that_belongs_together() -> None:
    """Everything carries its sample and step: state 100·n + s, log-probability −(100·n + s), advantage n."""
    number = np.arange(SAMPLES)[:, None] * 100.0 + np.arange(STEPS + 1)[None, :]
    latents = np.broadcast_to(number[:, :, None, None, None], (SAMPLES, STEPS + 1, 2, 2, 1))
    batch = DDPOBatch(
        Trajectories(
            jnp.asarray(latents), jnp.asarray(-number[:, :-1]), jnp.arange(SAMPLES)[:, None, None] * 1.0
        ),
        jnp.zeros((1, 1, 1)),
        jnp.arange(SAMPLES) * 1.0,
    )
    ids = jnp.asarray(two_passes()[1].ids.ravel())
    rows = jax.device_get(jax.jit(rows_of_batch)(batch, Rows(ids, jnp.ones_like(ids, bool))))
    now = rows.advantages * 100 + rows.steps
    np.testing.assert_array_equal(rows.latents[:, 0, 0, 0], now)
    np.testing.assert_array_equal(rows.next_latents[:, 1, 1, 0], now + 1)
    np.testing.assert_array_equal(rows.old_logprobs, -now)
    np.testing.assert_array_equal(rows.context[:, 0, 0], rows.advantages)
    assert len(set(now)) == SAMPLES * STEPS


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"sample_eta": 0.0},
                r"`method.sample_eta` must be in \(0, 1\]: without noise a step has no density",
            ),
            ({"sample_num_steps": 0}, "`method.sample_num_steps` must be at least 1, got 0"),
            ({"train_clip_range": 0.0}, "`method.train_clip_range` must be positive"),
            ({"train_timestep_fraction": 0.01}, "so large that one of 50 steps is trained, got 0.01"),
            ({"train_timestep_fraction": 1.5}, r"`method.train_timestep_fraction` must be in \(0, 1\]"),
            ({"train_skip_last_steps": 50}, r"must be in 0..49, so that a step is left, got 50"),
            ({"train_timestep_range": (5, 51)}, r"two numbers of steps in 0..50"),
            ({"train_timestep_range": (45, 50), "train_skip_last_steps": 5}, "one of 0 steps is trained"),
            (
                {"per_prompt_stat_tracking": True, "per_prompt_stat_tracking_min_count": 17},
                "`method.per_prompt_stat_tracking_min_count` must be at most",
            ),
            ({"sample_images_per_prompt": 3}, "must be a divisor of the 2 samples of an epoch, got 3"),
            ({"advantage": "rank"}, "`method.advantage` must be one of"),
            ({"advantage": "group"}, "must be other than 'group' where `sample_images_per_prompt` is 1"),
            ({"advantage_std": "none"}, "`method.advantage_std` must be 'group' or 'global'"),
            ({"old_log_probs": "both"}, "`method.old_log_probs` must be one of"),
            ({"ema_decay": 1.0}, r"`method.ema_decay` must be in \[0, 1\)"),
            ({"sample_height": 0}, "`method.sample_height` must be at least 1, or None"),
        ],
    )
    def test_values_out_of_range_are_named(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DDPOConfig(**options)

    def test_what_auto_means(self) -> None:
        assert DDPOConfig().advantage_kind == "global"
        assert DDPOConfig(per_prompt_stat_tracking=True).advantage_kind == "per_prompt_buffer"
        assert DDPOConfig(advantage="global", per_prompt_stat_tracking=True).advantage_kind == "global"
