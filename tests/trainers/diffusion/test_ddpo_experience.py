# SPDX-License-Identifier: Apache-2.0
"""The samples of an epoch between sampler and learner: what starts alike, what is judged together, what is left out."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.ddpo_config import DDPOConfig
from jrl.rollout.prompt_statistics import group_advantages
from jrl.rollout.rewards import RewardError
from jrl.trainers.diffusion.ddpo_evaluation import evaluate_prompts
from jrl.trainers.diffusion.ddpo_experience import Collector
from jrl.trainers.diffusion.ddpo_prompts import Prompt, PromptList
from jrl.trainers.diffusion.ddpo_sampling import Batches
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.typing import Trajectories

ROWS, REPEATS = 6, 3
PROMPTS = ("a cat", "a dog", "a fox", "a hen")


class Recorder:
    """A sampler that computes nothing: images are as bright as their numbers, and latents hold what it was given."""

    rows = ROWS

    def __init__(self):
        self.params, self.starts, self.steps = [], [], []

    def negative(self, frozen):
        return jnp.zeros((1, 1, 1))

    def tokenize(self, texts):
        return np.asarray([[len(text), ord(text[2])] for text in texts], np.int32)

    def __call__(self, params, frozen, negative, texts, key, *, starts, steps):
        assert len(texts) == ROWS
        self.params.append(params)
        self.starts += list(starts)
        self.steps += list(steps)
        latents = jnp.stack([jnp.asarray(starts, jnp.float32), jnp.asarray(steps, jnp.float32)], axis=1)
        trajectories = Trajectories(
            latents[..., None, None, None], jnp.zeros((ROWS, 1)), jnp.zeros((ROWS, 1, 1))
        )
        images = jnp.asarray(steps, jnp.float32).reshape(ROWS, 1, 1, 1) / 100
        return trajectories, jnp.broadcast_to(images, (ROWS, 2, 2, 3))


def rewards_of(batches, is_async):
    """r = n², not the same distance apart in any two groups, so that every other grouping gives other advantages."""
    found = [np.round(batch[0].mean(axis=(1, 2, 3)) * 100).astype(np.float32) ** 2 for batch in batches]
    return tuple(found), ({},) * len(found)


def failing_on(*numbers):
    """NaN for these rows."""

    def rewards(batches, is_async):
        found = np.concatenate(rewards_of(batches, is_async)[0])
        found[list(numbers)] = np.nan
        return tuple(found.reshape(-1, ROWS)), ({},) * len(batches)

    return rewards


def collect(rewards=rewards_of, skip_errors=False, **method):
    sampler, names = Recorder(), iter(PROMPTS * 3)
    config = DDPOConfig(
        sample_batch_size=ROWS,
        sample_num_batches_per_epoch=2,
        sample_num_steps=1,
        **{"sample_images_per_prompt": REPEATS, "advantage": "group", **method},
    )
    collector = Collector(sampler, config, lambda: (next(names), {}), rewards, skip_errors=skip_errors)
    found = collector(
        None,
        None,
        0,
        jax.random.key(0),
        Collector.fresh_memory(0),
        while_sampling=lambda: None,
        stopwatch=Stopwatch(),
    )
    return sampler, found


def all_rewards():
    return np.arange(2 * ROWS, dtype=np.float64) ** 2


GROUPS = np.repeat(np.arange(4), REPEATS)


def test_lore_4_13_samples_of_a_prompt_stay_together():
    """Drawn once, sampled beside each other, and judged by each other alone."""
    _, found = collect()
    prompts = [text for batch in found.images for text in batch[1]]
    assert prompts == [text for text in PROMPTS for _ in range(REPEATS)]
    expected = group_advantages(all_rewards(), GROUPS)
    np.testing.assert_array_equal(found.batch.advantages, expected)
    assert np.unique(np.round(expected, 3)).size > REPEATS  # another grouping would give other numbers


@pytest.mark.parametrize("std", ["group", "global"])
def test_advantages_are_divided_as_the_method_says(std):
    _, found = collect(advantage_std=std)
    np.testing.assert_array_equal(found.batch.advantages, group_advantages(all_rewards(), GROUPS, std=std))


@pytest.mark.parametrize("shared", [False, True])
def test_a_first_noise_is_shared_within_a_group_and_never_across(shared):
    sampler, found = collect(share_initial_noise=shared)
    starts = np.asarray(sampler.starts)
    assert len(np.unique(starts)) == (4 if shared else 12)
    if shared:
        np.testing.assert_array_equal(starts, GROUPS)
    assert sampler.steps == list(range(12))
    np.testing.assert_array_equal(found.batch.trajectories.latents[:, 0, 0, 0, 0], starts)


@pytest.mark.parametrize("kind", ["group", "global", "per_prompt_buffer"])
def test_images_without_a_reward_are_left_out(kind):
    """They are marked, and the others are judged as if they had never been."""
    options = {"advantage": kind, "per_prompt_stat_tracking_min_count": 2}
    _, found = collect(failing_on(0, 1, 7), skip_errors=True, **options)
    expected = np.ones(12, bool)
    expected[[0, 1, 7]] = False
    np.testing.assert_array_equal(found.batch.valid, expected)
    assert found.metrics["reward/failed"] == 3 and found.metrics["reward/failed_fraction"] == 3 / 12
    advantages = np.asarray(found.batch.advantages)
    assert (advantages[~expected] == 0).all()
    if kind == "group":
        np.testing.assert_array_equal(
            advantages[expected], group_advantages(all_rewards()[expected], GROUPS[expected])
        )


def test_where_all_have_rewards_all_count():
    _, found = collect()
    assert found.batch.valid is not None and np.asarray(found.batch.valid).all()


def evaluate(rewards, **options):
    return evaluate_prompts(Recorder(), None, None, PROMPTS, jax.random.key(0), rewards, **options)


def test_an_evaluation_without_a_reward_fails_unless_errors_are_skipped():
    def nothing(batches, is_async):
        return tuple(np.full(len(batch[1]), np.nan) for batch in batches), ({},) * len(batches)

    with pytest.raises(RewardError, match="evaluation: the reward must be finite"):
        evaluate(nothing, skip_errors=False)
    assert np.isnan(evaluate(nothing, skip_errors=True).rewards).all()


def test_images_and_trajectories_are_not_kept_on_the_device():
    sampler = Recorder()
    prompts = [Prompt("a cat", {})] * ROWS * 3

    images = []

    def dispatch(number):
        numbers = np.arange(ROWS)
        found = sampler(None, None, None, ["a cat"] * ROWS, None, starts=numbers, steps=numbers + number)
        images.append(weakref.ref(found[1]))
        return found

    batches = Batches(dispatch, prompts, 3, lambda: None)
    for number in range(3):
        assert batches[number][0][0, 0, 0, 0] == np.float32(number / 100)
        assert [one() is not None for one in images] == [False] * (number + 1) + [True] * (number < 2)
    assert len(batches.take_trajectories()) == 3 and batches.take_trajectories() == []


def test_metadata_of_a_list_are_copies():
    prompts = PromptList([{"prompt": "a cat", "tags": ["x"]}])
    before = prompts.sha256()
    prompts()[1]["tags"].append("y")
    assert prompts()[1] == {"tags": ["x"]} and prompts.sha256() == before
