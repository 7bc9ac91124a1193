# SPDX-License-Identifier: Apache-2.0
"""Samples of one DDPO epoch: the device denoises while the host rewards the images that are there already.

Sampling calls overlap: while the user's reward function works on batch m, the device samples batch m + 1. What is
random of a row depends on the epoch's key and the row's number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.learners.ddpo_config import DDPOConfig
from jrl.rollout.prompt_statistics import global_advantages, group_advantages, prompt_advantages, prompt_key
from jrl.rollout.reward_columns import mean_and_std
from jrl.rollout.rewards import RewardError
from jrl.trainers.diffusion.ddpo_prompts import PromptFunction, PromptRandomness, draw_prompts
from jrl.trainers.diffusion.ddpo_rewards import Waiting
from jrl.trainers.diffusion.ddpo_sampling import Batches, Sampler
from jrl.trainers.diffusion.image_judging import ComputeRewards, OwnImages, judge_images
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.typing import DDPOBatch, Frozen, Params, PRNGKey, Trajectories


class Experience(NamedTuple):
    """Samples and rewards that an epoch collected.

    Attributes:
      batch: For the learner.
      metrics: Host-side figures.
      memory: What the next epoch begins with, plain JSON; it counts once this epoch is learned from.
      images: What the user's hook gets: [images, prompts, metadata, rewards, reward metadata] of each batch; the last
        is what the reward function said in this process.
      rows: One dict an image, for the samples' log.
    """

    batch: DDPOBatch
    metrics: dict[str, float]
    memory: dict[str, Any]
    images: list[list[Any]]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Collector:
    """Collects the samples of an epoch.

    Attributes:
      sampler: Of `method.sample_batch_size` rows.
      method: How many batches, and what advantages are.
      prompt_function: The user's.
      compute_rewards: (batches, whether on threads) → reward vectors and metadata.
      skip_errors: Whether rewards may be missing.
      own_images: Which images of a sampling call this process judges.
    """

    sampler: Sampler
    method: DDPOConfig
    prompt_function: PromptFunction
    compute_rewards: ComputeRewards
    skip_errors: bool = False
    own_images: OwnImages = np.arange

    @staticmethod
    def fresh_memory(seed: int) -> dict[str, Any]:
        """Memory with which the first epoch begins."""
        return {"random": PromptRandomness(seed).state(), "rewards": {}}

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        epoch: int,
        key: PRNGKey,
        memory: Mapping[str, Any],
        *,
        while_sampling: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> Experience:
        """Draws prompts, samples, rewards, and takes advantages.

        Args:
          params: Of the policy.
          frozen: The rest.
          epoch: Its number, for messages.
          key: Of this epoch's samples.
          memory: What the epoch before left.
          while_sampling: Called once the first sampling call is on its way.
          stopwatch: Receives `rollout` (waiting for images) and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the images are on disk by then.
        """
        method, rows = self.method, self.sampler.rows
        count, repeats = method.sample_num_batches_per_epoch, method.sample_images_per_prompt
        randomness = PromptRandomness(0)
        randomness.load(memory["random"])
        prompts = draw_prompts(self.prompt_function, randomness, rows * count, images_per_prompt=repeats)
        negative = self.sampler.negative(frozen)

        def dispatch(number: int) -> tuple[Trajectories, jax.Array]:
            numbers = np.arange(number * rows, (number + 1) * rows, dtype=np.int32)
            starts = numbers // repeats if method.share_initial_noise else numbers
            texts = [prompt.text for prompt in prompts[number * rows : (number + 1) * rows]]
            return self.sampler(params, frozen, negative, texts, key, starts=starts, steps=numbers)

        batches = Batches(dispatch, prompts, count, while_sampling)
        total = Waiting()
        with total:
            vectors, found = judge_images(
                self.compute_rewards,
                batches,
                method.async_reward_computation,
                counts=[rows] * count,
                own=self.own_images(rows),
                name_batch=partial(batch_name, epoch),
                skip_errors=self.skip_errors,
            )
        stopwatch.add("rollout", batches.waiting.seconds)
        stopwatch.add("reward", total.seconds - batches.waiting.seconds)
        rewards = np.concatenate(vectors)
        keys = [prompt_key(tokens) for tokens in self.sampler.tokenize([p.text for p in prompts])]
        advantages, kept, metrics = self._advantages(rewards, keys, memory["rewards"])
        batch = DDPOBatch(
            _joined(batches.take_trajectories()),
            negative,
            jnp.asarray(advantages),
            valid=jnp.asarray(np.isfinite(rewards)),
        )
        return Experience(
            batch,
            metrics,
            {"random": randomness.state(), "rewards": kept},
            [[*batches[number], vectors[number], found[number]] for number in range(count)],
            [
                {"prompt": prompt.text, "reward": None if np.isnan(reward) else float(reward)}
                for prompt, reward in zip(prompts, rewards, strict=True)
            ],
        )

    def _advantages(
        self, rewards: np.ndarray, keys: Sequence[str], kept: Mapping[str, list[float]]
    ) -> tuple[np.ndarray, dict[str, list[float]], dict[str, float]]:
        """(advantages, rewards of prompts to keep, metrics); an image without a reward counts in none, and has 0."""
        method, valid = self.method, np.isfinite(rewards)
        if not valid.any():
            raise RewardError(
                "`reward_function` failed on every image of the epoch, so `reward_errors: skip` leaves nothing to "
                "learn from. Is the service it calls down?"
            )
        known, state = rewards[valid].astype(np.float64), dict(kept)
        mean, std = mean_and_std(known)
        metrics = {
            "rollout/images": float(len(rewards)),
            "reward/mean": mean,
            "reward/std": std,
            "reward/failed": float(np.sum(~valid)),
            "reward/failed_fraction": float(np.mean(~valid)),
        }
        if method.advantage_kind == "per_prompt_buffer":
            tracked = prompt_advantages(
                state,
                [key for key, holds in zip(keys, valid, strict=True) if holds],
                known,
                buffer_size=method.per_prompt_stat_tracking_buffer_size,
                min_count=method.per_prompt_stat_tracking_min_count,
            )
            found, state = tracked.advantages, tracked.state
            metrics["reward/prompts_tracked"] = tracked.num_tracked / tracked.num_prompts
        elif method.advantage_kind == "group":
            groups = np.arange(len(rewards)) // method.sample_images_per_prompt
            found = group_advantages(known, groups[valid], std=method.advantage_std)
        else:
            found = global_advantages(known)
        advantages = np.zeros(len(rewards), np.float32)
        advantages[valid] = found
        return advantages, state, metrics


@jax.jit
def _concatenate(parts: list[Trajectories]) -> Trajectories:
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


def _joined(parts: list[Trajectories]) -> Trajectories:
    """All rows as one."""
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def batch_name(epoch: int, number: int) -> str:
    """Name of a sampling batch, for messages."""
    return f"epoch {epoch}, sampling batch {number}"
